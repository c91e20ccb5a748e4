"""Maps the tensors of safetensors files to memory; their library checks the header."""

import json
import math
import pathlib
from typing import Any, Final

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


def map_tensors(
    path: pathlib.Path, mode: Any = "r", error_type: type[ValueError] = CheckpointError
) -> dict[str, np.ndarray]:
    """Returns the tensors of a file, mapped to memory; pages are read on use.

    Args:
      path: the file.
      mode: "r", or "r+" to write what is set.
      error_type: raised if the file is missing, or its header contradicts it.
    """
    try:
        # It raises an error for a header that contradicts itself or the file's size.
        safetensors.safe_open(path, framework="np")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        start = LENGTH_BYTES + length
        return {name: _map(path, mode, start, entry) for name, entry in header.items()}
    except Exception as error:  # The library, JSON and NumPy have errors of their own.
        raise error_type(
            f"{path} cannot be read as a safetensors file: {error}; write or copy it "
            "again."
        ) from None


def _map(path: pathlib.Path, mode: Any, start: int, entry: Any) -> np.ndarray:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"dtype {entry['dtype']} is none of {sorted(DTYPES)}")
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    if math.prod(shape) == 0:
        return np.zeros(shape, dtype)
    offset = start + entry["data_offsets"][0]
    return np.memmap(path, dtype, mode, offset=offset, shape=shape)
