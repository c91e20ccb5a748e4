"""Rows of a table or slot variable, or on their way, as they lie in memory.

A TPU stores a float32 `[rows, dim]` array with `dim` below 128 by column, and copies
the whole table before it gathers or scatters rows. So `128 // dim` logical rows share
one line of 128 lanes, and wide rows take a multiple of 128 lanes. On CPU and GPU a
line is one row. Rows of a single value lie in a flat array everywhere, whose elements
a SparseCore reads and adds to one by one. Where kernels reach rows (see
`row_kernels.py`), they stay packed on their way between the devices, too. What is above
names logical rows; only exchanges, and rules that treat each element for itself, handle
lines as such.
"""

import dataclasses
from collections.abc import Sequence
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tpu_embedding.rows.kernels.backend import KernelBackend
from tpu_embedding.rows.kernels.kernel_bodies import TILE_LINES, KernelBody
from tpu_embedding.rows.kernels.row_kernels import (
    MAX_ARRAYS,
    add_rows,
    holds_whole_rows,
    kernels_reach,
    read_rows,
    update_rows,
)

_IDS_MULTIPLE: Final = 128
"""Ids are filled up to a multiple of it for kernels, which take many at once."""

_LOST_ROUNDINGS: Final = 8
"""Roundings of a new value that may be lost; a moving average loses one."""


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def gather_in_bounds(values: Array, places: Int[Array, " n"]) -> Array:
    """Returns `values[places]` along the first axis; all places must be there."""
    return values.at[places].get(mode="promise_in_bounds", wrap_negative_indices=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowLayout:
    """How the rows of one shard, or rows on their way, are packed into lines.

    Attributes:
      num_rows: logical rows per shard.
      row_shape: shape of one row: `(dim,)`, or `()` for one value per row.
      line_lanes: lanes that a line takes a multiple of; None: a line is one row.
      kernels: what runs the kernels that reach rows; None: XLA's own gather and
        scatter move whole lines.
      num_spare_rows: rows behind the last, to which such a kernel adds the values of
        ids that stand for no row; what they hold means nothing. Without one, rows are
        read by kernels only.
    """

    num_rows: int
    row_shape: tuple[int, ...]
    line_lanes: int | None = None
    kernels: KernelBackend | None = None
    num_spare_rows: int = 0

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
    def runner(self) -> KernelBackend | None:
        """What runs kernels on its rows, if these are float32; None: no kernel can."""
        is_in_reach = kernels_reach(self.num_rows, self.dim, self.line_lanes)
        return self.kernels if is_in_reach else None

    @property
    def num_lines(self) -> int:
        """Lines per shard."""
        if self.runner is None or self.num_spare_rows == 0:
            return -(-self.num_rows // self.rows_per_line)
        num_lines = -(-(self.num_rows + self.num_spare_rows) // self.rows_per_line)
        return num_lines if self.lanes == 128 else round_up(num_lines, TILE_LINES)

    @property
    def lines_shape(self) -> tuple[int, ...]:
        """Shape of the lines of one shard, `(num_lines, lanes)` or `(num_lines,)`."""
        return (self.num_lines,) if self.is_flat else (self.num_lines, self.lanes)

    def with_row_shape(self, row_shape: tuple[int, ...]) -> "RowLayout":
        """Returns the layout of a slot variable of the same rows."""
        return dataclasses.replace(self, row_shape=row_shape)

    def buffer_layout(self, num_rows: int) -> "RowLayout":
        """Returns the layout of so many rows that were read from these.

        They share lines where kernels reach them. Else a line is a row, as XLA's
        gather leaves them.
        """
        return dataclasses.replace(
            self,
            num_rows=num_rows,
            line_lanes=None if self.runner is None else self.line_lanes,
            num_spare_rows=0,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Rows, packed: of a table or slot variable, or on their way.

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
    return unpack_rows(gather_packed(packed, row_ids))


def gather_packed(packed: PackedRows, row_ids: Int[Array, " ids"]) -> PackedRows:
    """Reads rows like `gather_rows`, and leaves them as they come, perhaps in lines."""
    layout = packed.layout
    (num_ids,) = row_ids.shape
    result = layout.buffer_layout(num_ids)
    row_ids = jnp.minimum(row_ids, layout.num_rows - 1)
    runner = _runner_of(packed)
    if runner is not None and num_ids > 0:
        row_ids = jnp.pad(row_ids, (0, -num_ids % _IDS_MULTIPLE))
        (lines,) = read_rows(_full_tiles(packed), row_ids, layout.dim, runner)
        return PackedRows(lines=lines[: result.num_lines], layout=result)
    rows = gather_in_bounds(packed.lines, row_ids // layout.rows_per_line)
    if not layout.is_flat:
        rows = _select_lanes(
            rows, row_ids % layout.rows_per_line, layout.rows_per_line, layout.dim
        )
    return pack_rows(rows, result)


def gather_sums(
    packed: PackedRows,
    row_ids: Int[Array, " ids"],
    sizes: Sequence[int],
    valences: Sequence[int],
) -> list[Array] | None:
    """Reads rows and sums some, for each of some groups of ids, with a kernel.

    What XLA would write, read again to sum or to cut apart, and write again, a kernel
    writes once.

    Args:
      packed: as in `gather_rows`.
      row_ids: those of one group after the other.
      sizes: sums of each group.
      valences: rows of each sum of a group; first come the first rows of all sums, then
        the second ones, and so on.

    Returns:
      `[size, dim]` for each group; None where kernels do not reach the rows, several
      of these share a line, or groups do not fill tiles.
    """
    layout = packed.layout
    runner = _runner_of(packed)
    fills_tiles = all(size > 0 and size % TILE_LINES == 0 for size in sizes)
    if runner is None or layout.rows_per_line > 1 or not fills_tiles:
        return None
    row_ids = jnp.minimum(row_ids, layout.num_rows - 1)
    return read_rows(
        _full_tiles(packed),
        row_ids,
        layout.dim,
        runner,
        sizes=sizes,
        valences=valences,
    )


def add_to_rows(
    packed: PackedRows, row_ids: Int[Array, " ids"], values: Array
) -> PackedRows:
    """Adds to rows, in place where the caller donated them. Per shard.

    Rows that are not named stay bitwise as they are. Without kernels, lanes of those
    that share a line with a named one receive -0.0, the only float that changes
    nothing. (A device that flushes denormals to zero does so with those of such
    neighbours.)

    Args:
      packed: the rows of this shard.
      row_ids: rows to change, each at most once; ids beyond the last row are left out.
      values: `[ids, *row_shape]`, or the lines of these.
    """
    layout = packed.layout
    values = values.astype(packed.lines.dtype)
    is_used = row_ids < layout.num_rows
    runner = _runner_of(packed)
    if runner is not None and layout.num_spare_rows > 0 and row_ids.shape[0] > 0:
        return _add_by_kernel(packed, row_ids, values, runner)
    # Lines beyond the last are left out; here each is named once, as the others are.
    # In a table of 2**31 lines these numbers wrap, to negative ones: left out as well.
    nowhere = layout.num_lines + jnp.arange(row_ids.shape[0], dtype=jnp.int32)
    line_ids = jnp.where(is_used, row_ids // layout.rows_per_line, nowhere)
    lines = packed.lines.at[line_ids].add(
        _lines_to_add(row_ids, values, layout),
        mode="drop",
        unique_indices=layout.rows_per_line == 1,
        wrap_negative_indices=False,
    )
    return PackedRows(lines=lines, layout=layout)


def add_repeatedly(
    packed: PackedRows, row_ids: Int[Array, " ids"], values: Array
) -> PackedRows:
    """Adds to rows of which some are named several times. Per shard; in place.

    Args:
      packed: the rows.
      row_ids: rising; ids beyond the last row are left out.
      values: `[ids, *row_shape]`.
    """
    layout = packed.layout
    is_used = row_ids < layout.num_rows
    line_ids = jnp.where(is_used, row_ids // layout.rows_per_line, layout.num_lines)
    lines = packed.lines.at[line_ids].add(
        _lines_to_add(row_ids, values, layout),
        mode="drop",
        indices_are_sorted=True,
        wrap_negative_indices=False,
    )
    return PackedRows(lines=lines, layout=layout)


def keep_rows(packed: PackedRows, is_kept: Bool[Array, " rows"]) -> PackedRows:
    """Makes all other rows zero. Per shard."""
    nothing = jnp.zeros((), packed.lines.dtype)
    is_kept = _over_lanes(is_kept, packed.layout)
    lines = jnp.where(is_kept, packed.lines, nothing)
    return PackedRows(lines=lines, layout=packed.layout)


def scale_rows(packed: PackedRows, gains: Float[Array, " rows"]) -> PackedRows:
    """Multiplies each row with a number of its own. Per shard."""
    lines = packed.lines * _over_lanes(gains, packed.layout)
    return PackedRows(lines=lines, layout=packed.layout)


def over_lanes(columns: Sequence[Array], lanes: int) -> Array:
    """Gives each place of a line, whose values are a column, its part of the lanes.

    Args:
      columns: `[lines]` for each place of a line, which these fill.
      lanes: of a line.

    Returns:
      `[lines, lanes]`.
    """
    place_of_lane = jnp.arange(lanes, dtype=jnp.int32) // (lanes // len(columns))
    # Place by place: XLA:TPU writes to memory what a reshape makes of lanes.
    result = columns[-1][:, None]
    for place, column in enumerate(columns[:-1]):
        result = jnp.where(place_of_lane[None, :] == place, column[:, None], result)
    return result


def concatenate_rows(parts: Sequence[Array], layout: RowLayout) -> PackedRows:
    """Packs `[rows, dim]` arrays behind each other. Per shard.

    Args:
      parts: the rows.
      layout: of all of them together.
    """
    fill_lines = all(part.shape[0] % layout.rows_per_line == 0 for part in parts)
    if layout.rows_per_line == 1 or not fill_lines:
        return pack_rows(jnp.concatenate(parts), layout)
    lines = [part.reshape(-1, layout.lanes) for part in parts]
    return PackedRows(lines=jnp.concatenate(lines), layout=layout)


def clear_last_row(packed: PackedRows) -> PackedRows:
    """Makes the last row zero. Per shard."""
    layout = packed.layout
    line, place = divmod(layout.num_rows - 1, layout.rows_per_line)
    if layout.is_flat:
        lines = packed.lines.at[line].set(0)
    else:
        zeros = jnp.zeros((1, layout.dim), packed.lines.dtype)
        place_in_lines = (line, place * layout.dim)
        lines = jax.lax.dynamic_update_slice(packed.lines, zeros, place_in_lines)
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
      old: the present values, `[ids, *row_shape]`, or the lines of these.
      new: the values to come; the same shape.
    """
    difference = new - old
    packed = add_to_rows(packed, row_ids, difference)
    if not jnp.issubdtype(new.dtype, jnp.floating):
        return packed
    rest = new - (old + difference)
    lost_fraction = _LOST_ROUNDINGS * float(jnp.finfo(new.dtype).eps)
    is_lost = jnp.abs(rest) > lost_fraction * jnp.abs(new)
    layout = packed.layout
    is_lost = pack_rows(is_lost, layout.buffer_layout(row_ids.shape[0]))
    is_lost = keep_rows(is_lost, row_ids < layout.num_rows)
    # A loop that runs once or not at all: XLA:TPU copies the rows for a conditional.
    _, packed = jax.lax.while_loop(
        lambda carry: carry[0],
        lambda carry: (jnp.zeros((), bool), add_to_rows(carry[1], row_ids, rest)),
        (jnp.any(is_lost.lines), packed),
    )
    return packed


def can_update(
    arrays: Sequence[PackedRows], *, num_values: int, whole_rows: bool
) -> bool:
    """Whether a kernel can update the same rows of all of these: `update_packed`.

    Args:
      arrays: the table and slot variables.
      num_values: of each row, that the rule takes as well.
      whole_rows: whether the rule takes these, or sums over rows.
    """
    first = arrays[0].layout
    return (
        0 < first.num_spare_rows
        and len(arrays) + num_values <= MAX_ARRAYS
        and all(
            packed.layout == first and _runner_of(packed) is not None
            for packed in arrays
        )
        and (not whole_rows or holds_whole_rows(first.dim, len(arrays), num_values))
    )


def update_packed(
    rule: KernelBody,
    arrays: Sequence[PackedRows],
    row_ids: Int[Array, " ids"],
    gradients: PackedRows,
    numbers: Sequence[Array],
    values: Sequence[Float[Array, " ids"]],
) -> tuple[list[PackedRows], list[Array]]:
    """Replaces rows by what a rule makes of them, with a kernel. Per shard; in place.

    Rows that are not named stay bitwise as they are.

    Args:
      rule: as in `update_rows` of `row_kernels.py`.
      arrays: the table and slot variables; `can_update` must hold.
      row_ids: as in `add_to_rows`.
      gradients: one for each id; of those beyond the last row anything.
      numbers: as in `update_rows`.
      values: of the row of each id.

    Returns:
      The arrays with new rows, and the new values.
    """
    layout = arrays[0].layout
    (num_ids,) = row_ids.shape
    if num_ids == 0:
        return list(arrays), list(values)
    runner = _runner_of(arrays[0])
    assert runner is not None
    row_ids, lines = _for_kernels(layout, row_ids, gradients)
    missing = row_ids.shape[0] - num_ids
    changed, new_values = update_rows(
        rule,
        [packed.lines for packed in arrays],
        row_ids,
        lines,
        layout.dim,
        numbers,
        runner,
        row_scalars=[jnp.pad(value, (0, missing)) for value in values],
    )
    return (
        [PackedRows(lines=lines, layout=layout) for lines in changed],
        [value[:num_ids] for value in new_values],
    )


def _runner_of(packed: PackedRows) -> KernelBackend | None:
    """Returns what runs kernels on rows as they are stored; None: no kernel can."""
    return packed.layout.runner if packed.lines.dtype == jnp.float32 else None


def _add_by_kernel(
    packed: PackedRows,
    row_ids: Int[Array, " ids"],
    values: Array,
    runner: KernelBackend,
) -> PackedRows:
    """Adds as `add_to_rows` does; what ids beyond the last row add goes to a spare."""
    layout = packed.layout
    additions = pack_rows(values, layout.buffer_layout(row_ids.shape[0]))
    row_ids, lines = _for_kernels(layout, row_ids, additions)
    lines = add_rows(packed.lines, row_ids, lines, layout.dim, runner)
    return PackedRows(lines=lines, layout=layout)


def _for_kernels(
    layout: RowLayout, row_ids: Int[Array, " ids"], values: PackedRows
) -> tuple[Int[Array, " more_ids"], Array]:
    """Fills ids, and lines of what belongs to them, up for a kernel that changes rows.

    Ids that stand for no row name the spare one.
    """
    missing = -row_ids.shape[0] % _IDS_MULTIPLE
    row_ids = jnp.minimum(row_ids, layout.num_rows)
    row_ids = jnp.pad(row_ids, (0, missing), constant_values=layout.num_rows)
    num_lines = layout.buffer_layout(row_ids.shape[0]).num_lines
    missing_lines = num_lines - values.lines.shape[0]
    return row_ids, jnp.pad(values.lines, ((0, missing_lines), (0, 0)))


def _full_tiles(packed: PackedRows) -> Array:
    """Returns lines, of wide rows on their way as many as fill tiles."""
    if packed.layout.lanes <= 128:
        return packed.lines
    missing = -packed.lines.shape[0] % TILE_LINES
    return jnp.pad(packed.lines, ((0, missing), (0, 0)))


def _over_lanes(values: Array, layout: RowLayout) -> Array:
    """Gives the lanes of each row the row's value: `[rows]` to what fits the lines."""
    if layout.rows_per_line == 1:
        return values if layout.is_flat else values[:, None]
    # Those of one place after those of another, by a gather: to reshape numbers into
    # rows of a few takes a TPU two instructions for each.
    places, lines = jnp.divmod(
        jnp.arange(layout.rows_per_line * layout.num_lines, dtype=jnp.int32),
        layout.num_lines,
    )
    rows = jnp.minimum(lines * layout.rows_per_line + places, layout.num_rows - 1)
    is_mask = values.dtype == bool
    by_place = gather_in_bounds(values.astype(jnp.int32) if is_mask else values, rows)
    columns = jnp.split(by_place.astype(values.dtype), layout.rows_per_line)
    return over_lanes(columns, layout.lanes)


def _lines_to_add(
    row_ids: Int[Array, " ids"], values: Array, layout: RowLayout
) -> Array:
    """Returns lines, or single values, that add the values at the places of rows."""
    if layout.is_flat:
        return values.reshape(row_ids.shape)
    values = values.reshape(row_ids.shape[0], layout.dim)
    return _spread_lanes(values, row_ids % layout.rows_per_line, layout)


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
