"""Reads safetensors files, without the library of that name.

A file begins with the length of its header, 8 bytes, lowest first. The header is JSON:
dtype, shape and byte range of each tensor. The bytes of all tensors follow.
"""

import json
import math
import pathlib
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.source import RowArray, array_of

_DTYPES: Final[dict[str, Any]] = {
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


def arrays_of_safetensors(path: pathlib.Path) -> dict[str, RowArray]:
    """Returns the tensors of a file, mapped to memory.

    Raises:
      CheckpointError: if the file is truncated, or its header contradicts it.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        start = 8 + header_bytes
        if size < 8 or start > size:
            raise CheckpointError(
                f"{path} is truncated, or no safetensors file: its header would end at "
                f"byte {start}, but the file has {size} bytes."
            )
        try:
            header = json.loads(file.read(header_bytes))
            header.pop("__metadata__", None)
            entries = {
                name: (
                    entry["dtype"],
                    tuple(map(int, entry["shape"])),
                    tuple(map(int, entry["data_offsets"])),
                )
                for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"The header of {path} is damaged, or the file is no safetensors file: "
                f"{error!r}."
            ) from None
    return {
        name: _tensor(path, name, *entry, data_start=start, size=size)
        for name, entry in entries.items()
    }


def _tensor(
    path: pathlib.Path,
    name: str,
    dtype_name: str,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    *,
    data_start: int,
    size: int,
) -> RowArray:
    if dtype_name not in _DTYPES:
        raise CheckpointError(
            f"Tensor {name!r} of {path} has dtype {dtype_name}, which cannot be read; "
            f"convert it to one of {sorted(_DTYPES)}."
        )
    dtype = np.dtype(_DTYPES[dtype_name])
    begin, end = offsets
    num_bytes = math.prod(shape) * dtype.itemsize
    if begin < 0 or end - begin != num_bytes or data_start + end > size:
        raise CheckpointError(
            f"{path} is truncated or damaged: tensor {name!r} of shape {list(shape)} "
            f"and dtype {dtype_name} takes {num_bytes} bytes, its range is {begin} to "
            f"{end} of {size - data_start}."
        )
    if num_bytes == 0:
        return array_of(np.zeros(shape, dtype))
    start = data_start + begin
    return array_of(np.memmap(path, dtype, "r", offset=start, shape=shape))
