"""Rows of a table or slot variable as they lie in memory, and how to reach them.

A TPU stores a float32 `[rows, dim]` array with `dim` below 128 by column, and copies
the whole table before it gathers or scatters rows. So `128 // dim` logical rows share
one line of 128 lanes, and wide rows take a multiple of 128 lanes. On CPU and GPU a
line is one row. Rows of a single value lie in a flat array everywhere, whose elements
a SparseCore reads and adds to one by one. Only `gather_rows` and `add_to_rows` know:
everything above sees logical rows.
"""

import dataclasses
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_LOST_ROUNDINGS: Final = 8
"""Roundings of a new value that may be lost; a moving average loses one."""


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def take(values: Array, places: Int[Array, " n"]) -> Array:
    """Returns `values[places]` along the first axis; all places must be there."""
    return values.at[places].get(mode="promise_in_bounds", wrap_negative_indices=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowLayout:
    """How the rows of one shard are packed into lines.

    Attributes:
      num_rows: logical rows per shard.
      row_shape: shape of one row: `(dim,)`, or `()` for one value per row.
      line_lanes: lanes that a line takes a multiple of; None: a line is one row.
    """

    num_rows: int
    row_shape: tuple[int, ...]
    line_lanes: int | None = None

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return self.row_shape[0] if self.row_shape else 1

    @property
    def is_flat(self) -> bool:
        """Whether rows are single values, and a line is one of them."""
        return self.dim == 1

    @property
    def rows_per_line(self) -> int:
        """Logical rows that share a line."""
        if self.line_lanes is None or self.is_flat:
            return 1
        return max(1, self.line_lanes // self.dim)

    @property
    def lanes(self) -> int:
        """Width of a line."""
        if self.line_lanes is None or self.is_flat:
            return self.dim
        return round_up(self.dim, self.line_lanes)

    @property
    def num_lines(self) -> int:
        """Lines per shard."""
        return -(-self.num_rows // self.rows_per_line)

    @property
    def lines_shape(self) -> tuple[int, ...]:
        """Shape of the lines of one shard, `(num_lines, lanes)` or `(num_lines,)`."""
        return (self.num_lines,) if self.is_flat else (self.num_lines, self.lanes)

    def with_row_shape(self, row_shape: tuple[int, ...]) -> "RowLayout":
        """Returns the layout of a slot variable of the same rows."""
        return dataclasses.replace(self, row_shape=row_shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedRows:
    """The rows of a table or slot variable, packed.

    Attributes:
      lines: `layout.lines_shape` per shard; the shards' lines one after the other in
        the global view.
      layout: how rows lie in the lines of one shard.
    """

    lines: Array
    layout: RowLayout = dataclasses.field(metadata={"static": True})


def pack_rows(rows: Array, layout: RowLayout) -> PackedRows:
    """Packs `[num_rows, *row_shape]`, per shard; unused lanes are zero."""
    if layout.is_flat:
        return PackedRows(lines=rows.reshape(layout.lines_shape), layout=layout)
    rows = rows.reshape(layout.num_rows, layout.dim)
    missing = layout.num_lines * layout.rows_per_line - layout.num_rows
    lines = jnp.pad(rows, ((0, missing), (0, 0)))
    lines = lines.reshape(layout.num_lines, layout.rows_per_line * layout.dim)
    unused_lanes = layout.lanes - lines.shape[1]
    return PackedRows(lines=jnp.pad(lines, ((0, 0), (0, unused_lanes))), layout=layout)


def unpack_rows(packed: PackedRows) -> Array:
    """Returns `[num_rows, *row_shape]`, per shard; the inverse of `pack_rows`."""
    layout = packed.layout
    if layout.is_flat:
        return packed.lines.reshape(layout.num_rows, *layout.row_shape)
    lines = packed.lines[:, : layout.rows_per_line * layout.dim]
    rows = lines.reshape(layout.num_lines * layout.rows_per_line, layout.dim)
    return rows[: layout.num_rows].reshape(layout.num_rows, *layout.row_shape)


def gather_rows(packed: PackedRows, row_ids: Int[Array, " ids"]) -> Array:
    """Reads rows. Per shard; no communication.

    Args:
      packed: the rows of this shard.
      row_ids: rows to read. Ids beyond the last row, padding among them, read the
        last row: their result must not be used.

    Returns:
      `[ids, *row_shape]` in the storage dtype.
    """
    layout = packed.layout
    row_ids = jnp.minimum(row_ids, layout.num_rows - 1)
    rows = take(packed.lines, row_ids // layout.rows_per_line)
    if not layout.is_flat:
        rows = _select_lanes(
            rows, row_ids % layout.rows_per_line, layout.rows_per_line, layout.dim
        )
    return rows.reshape(row_ids.shape[0], *layout.row_shape)


def add_to_rows(
    packed: PackedRows, row_ids: Int[Array, " ids"], values: Array
) -> PackedRows:
    """Adds to rows, in place where the caller donated them. Per shard.

    Rows that are not named stay bitwise as they are, also those that share a line with
    a named one: their lanes receive -0.0, the only float that changes nothing. (A
    device that flushes denormals to zero does so with those of such neighbours.)

    Args:
      packed: the rows of this shard.
      row_ids: rows to change, each at most once; ids beyond the last row are left out.
      values: `[ids, *row_shape]`.
    """
    layout = packed.layout
    values = values.astype(packed.lines.dtype)
    is_used = row_ids < layout.num_rows
    # Lines beyond the last are left out; here each is named once, as the others are.
    # In a table of 2**31 lines these numbers wrap, to negative ones: left out as well.
    nowhere = layout.num_lines + jnp.arange(row_ids.shape[0], dtype=jnp.int32)
    line_ids = jnp.where(is_used, row_ids // layout.rows_per_line, nowhere)
    if layout.is_flat:
        additions = values.reshape(row_ids.shape)
    else:
        additions = _spread_lanes(
            values.reshape(row_ids.shape[0], layout.dim),
            row_ids % layout.rows_per_line,
            layout,
        )
    lines = packed.lines.at[line_ids].add(
        additions,
        mode="drop",
        unique_indices=layout.rows_per_line == 1,
        wrap_negative_indices=False,
    )
    return PackedRows(lines=lines, layout=layout)


def replace_rows(
    packed: PackedRows, row_ids: Int[Array, " ids"], old: Array, new: Array
) -> PackedRows:
    """Replaces the values of rows, by adding the difference. Per shard; in place.

    On TPU it is additions that run on SparseCore, and packed rows can only be added
    to. `old + (new - old)` is `new` but for rounding, unless a value drops by orders
    of magnitude, such as a slot after an outlier; then the rest is added as well.

    Args:
      packed: the rows of this shard.
      row_ids: as in `add_to_rows`.
      old: the present values, `[ids, *row_shape]`.
      new: the values to come; the same shape.
    """
    difference = new - old
    packed = add_to_rows(packed, row_ids, difference)
    if not jnp.issubdtype(new.dtype, jnp.floating):
        return packed
    rest = new - (old + difference)
    lost_fraction = _LOST_ROUNDINGS * float(jnp.finfo(new.dtype).eps)
    is_lost = jnp.abs(rest) > lost_fraction * jnp.abs(new)
    is_used = (row_ids < packed.layout.num_rows).reshape((-1,) + (1,) * (new.ndim - 1))
    # A loop that runs once or not at all: XLA:TPU copies the rows for a conditional.
    _, packed = jax.lax.while_loop(
        lambda carry: carry[0],
        lambda carry: (jnp.zeros((), bool), add_to_rows(carry[1], row_ids, rest)),
        (jnp.any(is_lost & is_used), packed),
    )
    return packed


def _select_lanes(
    lines: Float[Array, "ids lanes"],
    places: Int[Array, " ids"],
    rows_per_line: int,
    dim: int,
) -> Array:
    """Cuts the row at its place out of each line, by halves.

    A selection, not a masked sum, so that the bits of the row come out unchanged
    whatever its neighbours hold.
    """
    if rows_per_line == 1:
        return lines[:, :dim]
    half = 1
    while 2 * half < rows_per_line:
        half *= 2
    low = lines[:, : half * dim]
    high = lines[:, half * dim : rows_per_line * dim]
    high = jnp.pad(high, ((0, 0), (0, low.shape[1] - high.shape[1])))
    is_high = places >= half
    chosen = jnp.where(is_high[:, None], high, low)
    return _select_lanes(chosen, jnp.where(is_high, places - half, places), half, dim)


def _spread_lanes(
    values: Array, places: Int[Array, " ids"], layout: RowLayout
) -> Array:
    """Puts each row at its place in a line that adds nothing elsewhere."""
    nothing = jnp.zeros((), values.dtype)
    if jnp.issubdtype(values.dtype, jnp.floating):
        nothing = -nothing
    unused_lanes = layout.lanes - layout.rows_per_line * layout.dim
    copies = jnp.tile(values, (1, layout.rows_per_line))
    lines = jnp.pad(copies, ((0, 0), (0, unused_lanes)))
    if layout.rows_per_line == 1:
        return lines
    place_of_lane = jnp.arange(layout.lanes, dtype=jnp.int32) // layout.dim
    return jnp.where(place_of_lane[None, :] == places[:, None], lines, nothing)
