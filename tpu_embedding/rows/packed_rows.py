"""Rows packed into lines, so that a TPU doesn't copy the table in every step.

If `dim` is below 128, a TPU stores a float32 `[rows, dim]` array column by column, and
copies it before each gather or scatter. So `128 // dim` rows share a *line*, each in a
*lane group*. Rows longer than 128 take a multiple of 128 lanes. On CPU and GPU, a line
is one row. docs/concepts/stacking.md has a picture.

Rows have three forms. Values are `[rows, dim]`. *Stored* rows, which are words if rows
are narrow, are `[rows, lanes_per_row]`. The third form is lines.
"""

import dataclasses
import functools
import hashlib
from typing import Any, ClassVar, Final, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from tpu_embedding.rows.narrow_rows import (
    NarrowDtype,
    decode_rows,
    encode_rows,
    join_rows,
    lanes_per_row,
    rows_per_lane,
    split_rows,
)

LANE_BYTES: Final = 4
"""Bytes per lane. A lane of a table holds a float32, or a word of a narrow row."""


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def bank_lanes(dim: int) -> int:
    """Rounds `dim` up to 8, 16, 32, 64 or a multiple of 128, for rows in banks.

    At these widths, lines of 128 lanes have the same bytes in memory as rows that a TPU
    stores as `[rows, lanes]`.

    Example:
      >>> [bank_lanes(dim) for dim in (1, 20, 64, 65, 200)]
      [8, 32, 64, 128, 256]
    """
    if dim > 64:
        return round_up(dim, 128)
    return max(8, 1 << (dim - 1).bit_length())


def gather_in_bounds(values: Array, positions: Int[Array, " n"]) -> Array:
    """Gathers along the first axis. Positions must be in bounds."""
    # Without these promises, JAX adds arithmetic on every index.
    at = values.at[positions]
    return at.get(mode="promise_in_bounds", wrap_negative_indices=False)


class TableRange(NamedTuple):
    """Rows `row_offset` to `row_offset + vocabulary_size` in a stack."""

    name: str
    row_offset: int
    vocabulary_size: int


