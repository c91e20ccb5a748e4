"""Safetensors files whose tensors are written and read by blocks of rows.

The library `safetensors` writes whole tensors, but a table may be larger than the
memory of the host. So the header is written here, and the rows follow. The library
checks the header of a file that is read; its tensors are then mapped to memory. Nothing
is written through such a map, because the kernel kills a process that writes to a map
on a full disk.

An int8 row has FBGEMM's layout: `dim` unsigned bytes, followed by a scale and a bias in
float32, lower bytes first. A byte `q` means `scale * q + bias`.
"""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np

from tpu_embedding.checkpoint.imports.named_arrays import (
    DTYPES,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    map_tensors,
    read_header,
)
from tpu_embedding.export.example import ExportError
from tpu_embedding.rows.file_rows import SCALE_AND_BIAS_BYTES, decode_int8

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}

_MAX_STRIDE: Final = 4
"""Rows that are closer are written together, with the ones in between."""


class TensorSpec(NamedTuple):
    """Shape and dtype of one tensor of a file."""

    shape: tuple[int, ...]
    dtype: np.dtype


def create_file(path: pathlib.Path, specs: Mapping[str, TensorSpec]) -> None:
    """Creates a file of tensors that hold zeros until `write_rows` fills them.

    Args:
      path: the new file, which must not exist.
      specs: name to shape and dtype of each tensor.

    Raises:
      ExportError: if a dtype has no name in such files, or the header is too long.
      OSError: if the disk is full.
    """
    header, end = {}, 0
    # Readers expect aligned tensors, so the widest elements come first.
    for name in sorted(specs, key=lambda name: (-specs[name].dtype.itemsize, name)):
        shape, dtype = specs[name]
        if dtype not in _NAMES:
            raise ExportError(
                f"{path.name} cannot hold {name!r}: its dtype must be one of "
                f"{sorted(map(str, _NAMES))}, got {dtype}."
            )
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % LENGTH_BYTES)
    if len(encoded) > MAX_HEADER_BYTES:
        raise ExportError(
            f"{path.name} cannot hold {len(specs)} tensors: its header must have at "
            f"most {MAX_HEADER_BYTES} bytes, got {len(encoded)}."
        )
    with path.open("xb") as file:
        file.write(len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded)
        file.truncate(LENGTH_BYTES + len(encoded) + end)


def write_tensors(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes arrays to a new file; see `create_file`."""
    create_file(path, {k: TensorSpec(x.shape, x.dtype) for k, x in tensors.items()})
    for name, tensor in tensors.items():
        rows = np.atleast_1d(tensor)
        write_rows(path, name, np.arange(len(rows)), rows)


def write_rows(
    path: pathlib.Path, name: str, row_ids: np.ndarray, rows: np.ndarray
) -> None:
    """Writes some rows of a tensor.

    Args:
      path: file of `create_file`.
      name: the tensor, `[num_rows, ...]`, or one number.
      row_ids: int64 `[rows]`, each in `[0, num_rows)`.
      rows: `[rows, ...]` of the tensor's dtype.

    Raises:
      OSError: if the disk is full.
    """
    if not rows.size:
        return
    if not (row_ids[1:] > row_ids[:-1]).all():
        order = np.argsort(row_ids)
        row_ids, rows = row_ids[order], rows[order]
    content = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
    start, row_bytes = read_header(path, ExportError)[name].start, content.shape[1]
    is_first = np.diff(row_ids, prepend=-1 - _MAX_STRIDE) > _MAX_STRIDE
    bounds = [*np.flatnonzero(is_first).tolist(), len(row_ids)]
    with path.open("r+b") as file:
        for run in map(slice, bounds[:-1], bounds[1:]):
            first, last = int(row_ids[run][0]), int(row_ids[run][-1])
            position = start + first * row_bytes
            file.seek(position)
            written = content[run]
            if len(written) <= last - first:  # Keeps the rows in between.
                stored = bytearray(file.read((last - first + 1) * row_bytes))
                written = np.frombuffer(stored, np.uint8).reshape(-1, row_bytes)
                written[row_ids[run] - first] = content[run]
                file.seek(position)
            file.write(written.data)


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
    return map_tensors(path, ExportError)


RowFormat = Literal["float32", "bfloat16", "int8"]
"""Type of the numbers of an exported table."""

_MAX_CODE: Final = np.float32(255)


def check_row_format(row_format: str) -> None:
    """Rejects a format of rows that is none of `RowFormat`.

    Every process of a job calls it before a collective, or the others would wait.

    Raises:
      ExportError: if it is unknown.
    """
    if row_format not in get_args(RowFormat):
        raise ExportError(
            f"dtype of the exported tables must be one of {get_args(RowFormat)}, got "
            f"{row_format!r}."
        )


def stored_spec(vocabulary_size: int, dim: int, row_format: RowFormat) -> TensorSpec:
    """Returns the shape and dtype of a table's array.

    Example:
      >>> stored_spec(100, 16, "int8").shape
      (100, 24)
    """
    if row_format == "int8":
        shape = (vocabulary_size, dim + SCALE_AND_BIAS_BYTES)
        return TensorSpec(shape, np.dtype(np.uint8))
    return TensorSpec((vocabulary_size, dim), np.dtype(jnp.dtype(row_format)))


def encode(rows: np.ndarray, row_format: RowFormat, owner: str) -> np.ndarray:
    """Returns rows as they are stored.

    Args:
      rows: `[rows, dim]` of a float type, or int8 rows, as a checkpoint holds them.
      row_format: format of the result. Rows stored so already keep their bits.
      owner: names the table in errors.

    Raises:
      ExportError: if a number is not finite, and so has no int8 code.
    """
    if row_format != "int8":
        return decode(rows).astype(jnp.dtype(row_format), copy=False)
    if rows.dtype == np.uint8:
        return rows
    rows = decode(rows)
    bias = rows.min(axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        scale = (rows.max(axis=1) - bias) / _MAX_CODE
    if not np.isfinite(scale).all():
        row = int(np.argmin(np.isfinite(scale)))
        raise ExportError(
            f"Rows of {owner} must be finite for dtype int8, and so must their range; "
            f"got {rows[row].min()} to {rows[row].max()}. Export as float32."
        )
    divisor = np.where(scale == 0, np.float32(1), scale)
    codes = np.rint((rows - bias[:, None]) / divisor[:, None])
    codes = np.clip(codes, 0, _MAX_CODE).astype(np.uint8)
    ends = np.stack([scale, bias], axis=1).astype("<f4").view(np.uint8)
    return np.concatenate([codes, ends], axis=1)


def decode(stored: np.ndarray) -> np.ndarray:
    """Returns stored rows as float32; the inverse of `encode` up to rounding.

    Example:
      >>> rows = np.array([[-1.0, 0.0, 4.0]], np.float32)
      >>> decode(encode(rows, "int8", "example")).round(2).tolist()
      [[-1.0, 0.0, 4.0]]
    """
    if stored.dtype != np.uint8:
        return stored.astype(np.float32, copy=False)
    return decode_int8(stored)
