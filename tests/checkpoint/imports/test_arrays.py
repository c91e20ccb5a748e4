"""Arrays by table name: dicts, .npz files, directories of .npy files."""

import numpy as np
import pytest

from tests.checkpoint.imports.fixtures.values import values
from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.opening import open_tables

ARRAYS = {
    "movie": values("movie", (20, 4)),
    "movie/accumulators": values("movie/accumulators", (20, 4)),
    "user/city": values("user/city", (7, 3), np.float64),
    "user/city/momenta": values("user/city/momenta", (7, 3)),
    "columns": np.asfortranarray(values("columns", (9, 5))),
}


def write_npy(path):
    for name, array in ARRAYS.items():
        file = path / f"{name}.npy"
        file.parent.mkdir(parents=True, exist_ok=True)
        np.save(file, array)
    return path


def write_npz(path):
    np.savez(path / "tables.npz", **ARRAYS)
    return path / "tables.npz"


def write_compressed(path):
    np.savez_compressed(path / "tables.npz", **ARRAYS)
    return path / "tables.npz"


def nested(path):
    return {
        "movie": {
            "values": ARRAYS["movie"],
            "slots": {"accumulators": ARRAYS["movie/accumulators"]},
        },
        "user/city": {
            "values": ARRAYS["user/city"],
            "slots": {"momenta": ARRAYS["user/city/momenta"]},
        },
        "columns": ARRAYS["columns"],
    }


@pytest.mark.parametrize(
    "make", [write_npy, write_npz, write_compressed, nested, lambda path: ARRAYS]
)
def test_tables_and_slots(tmp_path, make):
    source = open_tables(make(tmp_path))
    assert sorted(source.tables) == ["columns", "movie", "user/city"]
    found = {}
    for name, table in source.tables.items():
        found[name] = table.values
        found |= {f"{name}/{slot}": array for slot, array in table.slots.items()}
    assert found.keys() == ARRAYS.keys()
    for name, expected in ARRAYS.items():
        assert (found[name].shape, found[name].dtype) == (
            expected.shape,
            expected.dtype,
        )
        np.testing.assert_array_equal(np.asarray(found[name]), expected)
        np.testing.assert_array_equal(found[name].read(2, 3), expected[2:5])


def test_an_array_of_other_length_is_a_table():
    arrays = {"a": np.zeros((5, 2)), "a/b": np.zeros((6, 2))}
    assert sorted(open_tables(arrays).tables) == ["a", "a/b"]


@pytest.mark.parametrize("make", [write_npz, write_compressed])
def test_a_flipped_bit_is_found(tmp_path, make):
    path = make(tmp_path)
    array = open_tables(path).tables["columns"].values
    data = bytearray(path.read_bytes())
    position = data.rindex(b"columns.npy", 0, data.rindex(b"PK\1\2")) + 150
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        array.check()


def test_refuses_python_objects(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.array([{}], object))
    np.save(tmp_path / "b.npy", np.array([{}], object))
    with pytest.raises(CheckpointError, match="Python objects"):
        open_tables(tmp_path / "a.npz")
    with pytest.raises(
        CheckpointError, match="b.npy cannot be read as a file of NumPy"
    ):
        open_tables(tmp_path)


def test_refuses_truncated_files(tmp_path):
    path = write_npz(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        CheckpointError, match="tables.npz cannot be read as a file of NumPy"
    ):
        open_tables(path)
    path.unlink()
    np.save(tmp_path / "a.npy", ARRAYS["movie"])
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match="a.npy cannot be read as a file of NumPy"
    ):
        open_tables(tmp_path)


def test_refuses_dicts_without_values():
    with pytest.raises(CheckpointError, match="dict with the key 'values'"):
        open_tables({"movie": {"table": np.zeros((2, 2))}})


@pytest.mark.parametrize("make", [write_npz, write_compressed, write_npy])
def test_damage_anywhere_is_an_error_of_this_package(tmp_path, make):
    path = make(tmp_path)
    file = path if path.is_file() else path / "movie.npy"
    whole = file.read_bytes()
    random = np.random.default_rng(0)
    num_found = 0
    for _ in range(50):
        data = bytearray(whole)
        end = len(data) if path.is_file() else 100
        for position in random.integers(0, end, 3):
            data[position] = random.integers(256)
        file.write_bytes(data)
        try:
            for table in open_tables(path).tables.values():
                np.asarray(table.values)
        except CheckpointError:
            num_found += 1
    assert num_found > 30
