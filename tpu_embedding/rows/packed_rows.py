"""Rows of a table, a slot variable or an exchange buffer, packed into lines.

A TPU stores a float32 `[rows, dim]` array with `dim` below 128 column by column, and
then copies the whole table before each gather or scatter. Packing prevents the copy:
`128 // dim` rows share one *line* of 128 lanes, and a wide row takes a multiple of 128
lanes. On CPU and GPU a line is one row. Rows of a single value lie in a flat array on
every device, because a SparseCore reads and adds to single elements of one.

A SparseCore is said to take at most 16 GiB per array (`hardware.py`). The lines of a
larger table lie in several *column arrays*: each holds the same columns of every row.
Only this folder and `tables/` see them: whole lines are joined where they are read, and
split where they are written.

Code above this folder names logical rows. Only exchanges, and rules that treat each
element on its own, handle lines as they are. `access.py` reads and changes rows.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from tpu_embedding.rows.kernels.kernel_access import KernelAccess
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


def gather_in_bounds(values: Array, places: Int[Array, " n"]) -> Array:
    """Returns `values[places]` along the first axis; every place must be in bounds."""
    return values.at[places].get(mode="promise_in_bounds", wrap_negative_indices=False)


def join_columns(arrays: Sequence[Any]) -> Any:
    """Returns whole lines of the parts in column arrays; one array is returned as is.

    Args:
      arrays: NumPy or JAX, all columns in their order.
    """
    if len(arrays) == 1:
        return arrays[0]
    concatenate: Any = np.concatenate
    if isinstance(arrays[0], jax.Array):
        concatenate = jnp.concatenate
    return concatenate(arrays, axis=1)


class TableRange(NamedTuple):
    """A table's rows in a stack: `row_offset` to `row_offset + vocabulary_size`."""

    name: str
    row_offset: int
    vocabulary_size: int


