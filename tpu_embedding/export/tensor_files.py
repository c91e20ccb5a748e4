"""Safetensors files whose tensors are written and read by blocks of rows.

The library `safetensors` writes whole tensors, but a table may be larger than the
memory of the host. So the header is written here, and the rows follow. The library
checks the header of a file that is read; its tensors are then mapped to memory.
"""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.safetensors import (
    DTYPES,
    LENGTH_BYTES,
    METADATA,
    map_tensors,
)
from tpu_embedding.export.signature import ExportError

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


class TensorSpec(NamedTuple):
    """Shape and dtype of one tensor of a file."""

    shape: tuple[int, ...]
    dtype: np.dtype


def spec_of(tensor: Any) -> TensorSpec:
    """Returns shape and dtype of a tensor, or of anything that has them."""
    return TensorSpec(tensor.shape, tensor.dtype)


def create_file(path: pathlib.Path, specs: Mapping[str, TensorSpec]) -> None:
    """Creates a file of tensors that hold zeros until `writable_tensor` fills them.

    Args:
      path: the new file, which must not exist.
      specs: name to shape and dtype of each tensor.

    Raises:
      ExportError: if a tensor has the name that the format reserves.
    """
    if METADATA in specs:
        raise ExportError(
            f"A safetensors file cannot hold a tensor of the name {METADATA!r}, "
            "which the format reserves; rename the table or attribute."
        )
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


def write_tensors(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes whole tensors to a new file."""
    create_file(path, {name: spec_of(x) for name, x in tensors.items()})
    for name, tensor in tensors.items():
        if tensor.size:
            writable_tensor(path, name)[...] = tensor


def read_tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a file, mapped to memory; pages are read on use.

    Raises:
      ExportError: if the file is missing or damaged.

    Example:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "table.safetensors")
      >>> write_tensors(path, {"movie": np.ones((2, 3), np.float32)})
      >>> read_tensors(path)["movie"].shape
      (2, 3)
    """
    return _mapped(path, "r")


def writable_tensor(path: pathlib.Path, name: str) -> np.ndarray:
    """Returns a tensor of a file, mapped to memory; what is set is written."""
    return _mapped(path, "r+")[name]


def _mapped(path: pathlib.Path, mode: Any) -> dict[str, np.ndarray]:
    try:
        return map_tensors(path, mode)
    except CheckpointError as error:
        raise ExportError(str(error)) from None


def check_tensors(
    owner: object, tensors: Mapping[str, Any], wanted: Mapping[str, Any]
) -> None:
    """Refuses tensors of other names, shapes or dtypes than others.

    Args:
      owner: names what holds them, for the error.
      tensors: by name.
      wanted: anything with these names, shapes and dtypes.

    Raises:
      ExportError: if they differ.
    """
    found, specs = (
        {name: spec_of(x) for name, x in each.items()} for each in (tensors, wanted)
    )
    for name in sorted(found.keys() | specs.keys()):
        here, there = found.get(name), specs.get(name)
        if here != there:
            raise ExportError(
                f"{owner} must hold {_text(there)} as tensor {name!r}, got "
                f"{_text(here)}; export it again."
            )


def _text(spec: TensorSpec | None) -> str:
    return "nothing" if spec is None else f"{spec.dtype} {list(spec.shape)}"
