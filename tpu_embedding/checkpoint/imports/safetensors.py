"""Reads safetensors files, without the library of that name.

A file begins with the length of its header, 8 bytes, lowest first. The header is JSON:
dtype, shape and byte range of each tensor. The bytes of all tensors follow. Exported
tables are read by the same function.
"""

import json
import math
import pathlib
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.source import RowArray, array_of

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


_MAX_SIZE: Final = 2**48
_MAX_AXES: Final = 8
"""Limits that keep NumPy from an overflow: 2^48 bytes are the address space."""

DTYPES: Final = {name: np.dtype(dtype) for name, dtype in _TYPES.items()}
"""Name of a type in the header of a file to the type."""


def arrays_of_safetensors(path: pathlib.Path) -> dict[str, RowArray]:
    """Returns the tensors of a file, mapped to memory.

    Raises:
      CheckpointError: see `map_tensors`.
    """
    return {name: array_of(array) for name, array in map_tensors(path).items()}


def map_tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a file, mapped to memory; pages are read on use.

    Args:
      path: the file.

    Raises:
      CheckpointError: if the file is truncated, or its header contradicts it.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        encoded = file.read(length) if length <= size else b""
    try:
        header = json.loads(encoded, object_pairs_hook=object_of_pairs)
        header.pop("__metadata__", None)
        entries = {name: _entry(entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(
            f"{path} must be a safetensors file, but its header cannot be read."
        ) from None
    start, end = 8 + length, 0
    for name, (_, begin, after, _) in sorted(entries.items(), key=lambda x: x[1][1:3]):
        if begin != end:
            raise CheckpointError(
                f"{path} contradicts itself: tensor {name!r} must begin at byte {end}, "
                f"where the one before it ends, got {begin}."
            )
        end = after
    end += start
    if size != end:
        raise CheckpointError(
            f"{path} must have {end} bytes, as its header says, got {size}; it is cut "
            "off, or something follows it. Copy it again."
        )
    return {name: _map(path, start, name, *entry) for name, entry in entries.items()}


def object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object; for `object_pairs_hook`, which would keep the last value.

    Raises:
      ValueError: if a key comes twice.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


def _entry(entry: Any) -> tuple[str, int, int, tuple[int, ...]]:
    """Returns name of the type, first byte, end and shape of a tensor."""
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(x) is int and 0 <= x < _MAX_SIZE for x in (begin, end, *shape)):
        raise ValueError("sizes must be integers from 0 on")
    if not isinstance(entry["dtype"], str) or len(shape) > _MAX_AXES:
        raise ValueError("unknown dtype, or too many axes")
    if math.prod(max(1, x) for x in shape) >= _MAX_SIZE:
        raise ValueError("sizes beyond the address space")
    return entry["dtype"], begin, end, shape


def _map(
    path: pathlib.Path,
    start: int,
    name: str,
    dtype_name: str,
    begin: int,
    end: int,
    shape: tuple[int, ...],
) -> np.ndarray:
    if dtype_name not in DTYPES:
        raise CheckpointError(
            f"Tensor {name!r} of {path} has dtype {dtype_name}, which cannot be read; "
            f"convert it to one of {sorted(DTYPES)}."
        )
    dtype = DTYPES[dtype_name]
    num_bytes = math.prod(shape) * dtype.itemsize
    if end - begin != num_bytes:
        raise CheckpointError(
            f"{path} contradicts itself: tensor {name!r} of shape {list(shape)} and "
            f"dtype {dtype_name} takes {num_bytes} bytes, its header says "
            f"{end - begin}."
        )
    if num_bytes == 0:
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, "r", offset=start + begin, shape=shape)
