"""Converts lines to file rows and back, on the host. Rows keep their bits.

Files don't depend on the packing. They hold the elements of a table or slot variable in
its own dtype. However, an int8 row has `dim + 8` bytes, as in FBGEMM: `dim` codes, then
scale and bias, which are float32 with the lowest byte first.
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
    """Finds the shape and dtype of a row in a file.

    `packed` may hold shapes instead of arrays.

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
    """Converts whole lines to file rows.

    The result, `[lines * rows_per_line, *shape]`, is a view of the lines if possible.
    The row count in `layout` is ignored.
    """
    stored = rows_of_lines(lines.reshape(-1, layout.lanes_per_line), layout)
    match layout.narrow_dtype:
        case None:
            return load_rows(stored, layout).reshape(-1, *layout.row_shape)
        case "int8":
            return _int8_bytes(stored, layout.dim)
    # A view keeps all bits, even in NaN.
    return stored.astype(np.uint16).view(jnp.bfloat16)


def lines_of_file_rows(rows: np.ndarray, layout: RowLayout) -> np.ndarray:
    """Inverts `file_rows_of_lines`. Unused lanes are zero."""
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
    """Rounds numbers `[rows, *row_shape]` to file rows.

    `packed` may hold shapes instead of arrays. Values that already have the right dtype
    are not copied.

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
    """Converts file rows to numbers `[rows, *row_shape]`, float32 for narrow rows."""
    match layout.narrow_dtype:
        case None:
            return rows
        case "int8":
            return decode_rows(_int8_words(rows, layout), "int8", layout.dim)
    return rows.astype(np.float32)


def encode_int8(rows: np.ndarray) -> np.ndarray:
    """Encodes float32 rows `[rows, dim]` as int8 file rows, rounded to nearest."""
    return _int8_bytes(encode_rows(rows, "int8"), rows.shape[1])


def decode_int8(rows: np.ndarray) -> np.ndarray:
    """Decodes int8 file rows `[rows, dim + 8]`: codes times scale, plus bias."""
    codes = rows[:, :-SCALE_AND_BIAS_BYTES].astype(np.float32)
    ends = np.ascontiguousarray(rows[:, -SCALE_AND_BIAS_BYTES:]).view("<f4")
    return codes * ends[:, :1] + ends[:, 1:]


def _int8_bytes(words: np.ndarray, dim: int) -> np.ndarray:
    # Bytes in memory aren't in the order of elements; see `_join` in `narrow_rows.py`.
    ends = np.ascontiguousarray(words[:, -2:]).view(np.uint8)
    codes = np.ascontiguousarray(words[:, :-2]).view(np.uint8)
    codes = codes.reshape(len(words), -1, 4).transpose(0, 2, 1)
    codes = codes.reshape(len(words), -1)[:, :dim]
    return np.concatenate([codes, ends], axis=1)


def _int8_words(rows: np.ndarray, layout: RowLayout) -> np.ndarray:
    """Inverts `_int8_bytes`."""
    num_words = layout.lanes_per_row - 2
    codes = np.zeros((len(rows), 4 * num_words), np.uint8)
    codes[:, : layout.dim] = rows[:, : layout.dim]
    codes = codes.reshape(len(rows), 4, num_words).transpose(0, 2, 1)
    ends = rows[:, layout.dim :]
    stored = np.concatenate([codes.reshape(len(rows), -1), ends], axis=1)
    return np.ascontiguousarray(stored).view("<i4")
