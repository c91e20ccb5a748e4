"""Rows of a table or a slot variable, packed into lines.

A TPU stores a float32 `[rows, dim]` array with `dim` below 128 column by column, and
then copies the whole table before each gather or scatter. Packing prevents the copy:
`128 // dim` rows share one *line* of 128 lanes, and a longer row takes a multiple of
128 lanes. On CPU and GPU, a line is one row. Rows of a single value are in a flat array
on every device, because a TPU can read single elements of such an array, and add to
them.

A line consists of *lane groups*: neighbouring lanes that hold a row, or two rows of 16
bits per element. With a `dim` of 32, a float32 table has four rows per line:

    lanes    0       32       64       96      127
    line 0   | row 0  | row 1  | row 2  | row 3  |     groups_per_line = 4
    line 1   | row 4  | row 5  | row 6  | row 7  |     rows_per_line = 4

A bfloat16 table of this `dim` has eight rows per line. Each lane holds an element of
one row in its lower bits, and an element of another row in its upper bits:

    line 0   | 0 and 4 | 1 and 5 | 2 and 6 | 3 and 7 |     rows_per_lane = 2

The functions convert between three forms of rows: the values, `[rows, dim]`; the
*stored* rows, `[rows, lanes_per_row]`, with narrow rows as words; and the lines. Code
above this folder uses logical rows. Only rules that treat each element independently
work on lines directly. `access.py` reads and changes rows.
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
"""Bytes of a lane of a table: a float32, or a word of a narrow row."""


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def bank_lanes(dim: int) -> int:
    """Returns the lanes of a row in a table whose rows are dealt to banks.

    `dim` is rounded up to 8, 16, 32, 64 or a multiple of 128. At these widths, lines of
    128 lanes hold rows in the same way as a TPU's `[rows, lanes]` array.

    Example:
      >>> [bank_lanes(dim) for dim in (1, 20, 64, 65, 200)]
      [8, 32, 64, 128, 256]
    """
    if dim > 64:
        return round_up(dim, 128)
    return max(8, 1 << (dim - 1).bit_length())


def gather_in_bounds(values: Array, positions: Int[Array, " n"]) -> Array:
    """Returns `values[positions]` along the first axis. Positions must be in bounds."""
    return values.at[positions].get(
        mode="promise_in_bounds", wrap_negative_indices=False
    )


class TableRange(NamedTuple):
    """A table's rows in a stack: `row_offset` to `row_offset + vocabulary_size`."""

    name: str
    row_offset: int
    vocabulary_size: int


