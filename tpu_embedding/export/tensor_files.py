"""Safetensors files whose tensors are written and read by blocks of rows.

The library `safetensors` writes whole tensors, but a table may be larger than the
memory of the host. So the header is written here, and the rows follow. The library
checks the header of a file that is read; its tensors are then mapped to memory.
"""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from tpu_embedding.checkpoint.imports.safetensors import (
    DTYPES,
    LENGTH_BYTES,
    map_tensors,
)
from tpu_embedding.export.signature import ExportError

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


class TensorSpec(NamedTuple):
    """Shape and dtype of one tensor of a file."""

    shape: tuple[int, ...]
    dtype: np.dtype


def create_file(path: pathlib.Path, specs: Mapping[str, TensorSpec]) -> None:
    """Creates a file of tensors that hold zeros until `writable_tensor` fills them.

    Args:
      path: the new file, which must not exist.
      specs: name to shape and dtype of each tensor.
    """
    header, end = {}, 0
    # Readers expect aligned tensors, so the widest elements come first.
    for name in sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name)):
        shape, dtype = specs[name]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % LENGTH_BYTES)
    with path.open("xb") as file:
        file.write(len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded)
        file.truncate(LENGTH_BYTES + len(encoded) + end)


def read_tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a file, mapped to memory; pages are read on use.

    Raises:
      ExportError: if the file is missing or damaged.

    Example:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "table.safetensors")
      >>> create_file(path, {"movie": TensorSpec((2, 3), np.dtype(np.float32))})
      >>> read_tensors(path)["movie"].shape
      (2, 3)
    """
    return map_tensors(path, "r", ExportError)


def writable_tensor(path: pathlib.Path, name: str) -> np.ndarray:
    """Returns a tensor of a file, mapped to memory; what is set is written."""
    return map_tensors(path, "r+", ExportError)[name]