@dataclasses.dataclass(frozen=True)
class StackContents:
    """The tables in an array, in row order. Rows are dealt to shards round-robin."""

    # Arrays of equal shape can hold different tables, or the same tables in a different
    # order. The contents keep a plan from reading rows that belong to a different plan.

    tables: tuple[TableRange, ...]
    num_shards: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowLayout:
    """The packing of one shard's rows into lines.

    Attributes:
      num_rows: logical rows per shard.
      row_shape: `(dim,)`, or `()` for one value per row.
      tile_lanes: width of a hardware tile. Lines are whole tiles. If None, a line is
        one row.
      contents: the tables, if all of their rows are included; else None.
      narrow_dtype: storage type, if elements share 32-bit lanes; else None.
      banks: number of ranges that rows are dealt to; see `dealt` and `bank_lanes`.
      bank_name: name for banks in messages.
    """

    num_rows: int
    row_shape: tuple[int, ...]
    tile_lanes: int | None = None
    contents: StackContents | None = None
    narrow_dtype: NarrowDtype | None = None
    banks: int = 1
    bank_name: str = "banks"

    @functools.cached_property
    def dim(self) -> int:
        return self.row_shape[0] if self.row_shape else 1

    @functools.cached_property
    def lanes_per_row(self) -> int:
        """Lanes that a row takes, including lanes that it shares with other rows."""
        if self.narrow_dtype is not None:
            return lanes_per_row(self.narrow_dtype, self.dim)
        if self.banks > 1 and self.row_shape:
            return bank_lanes(self.dim)
        return self.dim

    @functools.cached_property
    def rows_per_lane(self) -> int:
        """Logical rows that share each lane."""
        return 1 if self.narrow_dtype is None else rows_per_lane(self.narrow_dtype)

    @property
    def dtype_name(self) -> str:
        return self.narrow_dtype or "float32"

    @property
    def stored_dtype(self) -> Any:
        """Dtype of table lanes: float32, or int32 for words."""
        return jnp.float32 if self.narrow_dtype is None else jnp.int32

    @functools.cached_property
    def is_flat(self) -> bool:
        """True if each row takes a single lane. Lines are then one lane wide."""
        # A TPU can read single elements of a flat array, and add to them. In lines, it
        # would move 128 lanes for each element.
        return self.lanes_per_row == 1

    @functools.cached_property
    def groups_per_line(self) -> int:
        """Lane groups per line. Each holds a row, or rows that share its lanes."""
        if self.tile_lanes is None or self.is_flat:
            return 1
        return max(1, self.tile_lanes // self.lanes_per_row)

    @functools.cached_property
    def rows_per_line(self) -> int:
        """Logical rows that share a line: `rows_per_lane` in each lane group."""
        return self.groups_per_line * self.rows_per_lane

    @functools.cached_property
    def lines_per_row(self) -> int:
        """Consecutive lines per row. This is 1 unless rows are dealt to banks."""
        # Rows in banks must be contiguous, but a TPU would store a line of more than
        # 128 lanes in pieces, with pieces of other lines in between.
        if self.banks == 1 or self.tile_lanes is None:
            return 1
        return max(1, self.lanes_per_row // self.tile_lanes)

    @functools.cached_property
    def lanes_per_line(self) -> int:
        if self.tile_lanes is None or self.is_flat:
            return self.lanes_per_row
        return round_up(self.lanes_per_row, self.tile_lanes) // self.lines_per_row

    @functools.cached_property
    def num_lines(self) -> int:
        return -(-self.num_rows // self.rows_per_line) * self.lines_per_row

    def line_of(self, row: Any) -> Any:
        """Finds the first line of a row."""
        return row // self.rows_per_line * self.lines_per_row

    def row_of(self, line: Any) -> Any:
        """Finds the first row in a line, or the row that the line is part of."""
        return line // self.lines_per_row * self.rows_per_line

    @functools.cached_property
    def lines_shape(self) -> tuple[int, ...]:
        """Array shape per shard. It has a single axis if lines are flat."""
        if self.is_flat:
            return (self.num_lines,)
        return self.num_lines, self.lanes_per_line

    @functools.cached_property
    def rows_per_bank(self) -> int:
        """Rows per bank. The last ones may be unused."""
        return self.num_rows // self.banks

    def dealt(self, rows: Any) -> Any:
        """Deals row `r` to bank `r % banks`, so that hot neighbors spread out."""
        if self.banks == 1:
            return rows
        return rows % self.banks * self.rows_per_bank + rows // self.banks

    def undealt(self, rows: Any) -> Any:
        """Inverts `dealt`."""
        if self.banks == 1:
            return rows
        return rows % self.rows_per_bank * self.banks + rows // self.rows_per_bank

    def slot_layout(self, row: jax.ShapeDtypeStruct) -> "RowLayout":
        """Makes the layout for a slot variable, given the shape of its rows."""
        return dataclasses.replace(self, row_shape=row.shape, narrow_dtype=None)

    @functools.cached_property
    def facts(self) -> tuple[str, ...]:
        """Everything that decides which lanes hold a row, one string per fact."""
        contents = self.contents or StackContents((), 1)
        dealt = f"rows dealt to {self.banks} {self.bank_name}"
        return (
            f"{contents.num_shards} shards of {self.num_rows} rows",
            *([dealt] if self.banks > 1 else []),
            f"rows of {self.dtype_name} and shape {self.row_shape}",
            f"lines of shape {self.lines_shape}, {self.rows_per_line} rows in each",
            *(
                f"table {table.name!r} in rows {table.row_offset} to "
                f"{table.row_offset + table.vocabulary_size}"
                for table in contents.tables
            ),
        )

    @functools.cached_property
    def leaf_name(self) -> str:
        """Array name in pytree paths, and so in checkpoints."""
        if self.contents is None:
            return "lines"
        # The name contains the shard count, the shape and a digest of `facts`. So a
        # checkpointer that matches arrays by name rejects a different layout.
        digest = hashlib.sha256(repr(self.facts).encode()).hexdigest()[:8]
        sizes = "x".join(map(str, (self.contents.num_shards, *self.lines_shape)))
        return f"lines_{sizes}_{digest}"


@no_type_check  # It also holds shapes and shardings instead of arrays.
@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedRows:
    """The rows of a table or slot variable, in lines.

    The layout describes one shard. Global arrays have the lines of all shards.
    """

    lines: Any
    layout: RowLayout = dataclasses.field(metadata={"static": True})

    # A subclass may hold only some of the rows, and know where to find the rest.
    holds_all_rows: ClassVar[bool] = True

    def locate(self, row_ids):
        """Finds rows that are about to change. An update calls this once per round.

        Returns:
          Two values: these rows, and the place of each row in the lines. Rows that the
          lines lack have place `PADDING_ROW_ID`. The returned rows may be a copy that
          counts the changes that will be dropped. A row has the same place in a
          table and in its slot variables.
        """
        return self, row_ids

    def read_windows(self, windows, exchange, receivers):
        """Yields the blocks of windows, like `row_stream.read_blocks`."""
        raise NotImplementedError

    def write_windows(self, windows, exchange, read):
        """Replaces the rows of windows, like `row_stream.write_blocks`.

        If this object holds shapes instead of arrays, rows outside of the windows are
        set to zero.
        """
        raise NotImplementedError

    def check_current(self):
        """Raises ValueError if the host has newer rows than these."""

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey(self.layout.leaf_name)
        return ((key, self.lines),), self.layout

    def tree_flatten(self):
        return (self.lines,), self.layout

    @classmethod
    def tree_unflatten(cls, layout, leaves):
        return cls(lines=leaves[0], layout=layout)


def pack_rows(rows: Array, layout: RowLayout) -> PackedRows:
    """Packs one shard's values. Unused lanes are zero. Narrow rows round to nearest."""
    rows = rows.reshape(layout.num_rows, layout.dim)
    return pack_stored(store_rows(rows, layout), layout)


def full_rows(value: Any, layout: RowLayout, dtype: Any) -> PackedRows:
    """Packs one shard's rows with one value in all elements. Rows can't be narrow."""
    # XLA writes these lines directly. With `pack_rows`, it would compute rows first.
    shape = layout.lines_shape
    value = jnp.full(shape, value, dtype)
    line = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    row = layout.row_of(line)
    if not layout.is_flat:
        lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        if layout.lines_per_row > 1:
            lane = line % layout.lines_per_row * layout.lanes_per_line + lane
        group = lane // layout.lanes_per_row
        is_used = group < layout.groups_per_line
        if layout.lanes_per_row > layout.dim:
            is_used &= lane % layout.lanes_per_row < layout.dim
        row = jnp.where(is_used, row + group, layout.num_rows)
    lines = jnp.where(row < layout.num_rows, value, jnp.zeros((), dtype))
    return PackedRows(lines=lines, layout=layout)


def unpack_rows(packed: PackedRows) -> Array:
    """Unpacks one shard's rows to values."""
    layout = packed.layout
    rows = load_rows(unpack_stored(packed), layout)
    return rows.reshape(layout.num_rows, *layout.row_shape)


def store_rows(rows: Any, layout: RowLayout) -> Any:
    """Converts NumPy or JAX values to stored rows. Narrow rows round to nearest."""
    if layout.narrow_dtype is None:
        return padded(rows, layout.lanes_per_row)
    return encode_rows(rows, layout.narrow_dtype)


def load_rows(stored: Any, layout: RowLayout) -> Any:
    """Converts stored rows to values. Narrow rows become float32."""
    if layout.narrow_dtype is None:
        return stored[:, : layout.dim]
    return decode_rows(stored, layout.narrow_dtype, layout.dim)


def pack_stored(stored: Shaped[Array, "rows _"], layout: RowLayout) -> PackedRows:
    missing = layout.row_of(layout.num_lines) - layout.num_rows
    lines = lines_of_rows(jnp.pad(stored, ((0, missing), (0, 0))), layout)
    return PackedRows(lines=lines.reshape(layout.lines_shape), layout=layout)


def unpack_stored(packed: PackedRows) -> Shaped[Array, "rows _"]:
    layout = packed.layout
    lines = packed.lines.reshape(layout.num_lines, layout.lanes_per_line)
    return rows_of_lines(lines, layout)[: layout.num_rows]


def lines_of_rows(stored: Any, layout: RowLayout) -> Any:
    """Puts stored rows (NumPy or JAX) into whole lines. Unused lanes are zero.

    The row count in `layout` is ignored.
    """
    if layout.lines_per_row > 1:
        return stored.reshape(-1, layout.lanes_per_line)
    used_lanes = layout.groups_per_line * layout.lanes_per_row
    if layout.narrow_dtype is None:
        lines = stored.reshape(-1, used_lanes)
    else:
        sharing_lanes = stored.reshape(-1, layout.rows_per_lane, used_lanes)
        lines = join_rows(sharing_lanes, layout.narrow_dtype)
    return padded(lines, layout.lanes_per_line)


def padded(values: Any, lanes: int) -> Any:
    """Pads with zeros to `lanes` columns."""
    missing = lanes - values.shape[1]
    if not missing:
        return values
    pad = jnp.pad if isinstance(values, jax.Array) else np.pad
    return pad(values, ((0, 0), (0, missing)))


def rows_of_lines(lines: Any, layout: RowLayout) -> Any:
    """Inverts `lines_of_rows`."""
    if layout.lines_per_row > 1:
        return lines.reshape(-1, layout.lanes_per_row)
    lines = lines[:, : layout.groups_per_line * layout.lanes_per_row]
    if layout.narrow_dtype is not None:
        lines = split_rows(lines, layout.narrow_dtype)
    return lines.reshape(-1, layout.lanes_per_row)


def lane_groups_of(
    row_ids: Int[Array, " ids"], layout: RowLayout
) -> Int[Array, " ids"]:
    """Finds the lane group of each row within its line."""
    # With a `dim` of 32, the four groups of a line hold the float32 rows 0, 1, 2 and 3.
    # For bfloat16, they hold rows 0 to 3 in their lower bits, and rows 4 to 7 in their
    # upper bits.
    return row_ids % layout.rows_per_line % layout.groups_per_line


def shifts_of(row_ids: Int[Array, " ids"], layout: RowLayout) -> Int[Array, " ids"]:
    """Finds the position of the lowest bit that each row uses in its lanes."""
    if layout.rows_per_lane == 1:
        return jnp.zeros_like(row_ids)
    return row_ids % layout.rows_per_line // layout.groups_per_line * 16


def select_lanes(
    lines: Shaped[Array, "ids lanes"],
    groups: Int[Array, " ids"],
    groups_per_line: int,
    dim: int,
) -> Array:
    """Selects a lane group from each line, by halving the line repeatedly."""
    # Unlike a masked sum, this keeps all bits, whatever other lane groups hold.
    if groups_per_line == 1:
        return lines[:, :dim]
    half = 1
    while 2 * half < groups_per_line:
        half *= 2
    low = lines[:, : half * dim]
    high = lines[:, half * dim : groups_per_line * dim]
    high = jnp.pad(high, ((0, 0), (0, low.shape[1] - high.shape[1])))
    is_high = groups >= half
    chosen = jnp.where(is_high[:, None], high, low)
    return select_lanes(chosen, jnp.where(is_high, groups - half, groups), half, dim)


def lines_to_add(
    row_ids: Int[Array, " ids"], values: Array, layout: RowLayout
) -> Array:
    """Makes lines that add each value to its row, and change no other row.

    In a flat layout, the lines are single values. If a row takes several lines, these
    lines are consecutive.
    """
    if layout.is_flat:
        return values.reshape(row_ids.shape)
    values = values.reshape(row_ids.shape[0], -1)
    is_float = jnp.issubdtype(values.dtype, jnp.floating)
    # Adding -0.0 changes nothing, but adding 0.0 would turn -0.0 into 0.0.
    neutral = np.asarray(-0.0 if is_float else 0, values.dtype)
    missing = layout.lanes_per_row - values.shape[1]
    if missing:
        values = jnp.pad(values, ((0, 0), (0, missing)), constant_values=neutral)
    if layout.lines_per_row > 1:
        return values.reshape(-1, layout.lanes_per_line)
    groups = lane_groups_of(row_ids, layout)
    used_lanes = layout.groups_per_line * layout.lanes_per_row
    copies = jnp.tile(values, (1, layout.groups_per_line))
    lines = jnp.pad(copies, ((0, 0), (0, layout.lanes_per_line - used_lanes)))
    if layout.groups_per_line == 1:
        return lines
    lanes = jnp.arange(layout.lanes_per_line, dtype=jnp.int32)
    group_of_lane = lanes // layout.lanes_per_row
    return jnp.where(group_of_lane[None, :] == groups[:, None], lines, neutral)
