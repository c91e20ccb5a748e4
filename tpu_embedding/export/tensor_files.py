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

import jax.numpy as jnp
import numpy as np
import safetensors

from tpu_embedding.export.signature import ExportError

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
_DTYPES: Final = {name: np.dtype(dtype) for name, dtype in _TYPES.items()}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA: Final = "__metadata__"
_LENGTH_BYTES: Final = 8


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
    if _METADATA in specs:
        raise ExportError(
            f"A safetensors file cannot hold a tensor of the name {_METADATA!r}, "
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
    encoded += b" " * (-len(encoded) % _LENGTH_BYTES)
    with path.open("xb") as file:
        file.write(len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded)
        file.truncate(_LENGTH_BYTES + len(encoded) + end)


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
        # It raises an error for a header that contradicts itself or the file's size.
        safetensors.safe_open(path, framework="np")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = json.loads(file.read(length))
        header.pop(_METADATA, None)
        start = _LENGTH_BYTES + length
        return {name: _map(path, mode, start, entry) for name, entry in header.items()}
    except Exception as error:  # The library, JSON and NumPy have errors of their own.
        raise ExportError(
            f"{path} cannot be read as a safetensors file: {error}; export or copy it "
            "again."
        ) from None


def _map(path: pathlib.Path, mode: Any, start: int, entry: Any) -> np.ndarray:
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    if math.prod(shape) == 0:
        return np.zeros(shape, dtype)
    offset = start + entry["data_offsets"][0]
    return np.memmap(path, dtype, mode, offset=offset, shape=shape)


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
