"""Reads and writes blocks of consecutive rows, for passes over a whole table."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Shaped

from tpu_embedding.rows.packed_rows import (
    PackedRows,
    RowLayout,
    pack_stored,
    padded,
    round_up,
    unpack_rows,
    unpack_stored,
)

Carry = TypeVar("Carry")

_ROWS_PER_BLOCK: Final = 8192
"""Approximate number of rows per block of the pass: 4 MiB of 128 float32 lanes."""


class Blocks(NamedTuple):
    """The blocks that cover all rows: the first alone, the others for a loop.

    Attributes:
      size: rows of a block of the loop.
      first: first row and number of rows of the block outside of the loop.
      others: range of the numbers of the other blocks; block `i` starts at row
        `i * size`.
    """

    size: int
    first: tuple[int, int]
    others: tuple[int, int]

    def loop(self, body: Callable[[Any, Carry], Carry], carry: Carry) -> Carry:
        """Calls `carry = body(start, carry)` for the other blocks."""
        begin, end = self.others
        if begin == end:  # Its body is not traced.
            return carry
        return jax.lax.fori_loop(
            begin, end, lambda i, carry: body(i * self.size, carry), carry
        )


def blocks_of(layouts: Sequence[RowLayout]) -> Blocks:
    """Returns blocks at whose starts lines of all layouts begin."""
    alignment = math.lcm(*(layout.rows_per_line for layout in layouts))
    size = round_up(_ROWS_PER_BLOCK, alignment)
    num_full, rest = divmod(layouts[0].num_rows, size)
    if rest:
        return Blocks(size, (num_full * size, rest), (0, num_full))
    return Blocks(size, (0, size), (1, num_full))


def read_block(packed: PackedRows, start: Any, num_rows: int) -> Array:
    """Returns rows `start` to `start + num_rows`; a line must begin at `start`.

    Returns:
      `[num_rows, *row_shape]`: narrow rows as float32, others in the array's dtype.
    """
    layout = packed.layout.resized(num_rows)
    return unpack_rows(_lines_from(packed, start, layout))


def write_block(
    packed: PackedRows, start: Any, rows: Shaped[Array, "rows *row"]
) -> PackedRows:
    """Writes rows from `start` on; a line must begin there.

    Args:
      packed: all rows of the shard.
      start: first row of the block.
      rows: the new rows, as they are stored; unused lanes may be missing.
    """
    layout = packed.layout.resized(rows.shape[0])
    rows = padded(rows.reshape(rows.shape[0], -1), layout.row_lanes)
    new = pack_stored(rows, layout)
    first_line = layout.line_of(start)
    lines = jax.lax.dynamic_update_slice_in_dim(
        packed.lines, new.lines, first_line, axis=0
    )
    return PackedRows(lines=lines, layout=packed.layout)


def merge_block(
    packed: PackedRows,
    start: Any,
    stored: Shaped[Array, "rows lanes"],
    is_new: Bool[Array, " rows"],
) -> PackedRows:
    """Replaces some rows from `start` on; a line must begin there.

    Args:
      packed: all rows of the shard.
      start: first row of the block.
      stored: rows of whole lines, as they are stored.
      is_new: False for rows that keep their values.
    """
    layout = packed.layout.resized(stored.shape[0])
    old = unpack_stored(_lines_from(packed, start, layout))
    rows = jnp.where(is_new[:, None], stored, old)
    return write_block(packed, start, rows)


def _lines_from(packed: PackedRows, start: Any, layout: RowLayout) -> PackedRows:
    """Returns the rows of a layout from row `start` on, as they lie in lines."""
    first_line, size = layout.line_of(start), layout.num_lines
    lines = jax.lax.dynamic_slice_in_dim(packed.lines, first_line, size)
    return PackedRows(lines=lines, layout=layout)
