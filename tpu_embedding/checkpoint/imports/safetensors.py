"""Maps the tensors of safetensors files to memory; their library checks the header."""

import json
import pathlib
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors

from tpu_embedding.checkpoint.errors import CheckpointError

_TYPES: Final[dict[str, Any]] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
DTYPES: Final = {name: np.dtype(dtype) for name, dtype in _TYPES.items()}
"""Name of a type in the header of a file to the type."""

LENGTH_BYTES: Final = 8

MAX_HEADER_BYTES: Final = 2**23
"""Largest header, enough for 80,000 tensors. Parsing needs some 25 times its size."""


class StoredTensor(NamedTuple):
    """A tensor in a file: the range of its bytes, from the start of the file on."""

    shape: tuple[int, ...]
    dtype: np.dtype
    start: int
    end: int


def read_header(
    path: pathlib.Path, error_type: type[ValueError] = CheckpointError
) -> dict[str, StoredTensor]:
    """Returns the tensors of a file by name.

    Args:
      path: the file.
      error_type: raised if the file is missing, or its header contradicts it.
    """
    try:
        if not path.is_file():
            raise ValueError("it is not a regular file")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if length > MAX_HEADER_BYTES:
                raise ValueError(
                    f"its header must have at most {MAX_HEADER_BYTES} bytes, got "
                    f"{length}"
                )
            # It raises an error for a header that contradicts itself or the file.
            safetensors.safe_open(path, framework="np")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        start = LENGTH_BYTES + length
        return {name: _stored_tensor(entry, start) for name, entry in header.items()}
    except Exception as error:  # The library, JSON and NumPy have errors of their own.
        raise error_type(
            f"{path} cannot be read as a safetensors file: {str(error)[:300]}; write "
            "or copy it again."
        ) from None


def _stored_tensor(entry: Any, start: int) -> StoredTensor:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"dtype {entry['dtype']} is none of {sorted(DTYPES)}")
    first, last = (start + offset for offset in entry["data_offsets"])
    return StoredTensor(tuple(entry["shape"]), DTYPES[entry["dtype"]], first, last)


def map_tensors(
    path: pathlib.Path, error_type: type[ValueError] = CheckpointError
) -> dict[str, np.ndarray]:
    """Returns the tensors of a file, mapped to memory; pages are read on use.

    Args:
      path: see `read_header`.
      error_type: see `read_header`.
    """
    stored = read_header(path, error_type)
    try:
        # One map for all tensors, since each needs an open file.
        content = np.asarray(np.memmap(path, np.uint8, "r"))
        return {
            name: content[x.start : x.end].view(x.dtype).reshape(x.shape)
            for name, x in stored.items()
        }
    except (OSError, ValueError) as error:
        raise error_type(f"{path} cannot be mapped to memory: {error}.") from None
