"""Reads and changes rows on one shard: by id, or in blocks of consecutive rows.

All other code accesses rows by id only through this file, so a different gather or
scatter belongs here. These functions don't communicate. Blocks are for passes over a
whole table.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from tpu_embedding.rows.packed_rows import (
    PackedRows,
    RowLayout,
    gather_in_bounds,
    lane_groups_of,
    lines_to_add,
    load_rows,
    pack_stored,
    padded,
    round_up,
    select_lanes,
    shifts_of,
    store_rows,
    unpack_rows,
    unpack_stored,
)
from tpu_embedding.types import PADDING_ROW_ID
from tpu_embedding.xla import copied_in_vectors


def read_rows(packed: PackedRows, row_ids: Int[Array, " ids"]) -> Array:
    """Reads rows that this device owns. Missing rows are NaN, which shows in the loss.

    As in `gather_rows`, ids past the last row read arbitrary values.
    """
    _, places = packed.locate(row_ids)
    rows = gather_rows(packed, places)
    if packed.holds_all_rows:
        return rows
    is_missing = _are_missing(row_ids, places).reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.where(is_missing, jnp.full((), jnp.nan, rows.dtype), rows)


def num_missing(
    packed: PackedRows, row_ids: Int[Array, " ids"]
) -> Int[Array, ""] | None:
    """Counts rows that this device owns but lacks. None means that it has all rows."""
    if packed.holds_all_rows:
        return None
    _, places = packed.locate(row_ids)
    return jnp.sum(_are_missing(row_ids, places), dtype=jnp.int32)


def _are_missing(row_ids: Array, places: Array) -> Bool[Array, " ids"]:
    return (places == PADDING_ROW_ID) & (row_ids != PADDING_ROW_ID)


def gather_rows(packed: PackedRows, row_ids: Int[Array, " ids"]) -> Array:
    """Reads rows. Narrow rows become float32.

    Ids past the last row, such as padding, read arbitrary values. Don't use the values.
    """
    layout = packed.layout
    # With clamped ids, the gather needs no bounds check, and its result needs no mask.
    row_ids = jnp.minimum(row_ids, layout.num_rows - 1)
    rows = load_rows(_gather_stored(packed, row_ids), layout)
    return rows.reshape(row_ids.shape[0], *layout.row_shape)


def gather_lines(
    lines: Shaped[Array, "lines *lane"], positions: Int[Array, " n"]
) -> Shaped[Array, "n *lane"]:
    """Gathers lines or buffer rows. Positions must be in bounds."""
    return copied_in_vectors(gather_in_bounds(lines, positions))


def add_to_rows(
    packed: PackedRows, row_ids: Int[Array, " ids"], values: Array
) -> PackedRows:
    """Adds to rows, in place if the caller donated them. Other rows keep their bits.

    Each row may appear at most once. Ids past the last row are dropped. However, a
    device that flushes denormals to zero also flushes them in rows that share a line
    with a changed row.
    """
    assert packed.layout.narrow_dtype is None, "words are not numbers to add to"
    values = values.astype(packed.lines.dtype)
    return _add_to_stored(packed, row_ids, values)


def replace_stored_rows(
    packed: PackedRows, row_ids: Int[Array, " ids"], stored: Int[Array, "ids lanes"]
) -> PackedRows:
    """Replaces narrow rows, in place, with rows from `encode_rows`.

    Each row may appear at most once. Ids past the last row are dropped. Other rows keep
    their bits.
    """
    # Additions of int32 wrap around, so they are exact. They don't change `other`, the
    # row that shares the lanes: `(old << 16) + other` plus `(new - old) << 16` is
    # `(new << 16) + other`.
    layout = packed.layout
    old = _gather_stored(packed, jnp.minimum(row_ids, layout.num_rows - 1))
    difference = (stored - old) << shifts_of(row_ids, layout)[:, None]
    return _add_to_stored(packed, row_ids, difference)


def _add_to_stored(
    packed: PackedRows, row_ids: Int[Array, " ids"], values: Array
) -> PackedRows:
    layout = packed.layout
    line_ids = _line_ids(row_ids, row_ids < layout.num_rows, layout)
    lines = packed.lines.at[line_ids].add(
        lines_to_add(row_ids, values, layout),
        mode="drop",
        # Without this promise, XLA may sort the indices. But if rows share a line, its
        # index repeats.
        unique_indices=layout.rows_per_line == 1,
        wrap_negative_indices=False,
    )
    return dataclasses.replace(packed, lines=lines)


def row_differences(old: Array, new: Array) -> Array:
    """Computes `new - old`, but 0 instead of NaN where both are the same infinity."""
    return jnp.where(new == old, jnp.zeros((), new.dtype), new - old)


def _gather_stored(
    packed: PackedRows, row_ids: Int[Array, " ids"]
) -> Shaped[Array, "ids _"]:
    """Reads rows in their stored form. All ids must be in bounds."""
    layout = packed.layout
    if layout.lines_per_row > 1:
        lines = gather_lines(packed.lines, _lines_of_rows(row_ids, layout))
        return lines.reshape(-1, layout.lanes_per_row)
    lines = gather_lines(packed.lines, layout.line_of(row_ids))
    if layout.is_flat:
        rows = lines[:, None]
    else:
        groups = lane_groups_of(row_ids, layout)
        rows = select_lanes(lines, groups, layout.groups_per_line, layout.lanes_per_row)
    if layout.rows_per_lane == 1:
        return rows
    # The mask removes the row that shares the lanes, or the sign bits from `>>`.
    return (rows >> shifts_of(row_ids, layout)[:, None]) & 0xFFFF


def _line_ids(
    row_ids: Int[Array, " ids"], is_named: Bool[Array, " ids"], layout: RowLayout
) -> Int[Array, " lines"]:
    """Finds lines of rows. Where `is_named` is False, the lines are past the end."""
    line_ids = _lines_of_rows(row_ids, layout)
    # Lines past the end are distinct, so that `unique_indices` stays true. Writes drop
    # them, even if a table has so many lines that their numbers overflow to negative.
    dropped = layout.num_lines + jnp.arange(line_ids.shape[0], dtype=jnp.int32)
    return jnp.where(jnp.repeat(is_named, layout.lines_per_row), line_ids, dropped)


def _lines_of_rows(
    row_ids: Int[Array, " ids"], layout: RowLayout
) -> Int[Array, " lines"]:
    first_lines = layout.line_of(row_ids)
    if layout.lines_per_row == 1:
        return first_lines
    offsets = jnp.arange(layout.lines_per_row, dtype=jnp.int32)
    return (first_lines[:, None] + offsets[None]).reshape(-1)


def set_rows(
    packed: PackedRows,
    row_ids: Int[Array, " ids"],
    values: Array,
    old: Array | None = None,
) -> PackedRows:
    """Sets rows to exact values, in place if the caller donated them.

    Each row may appear at most once. Ids past the last row are dropped. Narrow rows are
    rounded to nearest. Pass the current values as `old` if you have read them.
    """
    layout = packed.layout
    if layout.narrow_dtype is not None:
        stored = store_rows(values.reshape(-1, layout.dim), layout)
        return replace_stored_rows(packed, row_ids, stored)
    if layout.tile_lanes is None and old is None:
        # Only if old values were not read. Otherwise nothing orders this write after
        # the read, and XLA might copy the array to write first.
        lines = lines_to_add(row_ids, values.astype(packed.lines.dtype), layout)
        line_ids = _line_ids(row_ids, row_ids < layout.num_rows, layout)
        return _set_lines(packed, line_ids, lines)
    if old is None:
        old = gather_rows(packed, row_ids)
    if not jnp.issubdtype(old.dtype, jnp.floating):
        return add_to_rows(packed, row_ids, values - old)
    # Rows that share a line can only be changed by adding, and XLA:TPU offloads
    # additions from the TensorCore. Adding `new - old` could round or overflow. Adding
    # `-old` gives exactly 0, and then adding `new` is exact.
    packed, old = _clear_non_finite(packed, row_ids, old)
    return add_to_rows(add_to_rows(packed, row_ids, -old), row_ids, values)


def _clear_non_finite(
    packed: PackedRows, row_ids: Int[Array, " ids"], old: Array
) -> tuple[PackedRows, Array]:
    """Sets NaN and infinities in some rows to 0, since adding can't replace them.

    `old` has the current values, and the second result has the values after the change.
    If all values are finite, no line is read.
    """
    layout = packed.layout
    is_stuck, is_row = ~jnp.isfinite(old), row_ids < layout.num_rows
    old = jnp.where(is_stuck, jnp.zeros((), old.dtype), old)
    is_stuck &= is_row.reshape(-1, *[1] * (old.ndim - 1))

    # No line may be set twice in one scatter, so the loop clears the first rows of all
    # lines, then the second rows, and so on.
    def clear(i: Array, packed: PackedRows) -> PackedRows:
        is_due = is_row & (row_ids % layout.rows_per_line == i)
        line_ids = _line_ids(row_ids, is_due, layout)
        in_bounds = jnp.minimum(line_ids, layout.num_lines - 1)
        lines = gather_in_bounds(packed.lines, in_bounds)
        clears = lines_to_add(row_ids, is_stuck.astype(lines.dtype), layout)
        lines = jnp.where(clears > 0, jnp.zeros((), lines.dtype), lines)
        return _set_lines(packed, line_ids, lines)

    num_turns = jnp.where(jnp.any(is_stuck), layout.rows_per_line, 0)
    return jax.lax.fori_loop(0, num_turns, clear, packed), old


def _set_lines(packed: PackedRows, line_ids: Array, lines: Array) -> PackedRows:
    """Sets lines, each at most once. Lines past the end are dropped."""
    lines = packed.lines.at[line_ids].set(
        lines, mode="drop", wrap_negative_indices=False
    )
    return dataclasses.replace(packed, lines=lines)


@dataclasses.dataclass(frozen=True)
class Parts:
    """Rounds of a gradient, or blocks of rows. Parts exist only during tracing.

    The first part is straight-line code. `fold_later(body, carry)` folds
    `carry = body(carry, part)` over all later parts. It is None if there can't be more
    than one part.
    """

    first: Any
    fold_later: Callable[[Callable[[Any, Any], Any], Any], Any] | None = None

    def fold(self, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        """Folds `body` over all parts."""
        carry = body(carry, self.first)
        return carry if self.fold_later is None else self.fold_later(body, carry)

    def map(self, function: Callable[[Any], Any]) -> "Parts":
        fold_later = self.fold_later
        if fold_later is None:
            return Parts(function(self.first))
        return Parts(
            function(self.first),
            lambda body, carry: fold_later(
                lambda carry, part: body(carry, function(part)), carry
            ),
        )


_ROWS_PER_BLOCK: Final = 8192
"""Approximate number of rows per block. With 128 float32 lanes, they take 4 MiB."""


class Blocks(NamedTuple):
    """Blocks that cover all rows, each as (first row, row count).

    Attributes:
      first: the block outside the loop. Its row count may differ from `size`.
      starts: the first row of each block in the loop.
      size: the row count of each block in the loop, which must be static.
    """

    first: tuple[int, int]
    starts: range
    size: int

    def as_parts(self) -> Parts:
        if not self.starts:
            return Parts(self.first)

        def fold_later(body: Callable[[Any, Any], Any], carry: Any) -> Any:
            def run(i: Array, carry: Any) -> Any:
                return body(carry, (i * self.size, self.size))

            begin = self.starts.start // self.size
            return jax.lax.fori_loop(begin, begin + len(self.starts), run, carry)

        return Parts(self.first, fold_later)


def blocks_of(layouts: Sequence[RowLayout]) -> Blocks:
    """Cuts rows into blocks that start at a line boundary in all layouts."""
    alignment = math.lcm(*(layout.rows_per_line for layout in layouts))
    size, num_rows = round_up(_ROWS_PER_BLOCK, alignment), layouts[0].num_rows
    whole, rest = num_rows // size * size, num_rows % size
    if rest:
        return Blocks((whole, rest), range(0, whole, size), size)
    return Blocks((0, size), range(size, num_rows, size), size)


def read_block(packed: PackedRows, start: Any, num_rows: int) -> Array:
    """Reads rows from `start`, the first row of a line. Narrow rows become float32."""
    return unpack_rows(lines_of_block(packed, start, num_rows))


def write_block(
    packed: PackedRows, start: Any, rows: Shaped[Array, "rows *row"]
) -> PackedRows:
    """Writes consecutive stored rows. `start` must be the first row of a line.

    You can leave out unused lanes.
    """
    layout = dataclasses.replace(packed.layout, num_rows=rows.shape[0])
    rows = padded(rows.reshape(rows.shape[0], -1), layout.lanes_per_row)
    new = pack_stored(rows, layout)
    lines = jax.lax.dynamic_update_slice_in_dim(
        packed.lines, new.lines, layout.line_of(start), axis=0
    )
    return dataclasses.replace(packed, lines=lines)


def merge_block(
    packed: PackedRows,
    start: Any,
    stored: Shaped[Array, "rows lanes"],
    is_new: Bool[Array, " rows"],
) -> PackedRows:
    """Replaces stored rows where `is_new`. Rows from `start` must fill whole lines."""
    old = unpack_stored(lines_of_block(packed, start, stored.shape[0]))
    rows = jnp.where(is_new[:, None], stored, old)
    return write_block(packed, start, rows)


def lines_of_block(packed: PackedRows, start: Any, num_rows: int) -> PackedRows:
    """Slices packed rows from `start`, which must be the first row of a line."""
    layout = dataclasses.replace(packed.layout, num_rows=num_rows)
    first_line, size = layout.line_of(start), layout.num_lines
    lines = jax.lax.dynamic_slice_in_dim(packed.lines, first_line, size)
    return dataclasses.replace(packed, lines=lines, layout=layout)