@dataclasses.dataclass(frozen=True)
class StackContents:
    """The tables that an array of rows holds, and how their rows are dealt to shards.

    Two arrays of one shape can hold other tables, or the same tables in another order.
    The contents tell them apart, so the rows of one plan are never read by another.

    Attributes:
      tables: in the order of their rows.
      num_shards: shards over which the rows are dealt round-robin.
    """

    tables: tuple[TableRange, ...]
    num_shards: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowLayout:
    """The packing of the rows of one shard, or of an exchange buffer, into lines.

    Attributes:
      num_rows: logical rows per shard.
      row_shape: shape of one row: `(dim,)`, or `()` for one value per row.
      line_lanes: the width of a line is a multiple of it; None: a line is one row.
      spare_lines: lines behind the last row; their content is never read as a row.
      contents: tables that the rows belong to; None: rows of a buffer.
      narrow_dtype: storage type of rows of which several elements share a 32-bit lane;
        None: a lane holds one element, of the array's dtype.
      column_arrays: arrays that share the columns of every row in equal parts; 1: an
        array holds whole lines.
    """

    num_rows: int
    row_shape: tuple[int, ...]
    line_lanes: int | None = None
    spare_lines: int = 0
    contents: StackContents | None = None
    narrow_dtype: NarrowDtype | None = None
    column_arrays: int = 1

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return self.row_shape[0] if self.row_shape else 1

    @property
    def row_lanes(self) -> int:
        """Lanes that a row takes, alone or together with other rows."""
        if self.narrow_dtype is None:
            return self.dim
        return lanes_per_row(self.narrow_dtype, self.dim)

    @property
    def rows_per_lane(self) -> int:
        """Logical rows that share each lane."""
        return 1 if self.narrow_dtype is None else rows_per_lane(self.narrow_dtype)

    @property
    def dtype_name(self) -> str:
        """Name of the storage type of a table's rows."""
        return self.narrow_dtype or "float32"

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of a table, without unused lanes."""
        return LANE_BYTES * self.row_lanes // self.rows_per_lane

    @property
    def stored_dtype(self) -> Any:
        """Dtype of the lanes of a table: float32, or int32 for words."""
        return jnp.float32 if self.narrow_dtype is None else jnp.int32

    @property
    def is_flat(self) -> bool:
        """True if rows take a single lane; a line is then one lane."""
        return self.row_lanes == 1

    @property
    def places_per_line(self) -> int:
        """Places for rows in a line, side by side; rows in the same lanes share one."""
        if self.line_lanes is None or self.is_flat:
            return 1
        return max(1, self.line_lanes // self.row_lanes)

    @property
    def rows_per_line(self) -> int:
        """Logical rows that share a line: `rows_per_lane` in each of its places."""
        return self.places_per_line * self.rows_per_lane

    @property
    def lanes(self) -> int:
        """Width of a line, in lanes, over all its arrays."""
        if self.line_lanes is None or self.is_flat:
            return self.row_lanes
        return round_up(self.row_lanes, self.line_lanes)

    @property
    def rows_fill_lines(self) -> bool:
        """True if the rows of a line leave no lane unused."""
        return self.places_per_line * self.row_lanes == self.lanes

    @property
    def num_lines(self) -> int:
        """Lines per shard."""
        return -(-self.num_rows // self.rows_per_line) + self.spare_lines

    @property
    def lines_shape(self) -> tuple[int, ...]:
        """Shape of each array of lines, per shard: `(num_lines,)` if rows are flat."""
        if self.is_flat:
            return (self.num_lines,)
        return self.num_lines, self.lanes // self.column_arrays

    def split_columns(self, lines: Any) -> list[Any]:
        """Returns the part of whole lines in each array; the inverse of `join_columns`.

        Args:
          lines: `[lines, lanes]`, NumPy or JAX, or the only array.
        """
        if self.column_arrays == 1:
            return [lines]
        split: Any = jnp.split if isinstance(lines, jax.Array) else np.split
        return split(lines, self.column_arrays, axis=1)

    def slot_layout(self, row: jax.ShapeDtypeStruct) -> "RowLayout":
        """Returns the layout of a slot variable of the same rows.

        Args:
          row: shape and dtype of one row of the slot variable.
        """
        layout = dataclasses.replace(self, row_shape=row.shape, narrow_dtype=None)
        if row.shape != self.row_shape:
            return dataclasses.replace(layout, spare_lines=0, column_arrays=1)
        # Spare lines stay: passes over all lines need as many as the table has.
        return layout

    def buffer_layout(self, num_rows: int, *, is_packed: bool) -> "RowLayout":
        """Returns the layout of a buffer of rows that were read from these.

        Narrow rows are decoded in the buffer, and column arrays joined.

        Args:
          num_rows: rows of the buffer.
          is_packed: True if rows share lines, as kernels read and write them. False if
            a line is a row, as XLA's gather writes them.
        """
        return dataclasses.replace(
            self,
            num_rows=num_rows,
            line_lanes=self.line_lanes if is_packed else None,
            spare_lines=0,
            contents=None,
            narrow_dtype=None,
            column_arrays=1,
        )

    def resized(self, num_rows: int) -> "RowLayout":
        """Returns the layout of another number of rows, without spare lines."""
        return dataclasses.replace(self, num_rows=num_rows, spare_lines=0)

    @functools.cached_property
    def leaf_name(self) -> str:
        """Name of the array in pytree paths, and so in checkpoints.

        The name of a table's array spells shards, lines and lanes. It ends with a
        digest of all that decides where a row lies. A checkpointer that matches arrays
        by name therefore refuses an array whose rows lie elsewhere.
        """
        if self.contents is None:
            return "lines"
        facts = (
            self.contents.tables,
            self.contents.num_shards,
            self.num_rows,
            self.row_shape,
            self.rows_per_line,
            self.lines_shape,
            self.narrow_dtype,
        )
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:8]
        sizes = "x".join(map(str, (self.contents.num_shards, *self.lines_shape)))
        return f"lines_{sizes}_{digest}"

    def differences(self, other: "RowLayout") -> list[str]:
        """Returns one line per fact in which rows of the other layout lie elsewhere.

        Each line gives the fact here first, then the other's.
        """
        found = []
        if self.contents != other.contents:
            found += _content_differences(self.contents, other.contents)
        for name in ("num_rows", "row_shape", "rows_per_line", "lines_shape"):
            here, there = getattr(self, name), getattr(other, name)
            if here != there:
                found.append(f"{name} per shard: {here}, not {there}")
        if self.narrow_dtype != other.narrow_dtype:
            found.append(f"dtype: {self.dtype_name}, not {other.dtype_name}")
        return found


def _content_differences(
    here: StackContents | None, there: StackContents | None
) -> list[str]:
    """Returns one line per difference of the tables, or of the number of shards."""
    if here is None or there is None:
        return ["one of them is a buffer, not a table"]
    found = []
    if here.num_shards != there.num_shards:
        found.append(f"num_shards: {here.num_shards}, not {there.num_shards}")
    tables = {table.name: table for table in here.tables}
    others = {table.name: table for table in there.tables}
    for name in sorted(tables.keys() | others.keys()):
        table, other = tables.get(name), others.get(name)
        if table is None or other is None:
            found.append(f"table {name!r}: {'missing' if table is None else 'extra'}")
        elif table != other:
            found.append(
                f"table {name!r}: rows {table.row_offset} to "
                f"{table.row_offset + table.vocabulary_size}, not {other.row_offset} "
                f"to {other.row_offset + other.vocabulary_size}"
            )
    return found


@no_type_check  # It also holds shapes and shardings in place of arrays.
@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Rows in lines: those of a table, a slot variable or an exchange buffer.

    Attributes:
      lines: `layout.lines_shape` per shard; the shards' lines one after the other in
        the global view. A tuple of such arrays if the layout has several column arrays.
      layout: packing of the rows of one shard.
      kernels: accesses that kernels make to these rows; None: XLA makes all.
    """

    # Any: leaves of a pytree may be arrays, shapes or shardings.
    lines: Any
    layout: RowLayout = dataclasses.field(metadata={"static": True})
    kernels: KernelAccess | None = dataclasses.field(
        default=None, metadata={"static": True}
    )

    def tree_flatten_with_keys(self):
        """Returns the lines under the layout's `leaf_name`, and the static facts."""
        key = jax.tree_util.GetAttrKey(self.layout.leaf_name)
        return ((key, self.lines),), (self.layout, self.kernels)

    def tree_flatten(self):
        """Returns the lines, and the static facts."""
        return (self.lines,), (self.layout, self.kernels)

    @classmethod
    def tree_unflatten(cls, facts, leaves):
        """Returns the rows with these lines."""
        layout, kernels = facts
        return cls(lines=leaves[0], layout=layout, kernels=kernels)

    @classmethod
    def of_arrays(
        cls,
        arrays: Sequence[Any],
        layout: RowLayout,
        kernels: KernelAccess | None = None,
    ) -> "PackedRows":
        """Returns the rows in some arrays: as many as the layout has column arrays."""
        assert len(arrays) == layout.column_arrays
        lines = arrays[0] if len(arrays) == 1 else tuple(arrays)
        return cls(lines=lines, layout=layout, kernels=kernels)

    def with_arrays(self, arrays: Sequence[Any]) -> "PackedRows":
        """Returns these rows with other arrays; see `arrays`."""
        return self.of_arrays(arrays, self.layout, self.kernels)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The lines, or the column arrays that share them."""
        return self.lines if self.layout.column_arrays > 1 else (self.lines,)

    @property
    def lines_dtype(self) -> Any:
        """Dtype of the lanes."""
        return self.arrays[0].dtype

    def buffer_layout(self, num_rows: int) -> RowLayout:
        """Returns the layout of a buffer of `num_rows` rows that were read from these.

        Rows share lines in the buffer where kernels read them.
        """
        return self.layout.buffer_layout(num_rows, is_packed=self.kernels is not None)

    def slot_kernels(self, row: jax.ShapeDtypeStruct) -> KernelAccess | None:
        """Returns the kernels that reach a slot variable of these rows.

        Kernels reach float32 slots whose rows are as long as the table's. XLA moves
        all other slots.

        Args:
          row: shape and dtype of one row of the slot variable.
        """
        is_reached = row.shape == self.layout.row_shape and row.dtype == jnp.float32
        return self.kernels if is_reached else None


def pack_rows(
    rows: Array, layout: RowLayout, kernels: KernelAccess | None = None
) -> PackedRows:
    """Packs `[num_rows, *row_shape]`, per shard. Unused lanes are zero.

    Narrow rows are rounded to the nearest numbers of their type.

    Args:
      rows: the rows.
      layout: packing of the rows.
      kernels: accesses that kernels make to the rows.
    """
    rows = rows.reshape(layout.num_rows, layout.dim)
    packed = pack_stored(store_rows(rows, layout), layout)
    return dataclasses.replace(packed, kernels=kernels)


def full_rows(
    value: Any, layout: RowLayout, dtype: Any, kernels: KernelAccess | None = None
) -> PackedRows:
    """Returns rows with one value in all elements, per shard. Unused lanes are zero.

    XLA writes them as they are stored. It would compute rows first, and then pack them.

    Args:
      value: a number.
      layout: packing of the rows, which are not narrow.
      dtype: type of the elements.
      kernels: accesses that kernels make to the rows.
    """
    shape = layout.lines_shape
    num_rows = layout.num_lines * layout.rows_per_line
    if layout.rows_fill_lines and num_rows == layout.num_rows:
        arrays = [jnp.full(shape, value, dtype) for _ in range(layout.column_arrays)]
        return PackedRows.of_arrays(arrays, layout, kernels)
    assert layout.column_arrays == 1
    value = jnp.full(shape, value, dtype)
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0) * layout.rows_per_line
    if not layout.is_flat:
        place = jax.lax.broadcasted_iota(jnp.int32, shape, 1) // layout.dim
        row = jnp.where(place < layout.places_per_line, row + place, layout.num_rows)
    lines = jnp.where(row < layout.num_rows, value, jnp.zeros((), dtype))
    return PackedRows(lines=lines, layout=layout, kernels=kernels)


def unpack_rows(packed: PackedRows) -> Array:
    """Returns `[num_rows, *row_shape]`, per shard; the inverse of `pack_rows`."""
    layout = packed.layout
    rows = load_rows(unpack_stored(packed), layout)
    return rows.reshape(layout.num_rows, *layout.row_shape)


def store_rows(rows: Any, layout: RowLayout) -> Any:
    """Returns rows as the layout stores them; narrow ones are rounded to nearest.

    Args:
      rows: `[rows, dim]`, NumPy or JAX; float32 if narrow.
      layout: packing of a table or slot variable, with any number of rows.

    Returns:
      `[rows, row_lanes]`.
    """
    if layout.narrow_dtype is None:
        return rows
    return encode_rows(rows, layout.narrow_dtype)


def load_rows(stored: Any, layout: RowLayout) -> Any:
    """Returns stored rows as `[rows, dim]`, narrow ones as float32.

    Args:
      stored: `[rows, row_lanes]`, NumPy or JAX.
      layout: see `store_rows`.
    """
    if layout.narrow_dtype is None:
        return stored
    return decode_rows(stored, layout.narrow_dtype, layout.dim)


def pack_stored(stored: Shaped[Array, "rows _"], layout: RowLayout) -> PackedRows:
    """Packs rows as they are stored, `[num_rows, row_lanes]`, per shard."""
    missing = layout.num_lines * layout.rows_per_line - layout.num_rows
    lines = lines_of_rows(jnp.pad(stored, ((0, missing), (0, 0))), layout)
    parts = layout.split_columns(lines)
    arrays = [part.reshape(layout.lines_shape) for part in parts]
    return PackedRows.of_arrays(arrays, layout)


def unpack_stored(packed: PackedRows) -> Shaped[Array, "rows _"]:
    """Returns rows as they are stored, per shard; the inverse of `pack_stored`."""
    layout = packed.layout
    lines = join_columns(packed.arrays).reshape(layout.num_lines, layout.lanes)
    return rows_of_lines(lines, layout)[: layout.num_rows]


def lines_of_rows(stored: Any, layout: RowLayout) -> Any:
    """Puts stored rows into whole lines. Unused lanes are zero.

    Args:
      stored: `[lines * rows_per_line, row_lanes]`, NumPy or JAX.
      layout: packing of these rows; it may have another number of rows.

    Returns:
      `[lines, lanes]`.
    """
    used_lanes = layout.places_per_line * layout.row_lanes
    if layout.narrow_dtype is None:
        lines = stored.reshape(-1, used_lanes)
    else:
        parts = stored.reshape(-1, layout.rows_per_lane, used_lanes)
        lines = join_rows(parts, layout.narrow_dtype)
    unused_lanes = layout.lanes - used_lanes
    pad = jnp.pad if isinstance(stored, jax.Array) else np.pad
    return pad(lines, ((0, 0), (0, unused_lanes)))


def rows_of_lines(lines: Any, layout: RowLayout) -> Any:
    """Returns the stored rows of whole lines; the inverse of `lines_of_rows`."""
    lines = lines[:, : layout.places_per_line * layout.row_lanes]
    if layout.narrow_dtype is not None:
        lines = split_rows(lines, layout.narrow_dtype)
    return lines.reshape(-1, layout.row_lanes)


def concatenate_rows(
    parts: Sequence[Array], layout: RowLayout, kernels: KernelAccess | None = None
) -> PackedRows:
    """Packs several `[rows, dim]` arrays, one behind the other. Per shard.

    Args:
      parts: the rows.
      layout: packing of all rows together.
      kernels: accesses that kernels make to the rows.
    """
    fill_lines = layout.rows_fill_lines and all(
        part.shape[0] % layout.rows_per_line == 0 for part in parts
    )
    if layout.rows_per_line == 1 or not fill_lines:
        return pack_rows(jnp.concatenate(parts), layout, kernels)
    lines = [part.reshape(-1, layout.lanes) for part in parts]
    return PackedRows(lines=jnp.concatenate(lines), layout=layout, kernels=kernels)


def keep_rows(packed: PackedRows, is_kept: Bool[Array, " rows"]) -> PackedRows:
    """Sets all other rows to zero. Per shard."""
    zero = jnp.zeros((), packed.lines.dtype)
    is_kept = _values_by_lane(is_kept, packed.layout)
    return dataclasses.replace(packed, lines=jnp.where(is_kept, packed.lines, zero))


def scale_rows(packed: PackedRows, gains: Float[Array, " rows"]) -> PackedRows:
    """Multiplies each row by its gain. Per shard."""
    lines = packed.lines * _values_by_lane(gains, packed.layout)
    return dataclasses.replace(packed, lines=lines)


def clear_last_row(packed: PackedRows) -> PackedRows:
    """Sets the last row to zero. Per shard."""
    layout = packed.layout
    line, place = divmod(layout.num_rows - 1, layout.rows_per_line)
    if layout.is_flat:
        lines = packed.lines.at[line].set(0)
    else:
        zeros = jnp.zeros((1, layout.dim), packed.lines.dtype)
        place_in_lines = (line, place * layout.dim)
        lines = jax.lax.dynamic_update_slice(packed.lines, zeros, place_in_lines)
    return dataclasses.replace(packed, lines=lines)


def broadcast_to_lanes(columns: Sequence[Array], layout: RowLayout) -> Array:
    """Repeats one value per row over the lanes of that row.

    Args:
      columns: `[lines]` for each place of a line: the values of the rows that lie at
        this place.
      layout: packing of these rows.

    Returns:
      `[lines, lanes]`.
    """
    place_of_lane = jnp.arange(layout.lanes, dtype=jnp.int32) // layout.dim
    # Place by place: XLA:TPU would write the result of a reshape of lanes to memory.
    result = jnp.broadcast_to(columns[-1][:, None], (len(columns[-1]), layout.lanes))
    for place, column in enumerate(columns[:-1]):
        result = jnp.where(place_of_lane[None, :] == place, column[:, None], result)
    return result


def _values_by_lane(values: Array, layout: RowLayout) -> Any:
    """Broadcasts one value per row, `[rows]`, against the lines of these rows."""
    if layout.rows_per_line == 1:
        return values if layout.is_flat else values[:, None]
    # A gather brings the values of one place together: a reshape of single numbers
    # into short rows costs a TPU two instructions for each number.
    places, lines = jnp.divmod(
        jnp.arange(layout.rows_per_line * layout.num_lines, dtype=jnp.int32),
        layout.num_lines,
    )
    rows = jnp.minimum(lines * layout.rows_per_line + places, layout.num_rows - 1)
    is_mask = values.dtype == bool
    by_place = gather_in_bounds(values.astype(jnp.int32) if is_mask else values, rows)
    columns = jnp.split(by_place.astype(values.dtype), layout.rows_per_line)
    return broadcast_to_lanes(columns, layout)
