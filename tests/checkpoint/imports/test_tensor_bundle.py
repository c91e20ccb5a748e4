"""TensorFlow's checkpoint files, beside those that TensorFlow wrote."""

import pathlib
import shutil

import numpy as np
import pytest

from tests.checkpoint.imports.fixtures.values import values
from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.tensor_bundle import TensorBundle, _slice_key

FILES = pathlib.Path(__file__).parent / "fixtures" / "tensorflow"


def test_several_data_files_and_slices():
    arrays = TensorBundle(FILES / "two_files" / "model").arrays()
    expected = {
        "a": values("a", (6, 2), np.float16),
        "b": values("b", (9, 2)),
        "sliced": values("sliced", (100, 3)),
    }
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(arrays[name]), array)
    for start, size in ((0, 100), (39, 3), (40, 1), (41, 59), (7, 0)):
        np.testing.assert_array_equal(
            arrays["sliced"].read(start, size), expected["sliced"][start : start + size]
        )


@pytest.mark.parametrize(
    ("extents", "key"),
    [
        # Keys of slices that TensorFlow 2.21 wrote.
        (((0, 63), (0, -1)), "006eff000001010280bf807f"),
        (((63, 1), (0, -1)), "006eff0000010102bf81807f"),
        (((64, 63), (0, -1)), "006eff0000010102c040bf807f"),
        (((127, 1), (0, -1)), "006eff0000010102c07f81807f"),
        (((128, 8063), (0, -1)), "006eff0000010102c080df7f807f"),
        (((8191, 1), (0, -1)), "006eff0000010102dfff81807f"),
        (((8192, 8192), (0, -1)), "006eff0000010102e02000e02000807f"),
        (((16384, 283616), (0, -1)), "006eff0000010102e04000e453e0807f"),
    ],
)
def test_keys_of_slices(extents, key):
    assert _slice_key(b"n\xff", extents).hex() == key


def copy(tmp_path, name="two_files"):
    shutil.copytree(FILES / name, tmp_path / name)
    return tmp_path / name / "model"


def test_each_flipped_bit_of_an_index_is_found(tmp_path):
    prefix = copy(tmp_path)
    index = prefix.with_suffix(".index")
    data = index.read_bytes()
    whole = TensorBundle(prefix)._entries
    num_found = 0
    for position in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        index.write_bytes(damaged)
        try:
            # A few bytes are never used.
            assert TensorBundle(prefix)._entries == whole
        except CheckpointError as error:
            assert "model.index cannot be read" in str(error)
            num_found += 1
    assert num_found > len(data) // 3 - 20


def test_a_flipped_bit_of_each_array_is_found(tmp_path):
    prefix = copy(tmp_path)
    for file in prefix.parent.glob("*.data-*"):
        data = file.read_bytes()
        for position in range(0, len(data), 37):
            damaged = bytearray(data)
            damaged[position] ^= 1
            file.write_bytes(damaged)
            found = 0
            for array in TensorBundle(prefix).arrays().values():
                try:
                    array.check()
                except CheckpointError as error:
                    assert "the checksum of" in str(error) and file.name in str(error)
                    found += 1
            assert found == 1
        file.write_bytes(data)


def test_missing_and_truncated_data_files(tmp_path):
    prefix = copy(tmp_path)
    file = prefix.with_name("model.data-00001-of-00002")
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(
        CheckpointError, match="data-00001-of-00002 is truncated: 'sliced'"
    ):
        TensorBundle(prefix).arrays()
    file.unlink()
    with pytest.raises(
        CheckpointError, match="data-00001-of-00002, which holds .* missing"
    ):
        TensorBundle(prefix).arrays()


@pytest.mark.parametrize("size", [0, 47, 100, 305])
def test_truncated_index(tmp_path, size):
    prefix = copy(tmp_path)
    index = prefix.with_suffix(".index")
    index.write_bytes(index.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="model.index cannot be read"):
        TensorBundle(prefix)


def test_a_damaged_string_is_found(tmp_path):
    name = "sparse_core_two_same"
    shutil.copytree(FILES / name, tmp_path / name)
    prefix = tmp_path / name / "ckpt-1"
    bundle = TensorBundle(prefix)
    (key,) = (key for key in bundle.keys() if "_sparse_core_table_layouts" in key)
    message = bundle.string(key)
    assert message and bundle.string("model/emb/a_b") is None
    (file,) = prefix.parent.glob("*.data-*")
    data = file.read_bytes()
    for shift in (-5, -1, 0, len(message) - 1):
        damaged = bytearray(data)
        damaged[data.index(message) + shift] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="the checksum of"):
            TensorBundle(prefix).string(key)
