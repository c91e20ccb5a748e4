"""Files of arrays need little more memory than they have bytes."""

import io
import os
import zipfile

import numpy as np
import pytest
import safetensors.numpy

from tests.rejections import rejects
from tests.tiers import full_cases
from tpu_embedding.checkpoint.imports.named_arrays import MAX_HEADER_BYTES, map_tensors
from tpu_embedding.checkpoint.imports.opening import open_tables
from tpu_embedding.checkpoint.records import CheckpointError


def npy(shape, num_bytes=0):
    """Returns a file of NumPy whose header has any shape, and some zeros."""
    file = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + bytes(num_bytes)


ARCHIVES = {
    "beyond_64_bits": (lambda: npy((2**60, 2**60)), "cannot be read"),
    "huge": (lambda: npy((2**34, 4)), "cannot be read"),
    "no_header": (lambda: b"\x93NUMPY\x01\0", "cannot be read"),
    "zeros": (lambda: npy((75 * 2**20,), 300 * 2**20), "np.savez"),
}


@pytest.mark.parametrize("name", full_cases(ARCHIVES, "zeros"))
def test_an_archive_that_claims_more_than_it_has(name, tmp_path):
    content, fix = ARCHIVES[name]
    method = zipfile.ZIP_DEFLATED if name == "zeros" else zipfile.ZIP_STORED
    with zipfile.ZipFile(tmp_path / "a.npz", "w", method, compresslevel=1) as archive:
        archive.writestr("movie.npy", content())
    with np.load(tmp_path / "a.npz") as arrays, rejects(CheckpointError, fix=fix):
        open_tables(arrays)


@pytest.mark.parametrize("length", [2**63, MAX_HEADER_BYTES + 8, MAX_HEADER_BYTES - 8])
def test_a_header_that_claims_more_than_the_file_has(length, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    fix = f"at most {MAX_HEADER_BYTES} bytes" if length > MAX_HEADER_BYTES else "copy"
    with rejects(CheckpointError, fix=fix):
        open_tables(path)


def test_a_pipe_is_rejected(tmp_path):
    os.mkfifo(tmp_path / "a.safetensors")
    with rejects(CheckpointError, fix="not a regular file"):
        open_tables(tmp_path / "a.safetensors")


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="it lists open files")
def test_all_tensors_of_a_file_share_a_map(tmp_path):
    """Each map needs an open file, and a process may open 1024."""
    path = tmp_path / "a.safetensors"
    arrays = {f"{i}": np.full((2, 3), i, np.float16) for i in range(20)}
    arrays["none"] = np.zeros((0, 4), np.float32)
    safetensors.numpy.save_file(arrays, path)
    before = len(os.listdir("/proc/self/fd"))
    tensors = map_tensors(path)
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert tensors.keys() == arrays.keys()
    for name, values in arrays.items():
        np.testing.assert_array_equal(tensors[name], values, strict=True)
        assert not tensors[name].size or not tensors[name].flags.writeable
