"""Converts lines to rows of files and back, bit for bit. Runs on the host.

A file holds the rows of a table in the table's own type, whatever the packing:

    float32 tables, slot variables    the elements of a row
    bfloat16                          the elements of a row
    int8                              FBGEMM's row of `dim + 8` bytes: `dim` codes, then
                                      scale and bias, both float32, lowest byte first

Nothing is rounded, so a row that is written and read keeps its bits.
"""

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embedding.rows.narrow_rows import decode_rows, encode_rows
from tpu_embedding.rows.packed_rows import (
    PackedRows,
    RowLayout,
    lines_of_rows,
    load_rows,
    rows_of_lines,
    store_rows,
)

SCALE_AND_BIAS_BYTES: Final = 8
"""Bytes after the codes of an int8 row: its scale and its bias, both float32."""


def file_row(packed: PackedRows) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a row in a file.

    Args:
      packed: rows of a table or slot variable, or their shapes.

    Example:
      >>> import jax.numpy as jnp
      >>> layout = RowLayout(num_rows=4, row_shape=(6,), narrow_dtype="int8")
      >>> file_row(PackedRows(lines=jnp.zeros((4, 4), jnp.int32), layout=layout))
      ShapeDtypeStruct(shape=(14,), dtype=uint8)
    """
    layout = packed.layout
    match layout.narrow_dtype:
        case None:
            return jax.ShapeDtypeStruct(layout.row_shape, packed.lines.dtype)
        case "int8":
            return jax.ShapeDtypeStruct((layout.dim + SCALE_AND_BIAS_BYTES,), np.uint8)
        case "bfloat16":
            return jax.ShapeDtypeStruct(layout.row_shape, jnp.bfloat16)


def file_rows_of_lines(lines: np.ndarray, layout: RowLayout) -> np.ndarray:
    """Returns the rows of whole lines as files hold them.

    Args:
      lines: `[lines]` or `[lines, lanes]`, as the layout stores them.
      layout: packing of these rows. Its number of rows may differ.

    Returns:
      `[lines * rows_per_line, *shape]`, with the `shape` and dtype of `file_row`. The
      result is a view of the lines if possible.
    """
    stored = rows_of_lines(lines.reshape(-1, layout.lanes_per_line), layout)
    match layout.narrow_dtype:
        case None:
            return load_rows(stored, layout).reshape(-1, *layout.row_shape)
        case "int8":
            return _int8_bytes(stored, layout.dim)
    return stored.astype(np.uint16).view(jnp.bfloat16)


def lines_of_file_rows(rows: np.ndarray, layout: RowLayout) -> np.ndarray:
    """Puts rows of a file into whole lines, the inverse of `file_rows_of_lines`.

    Args:
      rows: `[lines * rows_per_line, *shape]`, with the `shape` and dtype of `file_row`.
      layout: see `file_rows_of_lines`.

    Returns:
      `[lines]` or `[lines, lanes]`. Unused lanes are zero.
    """
    match layout.narrow_dtype:
        case None:
            stored = store_rows(rows.reshape(-1, layout.dim), layout)
        case "int8":
            stored = _int8_words(rows, layout)
        case _:
            stored = np.ascontiguousarray(rows).view(np.uint16).astype(np.int32)
    lines = lines_of_rows(stored, layout)
    return lines.reshape(-1) if layout.is_flat else lines


def file_rows_of_values(values: np.ndarray, packed: PackedRows) -> np.ndarray:
    """Returns numbers as rows of a file, rounded to the file's type.

    Args:
      values: `[rows, *row_shape]`, real numbers.
      packed: rows of the table or slot variable, or their shapes.

    Returns:
      `[rows, *shape]`, with the `shape` and dtype of `file_row`. Values that already
      have this dtype are not copied.

    Example:
      >>> layout = RowLayout(num_rows=4, row_shape=(6,), narrow_dtype="int8")
      >>> packed = PackedRows(lines=jnp.zeros((4, 4), jnp.int32), layout=layout)
      >>> file_rows_of_values(np.zeros((2, 6), np.float32), packed).shape
      (2, 14)
    """
    layout = packed.layout
    if layout.narrow_dtype is None:
        return np.asarray(values, packed.lines.dtype)
    if layout.narrow_dtype == "int8":
        return encode_int8(np.asarray(values, np.float32))
    return np.asarray(values, jnp.bfloat16)


def values_of_file_rows(rows: np.ndarray, layout: RowLayout) -> np.ndarray:
    """Returns rows of a file as numbers, narrow rows as float32.

    Maps `[rows, *shape]`, with the `shape` of `file_row`, to `[rows, *row_shape]`.
    """
    match layout.narrow_dtype:
        case None:
            return rows
        case "int8":
            return decode_rows(_int8_words(rows, layout), "int8", layout.dim)
    return rows.astype(np.float32)


def encode_int8(rows: np.ndarray) -> np.ndarray:
    """Returns float32 rows `[rows, dim]` as int8 rows of a file, rounded to nearest."""
    return _int8_bytes(encode_rows(rows, "int8"), rows.shape[1])


def decode_int8(rows: np.ndarray) -> np.ndarray:
    """Returns int8 rows of a file as float32: codes times scale, plus bias.

    Args:
      rows: uint8 `[rows, dim + 8]`.
    """
    codes = rows[:, :-SCALE_AND_BIAS_BYTES].astype(np.float32)
    ends = np.ascontiguousarray(rows[:, -SCALE_AND_BIAS_BYTES:]).view("<f4")
    return codes * ends[:, :1] + ends[:, 1:]


def _int8_bytes(words: np.ndarray, dim: int) -> np.ndarray:
    """Returns the bytes of int8 rows. A word holds every `words`-th element."""
    ends = np.ascontiguousarray(words[:, -2:]).view(np.uint8)
    codes = np.ascontiguousarray(words[:, :-2]).view(np.uint8)
    codes = codes.reshape(len(words), -1, 4).transpose(0, 2, 1)
    codes = codes.reshape(len(words), -1)[:, :dim]
    return np.concatenate([codes, ends], axis=1)


def _int8_words(rows: np.ndarray, layout: RowLayout) -> np.ndarray:
    """Returns the words of int8 rows, the inverse of `_int8_bytes`."""
    num_words = layout.lanes_per_row - 2
    codes = np.zeros((len(rows), 4 * num_words), np.uint8)
    codes[:, : layout.dim] = rows[:, : layout.dim]
    codes = codes.reshape(len(rows), 4, num_words).transpose(0, 2, 1)
    ends = rows[:, layout.dim :]
    stored = np.concatenate([codes.reshape(len(rows), -1), ends], axis=1)
    return np.ascontiguousarray(stored).view("<i4")
