"""Storage formats of exported tables.

An int8 row has FBGEMM's layout: `dim` unsigned bytes, followed by a scale and a bias in
float32, lower bytes first. A byte `q` means `scale * q + bias`.
"""

from typing import Final, Literal, get_args

import jax.numpy as jnp
import numpy as np

from tpu_embedding.export.signature import ExportError
from tpu_embedding.export.tensor_files import TensorSpec
from tpu_embedding.rows.file_rows import SCALE_AND_BIAS_BYTES, decode_int8

RowFormat = Literal["float32", "bfloat16", "int8"]
"""Type of the numbers of an exported table."""

_MAX_CODE: Final = np.float32(255)


def check_row_format(row_format: str) -> None:
    """Refuses a format of rows that is none of `RowFormat`.

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