@dataclasses.dataclass(frozen=True)
class StackContents:
    """The tables that an array of rows holds, and how their rows are dealt to shards.

    Arrays of equal shape can hold different tables, or the same tables in a different
    order. The contents distinguish them, so no plan reads the rows of another plan.

    Attributes:
      tables: tables in the order of their rows.
      num_shards: shards over which the rows are dealt round-robin.
    """

    tables: tuple[TableRange, ...]
    num_shards: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowLayout:
    """The packing of the rows of one shard into lines.

    Attributes:
      num_rows: logical rows per shard.
      row_shape: shape of one row: `(dim,)`, or `()` for one value per row.
      tile_lanes: lanes of a hardware tile. Lines are whole tiles. If None, a line is
        one row.
      contents: tables that the rows belong to, if all of their rows are included.
      narrow_dtype: storage type of rows whose elements share 32-bit lanes. If None, a
        lane holds one element of the array's dtype.
      banks: number of ranges that the shard's rows are dealt to, round-robin; see
        `dealt`. With several banks, a row takes 8, 16, 32 or 64 lanes, or a multiple of
        128.
      bank_name: name of the banks in messages.
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
        """Elements of a row."""
        return self.row_shape[0] if self.row_shape else 1

    @functools.cached_property
    def lanes_per_row(self) -> int:
        """Lanes that a row takes, alone or shared with other rows."""
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
        """Name of the storage type of a table's rows."""
        return self.narrow_dtype or "float32"

    @property
    def stored_dtype(self) -> Any:
        """Dtype of the lanes of a table: float32, or int32 for words."""
        return jnp.float32 if self.narrow_dtype is None else jnp.int32

    @functools.cached_property
    def is_flat(self) -> bool:
        """True if each row takes a single lane. Lines are then one lane wide."""
        return self.lanes_per_row == 1

    @functools.cached_property
    def groups_per_line(self) -> int:
        """Lane groups of a line. Each holds a row, or rows that share its lanes."""
        if self.tile_lanes is None or self.is_flat:
            return 1
        return max(1, self.tile_lanes // self.lanes_per_row)

    @functools.cached_property
    def rows_per_line(self) -> int:
        """Logical rows that share a line: `rows_per_lane` in each lane group."""
        return self.groups_per_line * self.rows_per_lane

    @functools.cached_property
    def lines_per_row(self) -> int:
        """Consecutive lines that a row takes, 1 unless rows are dealt to banks.

        A TPU stores a line of several times 128 lanes in pieces, with pieces of other
        lines in between. Rows of banks are contiguous.
        """
        if self.banks == 1 or self.tile_lanes is None:
            return 1
        return max(1, self.lanes_per_row // self.tile_lanes)

    @functools.cached_property
    def lanes_per_line(self) -> int:
        """Width of a line, in lanes."""
        if self.tile_lanes is None or self.is_flat:
            return self.lanes_per_row
        return round_up(self.lanes_per_row, self.tile_lanes) // self.lines_per_row

    @functools.cached_property
    def num_lines(self) -> int:
        """Lines per shard."""
        return -(-self.num_rows // self.rows_per_line) * self.lines_per_row

    def line_of(self, row: Any) -> Any:
        """Returns the first line of a row."""
        return row // self.rows_per_line * self.lines_per_row

    def row_of(self, line: Any) -> Any:
        """Returns the first row of a line, or the row that the line is part of."""
        return line // self.lines_per_row * self.rows_per_line

    @functools.cached_property
    def lines_shape(self) -> tuple[int, ...]:
        """Shape of the lines, per shard: `(num_lines,)` if they are flat."""
        if self.is_flat:
            return (self.num_lines,)
        return self.num_lines, self.lanes_per_line

    @functools.cached_property
    def rows_per_bank(self) -> int:
        """Rows in the range of each bank. The last ones may be unused."""
        return self.num_rows // self.banks

    def dealt(self, rows: Any) -> Any:
        """Returns the places of the shard's rows after dealing them to banks.

        Row `r` belongs to bank `r % banks`, so hot neighbouring rows spread out.

        Args:
          rows: row numbers before dealing, an int or an array (NumPy or JAX).
        """
        if self.banks == 1:
            return rows
        return rows % self.banks * self.rows_per_bank + rows // self.banks

    def undealt(self, rows: Any) -> Any:
        """Returns the rows before dealing, the inverse of `dealt`."""
        if self.banks == 1:
            return rows
        return rows % self.rows_per_bank * self.banks + rows // self.rows_per_bank

    def slot_layout(self, row: jax.ShapeDtypeStruct) -> "RowLayout":
        """Returns the layout of a slot variable, given its rows' shape and dtype."""
        return dataclasses.replace(self, row_shape=row.shape, narrow_dtype=None)

    @functools.cached_property
    def facts(self) -> tuple[str, ...]:
        """Everything that determines the place of a row, one string per fact.

        Two layouts have rows in the same lanes if all facts are equal.
        """
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
        """Name of the array in pytree paths, and so in checkpoints.

        The name of a table's array lists shards, lines and lanes, and ends with a
        digest of `facts`. A checkpointer that matches arrays by name therefore rejects
        an array with a different layout.
        """
        if self.contents is None:
            return "lines"
        digest = hashlib.sha256(repr(self.facts).encode()).hexdigest()[:8]
        sizes = "x".join(map(str, (self.contents.num_shards, *self.lines_shape)))
        return f"lines_{sizes}_{digest}"


@no_type_check  # It also holds shapes and shardings instead of arrays.
@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedRows:
    """The rows of a table or a slot variable, in lines.

    Attributes:
      lines: `layout.lines_shape` per shard. Globally, the shards' lines are one after
        the other.
      layout: packing of the rows of one shard that its device holds.
    """

    # Any: leaves of a pytree may be arrays, shapes or shardings.
    lines: Any
    layout: RowLayout = dataclasses.field(metadata={"static": True})

    # A subclass may hold only some of the rows, and know where the rest is.
    holds_all_rows: ClassVar[bool] = True

    def locate(self, row_ids):
        """Finds rows that are about to change, once per round of an update.

        Returns:
          These rows, after counting the changes that will be dropped, and the places of
          the rows in the lines: `PADDING_ROW_ID` for rows that the lines lack. The rows
          of a table and of its slot variables have equal places.
        """
        return self, row_ids

    def read_windows(self, windows, exchange, receivers):
        """Yields the blocks of windows, like `row_stream.read_blocks`."""
        raise NotImplementedError

    def write_windows(self, windows, exchange, read):
        """Replaces the rows of windows, like `row_stream.write_blocks`.

        If the arrays of these rows are only shapes, all other rows become zeros.
        """
        raise NotImplementedError

    def check_current(self):
        """Raises ValueError if the host has newer rows than these."""

    def tree_flatten_with_keys(self):
        """Returns the lines under the layout's `leaf_name`, and the layout."""
        key = jax.tree_util.GetAttrKey(self.layout.leaf_name)
        return ((key, self.lines),), self.layout

    def tree_flatten(self):
        """Returns the lines, and the layout."""
        return (self.lines,), self.layout

    @classmethod
    def tree_unflatten(cls, layout, leaves):
        """Returns the rows with these lines."""
        return cls(lines=leaves[0], layout=layout)


def pack_rows(rows: Array, layout: RowLayout) -> PackedRows:
    """Packs rows `[num_rows, *row_shape]`, per shard. Unused lanes are zero.

    Narrow rows are rounded to nearest.
    """
    rows = rows.reshape(layout.num_rows, layout.dim)
    return pack_stored(store_rows(rows, layout), layout)


def full_rows(value: Any, layout: RowLayout, dtype: Any) -> PackedRows:
    """Returns rows with one value in all elements, per shard. Unused lanes are zero.

    XLA writes the packed lines directly, instead of computing rows and packing them.
    Rows must not be narrow.
    """
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
    """Unpacks rows to `[num_rows, *row_shape]`, per shard."""
    layout = packed.layout
    rows = load_rows(unpack_stored(packed), layout)
    return rows.reshape(layout.num_rows, *layout.row_shape)


def store_rows(rows: Any, layout: RowLayout) -> Any:
    """Returns rows as the layout stores them. Narrow rows are rounded to nearest.

    Args:
      rows: `[rows, dim]`, NumPy or JAX; float32 if the layout is narrow.
      layout: packing of a table or slot variable, with any number of rows.

    Returns:
      `[rows, lanes_per_row]`.
    """
    if layout.narrow_dtype is None:
        return padded(rows, layout.lanes_per_row)
    return encode_rows(rows, layout.narrow_dtype)


def load_rows(stored: Any, layout: RowLayout) -> Any:
    """Returns stored rows as `[rows, dim]`, narrow rows as float32."""
    if layout.narrow_dtype is None:
        return stored[:, : layout.dim]
    return decode_rows(stored, layout.narrow_dtype, layout.dim)


def pack_stored(stored: Shaped[Array, "rows _"], layout: RowLayout) -> PackedRows:
    """Packs stored rows `[num_rows, lanes_per_row]`, per shard."""
    missing = layout.row_of(layout.num_lines) - layout.num_rows
    lines = lines_of_rows(jnp.pad(stored, ((0, missing), (0, 0))), layout)
    return PackedRows(lines=lines.reshape(layout.lines_shape), layout=layout)


def unpack_stored(packed: PackedRows) -> Shaped[Array, "rows _"]:
    """Unpacks lines to stored rows, per shard."""
    layout = packed.layout
    lines = packed.lines.reshape(layout.num_lines, layout.lanes_per_line)
    return rows_of_lines(lines, layout)[: layout.num_rows]


def lines_of_rows(stored: Any, layout: RowLayout) -> Any:
    """Puts stored rows into whole lines. Unused lanes are zero.

    Args:
      stored: `[lines * rows_per_line, lanes_per_row]`, NumPy or JAX.
      layout: packing of these rows. Its number of rows may differ.

    Returns:
      `[lines, lanes_per_line]`.
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
    """Pads an array `[n, _]` (NumPy or JAX) with zeros to `lanes` columns."""
    missing = lanes - values.shape[1]
    if not missing:
        return values
    pad = jnp.pad if isinstance(values, jax.Array) else np.pad
    return pad(values, ((0, 0), (0, missing)))


def rows_of_lines(lines: Any, layout: RowLayout) -> Any:
    """Returns the stored rows of whole lines, the inverse of `lines_of_rows`."""
    if layout.lines_per_row > 1:
        return lines.reshape(-1, layout.lanes_per_row)
    lines = lines[:, : layout.groups_per_line * layout.lanes_per_row]
    if layout.narrow_dtype is not None:
        lines = split_rows(lines, layout.narrow_dtype)
    return lines.reshape(-1, layout.lanes_per_row)


def lane_groups_of(
    row_ids: Int[Array, " ids"], layout: RowLayout
) -> Int[Array, " ids"]:
    """Returns the lane group of each row within its line."""
    return row_ids % layout.rows_per_line % layout.groups_per_line


def shifts_of(row_ids: Int[Array, " ids"], layout: RowLayout) -> Int[Array, " ids"]:
    """Returns the position of the lowest bit of each row in its lanes."""
    if layout.rows_per_lane == 1:
        return jnp.zeros_like(row_ids)
    return row_ids % layout.rows_per_line // layout.groups_per_line * 16


def select_lanes(
    lines: Shaped[Array, "ids lanes"],
    groups: Int[Array, " ids"],
    groups_per_line: int,
    dim: int,
) -> Array:
    """Selects a lane group from each line, by halving the line repeatedly.

    Unlike a masked sum, a selection keeps the row's bits, whatever its neighbours hold.
    """
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
    """Returns lines that hold each value in the lanes of its row.

    In a flat layout, these are single values. The lines of a row are consecutive. The
    lanes of other rows hold a number that changes nothing when added.
    """
    if layout.is_flat:
        return values.reshape(row_ids.shape)
    values = values.reshape(row_ids.shape[0], -1)
    is_float = jnp.issubdtype(values.dtype, jnp.floating)
    # Adding 0.0 would turn -0.0 into 0.0.
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
