"""Tests mapped arrays of .npy and .npz files, and their damages."""

import pickle
import zipfile

import numpy as np
import pytest

from tpu_embedding.tools.data import mapped_file
from tpu_embedding.tools.data.array_files import open_npy, open_npz
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.block_order import runs_of

ARRAYS = {
    "int32": np.arange(60, dtype=np.int32).reshape(20, 3),
    "float64": np.linspace(0, 1, 20)[:, None],
    "big_endian": np.arange(20, dtype=">i8").reshape(20, 1),
    "columns_first": np.asfortranarray(np.arange(40, dtype=np.float32).reshape(20, 2)),
    "one_axis": np.arange(20, dtype=np.uint8),
}
ROWS = [np.array([0]), np.arange(5, 15), np.array([19, 0, 7, 7])]


@pytest.fixture(autouse=True)
def released_pages(monkeypatch):
    monkeypatch.setattr(mapped_file, "RELEASE_BYTES", 50)


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS.keys())
def test_rows_of_an_array(tmp_path, array):
    np.save(tmp_path / "a.npy", array)
    mapped = open_npy(tmp_path / "a.npy")
    for each in (mapped, pickle.loads(pickle.dumps(mapped))):
        for rows in ROWS:
            expected = array[rows].astype(array.dtype.newbyteorder("="))
            np.testing.assert_array_equal(
                each.take(runs_of(rows)), expected, strict=True
            )


def test_rows_of_an_archive(tmp_path):
    np.savez(tmp_path / "a.npz", **ARRAYS)
    mapped = open_npz(tmp_path / "a.npz")
    assert list(mapped) == list(ARRAYS)
    mapped = pickle.loads(pickle.dumps(mapped))
    for name, array in ARRAYS.items():
        for rows in ROWS:
            taken = mapped[name].take(runs_of(rows))
            expected = array[rows].astype(array.dtype.newbyteorder("="))
            np.testing.assert_array_equal(taken, expected, strict=True)


def npy(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(100).reshape(50, 2))
    return (tmp_path / "a.npy").read_bytes()


DAMAGED_NPY = {
    "truncated": (lambda data: data[:-1], r"a\.npy is truncated: int64 .* \[50, 2\]"),
    "header_alone": (lambda data: data[:128], "truncated: .* the data end at byte 128"),
    "half_a_header": (lambda data: data[:60], "damaged or no file of NumPy"),
    "empty": (lambda data: b"", "damaged or no file of NumPy"),
    "no_numpy": (lambda data: b"label,click\n" * 20, "damaged or no file of NumPy"),
    "version": (lambda data: data[:6] + b"\x09" + data[7:], r"version \(9, 0\)"),
}


@pytest.mark.parametrize(
    ("damage", "message"), DAMAGED_NPY.values(), ids=DAMAGED_NPY.keys()
)
def test_damaged_arrays_are_named(tmp_path, damage, message):
    (tmp_path / "a.npy").write_bytes(damage(npy(tmp_path)))
    with pytest.raises(DataError, match=message):
        open_npy(tmp_path / "a.npy")


def test_other_files_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"a\.npy is missing"):
        open_npy(tmp_path / "a.npy")
    np.save(tmp_path / "a.npy", np.array(["x"], object), allow_pickle=True)
    with pytest.raises(DataError, match="must hold numbers, got dtype object"):
        open_npy(tmp_path / "a.npy")
    with pytest.raises(DataError, match=r"a\.npz is missing"):
        open_npz(tmp_path / "a.npz")
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(9))
    with pytest.raises(DataError, match=r"array 'x', is compressed.* numpy\.savez in"):
        open_npz(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", x=np.zeros(1000))
    data = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "a.npz").write_bytes(data[:-500])
    with pytest.raises(DataError, match=r"a\.npz is damaged or no file of NumPy"):
        open_npz(tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", npy(tmp_path)[:-8])
    with pytest.raises(DataError, match=r"a\.npz, array 'x' is truncated"):
        open_npz(tmp_path / "a.npz")
