"""safetensors files, beside one that the real library wrote."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoint.imports.fixtures.values import values
from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.safetensors import arrays_of_safetensors

FILE = pathlib.Path(__file__).parent / "fixtures" / "dtypes.safetensors"


@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
    + ["int64", "uint8"],
)
def test_reads_each_type(dtype):
    array = arrays_of_safetensors(FILE)[dtype]
    expected = abs(values(dtype, (5, 3)) % 4).astype(jnp.dtype(dtype))
    assert (array.shape, array.dtype) == ((5, 3), jnp.dtype(dtype))
    assert np.asarray(array).tobytes() == expected.tobytes()
    assert array.read(1, 2).tobytes() == expected[1:3].tobytes()


def test_reads_an_empty_tensor():
    assert np.asarray(arrays_of_safetensors(FILE)["empty"]).shape == (0, 3)


def damaged(path, *, header=None, data=b"", length=None):
    text = json.dumps(header).encode() if header is not None else b"{"
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + data)
    return path


def tensor(**changes):
    return {"t": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changes}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"header": tensor(), "data": bytes(15)},
            "as its header says, got .*; it is cut off",
        ),
        (
            {"header": tensor(), "data": bytes(17)},
            "as its header says, got .*; it is cut off",
        ),
        (
            {"header": tensor(data_offsets=[0, 12]), "data": bytes(12)},
            "takes 16 bytes, its header says 12",
        ),
        ({"header": tensor(data_offsets=[-16, 0])}, "header cannot be read"),
        (
            {"header": tensor(data_offsets=[16, 0], shape=[-1, 4])},
            "header cannot be read",
        ),
        ({"header": tensor(data_offsets=[0])}, "header cannot be read"),
        ({"header": tensor(dtype="C64"), "data": bytes(16)}, "dtype C64, which cannot"),
        ({"header": {"t": {"dtype": "F32"}}}, "header cannot be read"),
        ({"header": ["t"]}, "header cannot be read"),
        ({"header": None}, "header cannot be read"),
        ({"header": {}, "length": 10**12}, "header cannot be read"),
    ],
)
def test_refuses_damaged_files(tmp_path, content, message):
    path = damaged(tmp_path / "bad.safetensors", **content)
    with pytest.raises(CheckpointError, match=message):
        arrays_of_safetensors(path)


def test_refuses_an_empty_file(tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="header cannot be read"):
        arrays_of_safetensors(tmp_path / "bad.safetensors")
