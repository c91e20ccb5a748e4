"""Converts between stacks and tables: stacks on devices, one NumPy array per table.

The layout of a stack changes with the devices, the stacking and the packing. The arrays
per table do not: they hold the logical rows as the user declared them.

Each process copies the rows of its own devices. To read rows of other processes, all of
them receive block after block. Beside the tables that the user gets or gives, the host
holds the rows of one shard at a time, and reading needs a block of them only.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embedding.argument_checks import check_mapping, check_type
from tpu_embedding.plan.check_rows import check_stack
from tpu_embedding.plan.plan import PLAN, EmbeddingPlan
from tpu_embedding.plan.stack_plan import StackPlan, TablePlan
from tpu_embedding.rows.file_rows import values_of_file_rows
from tpu_embedding.rows.packed_rows import (
    LANE_BYTES,
    PackedRows,
    RowLayout,
    lines_of_rows,
    load_rows,
    round_up,
    rows_of_lines,
    store_rows,
)
from tpu_embedding.tables.row_stream import read_blocks

_BLOCK_BYTES: Final = 2**26
"""Approximate size of a block of rows that is copied to the host."""


class NotFinite:
    """Counts the numbers of new rows that are NaN or infinite, and warns of them."""

    def __init__(self):
        self._found: dict[str, tuple[int, int]] = {}

    def look_at(self, rows: np.ndarray, start: int, owner: str) -> None:
        """Counts numbers of rows `[rows, ...]`, whose first one is row `start`."""
        if not jnp.issubdtype(rows.dtype, jnp.floating):
            return
        is_bad = ~np.isfinite(rows)
        if is_bad.any():
            row = start + int(np.argwhere(is_bad)[0, 0])
            count, row = self._found.get(owner, (0, row))
            self._found[owner] = count + int(is_bad.sum()), row

    def warn(self) -> None:
        """Warns once of all that was found."""
        if self._found:
            found = "; ".join(
                f"{owner} hold {count}, the first in row {row}"
                for owner, (count, row) in self._found.items()
            )
            warnings.warn(
                f"Numbers that are NaN or infinite were written to tables: {found}. "
                "Lookups of these rows return them. Replace them in the source, as by "
                "np.nan_to_num.",
                stacklevel=3,
            )


def unstack_tables(
    stacked: dict[str, PackedRows], plan: EmbeddingPlan
) -> dict[str, np.ndarray]:
    """Returns each table's values, or one slot variable's values, by table name.

    Args:
      stacked: stack name to packed rows, global. They hold either the tables or one
        slot variable of each stack. Stacks may be missing.
      plan: plan of the embedding layer.

    Returns:
      Table name to array `[vocabulary_size, *row_shape]`, in logical row order. Tables
      are float32, whatever they are stored in.

    Raises:
      ValueError: if the arrays were made for another plan.
    """
    values = {}
    for stack in plan.stacks:
        if stack.name not in stacked:
            continue
        packed = stacked[stack.name]
        check_stack(packed, stack)
        values |= _unstack(packed, stack, plan)
    return values


def with_table_values(
    stacked: dict[str, PackedRows], values: dict[str, np.ndarray], plan: EmbeddingPlan
) -> dict[str, PackedRows]:
    """Returns the stacks with the values of the given tables replaced.

    Args:
      stacked: stack name to packed rows, as in `unstack_tables`.
      values: table name to real numbers, `[vocabulary_size, *row_shape]`. Those of
        narrow tables are rounded to the nearest numbers of their type.
      plan: plan of the embedding layer.

    Numbers that are NaN or infinite are written, with a warning that counts them.

    Raises:
      ValueError: if a table is unknown, its stack is missing, or the stacks were made
        for another plan; if an array has the wrong shape, is complex or not numeric,
        or is beyond the range of its type.
    """
    known = {table.name for stack in plan.stacks for table in stack.tables}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(
            f"values must name tables of the plan, {sorted(known)}, got unknown tables "
            f"{unknown}."
        )
    result = dict(stacked)
    not_finite = NotFinite()
    for stack in plan.stacks:
        if stack.name in stacked:
            check_stack(stacked[stack.name], stack)
        tables = [table for table in stack.tables if table.name in values]
        if not tables:
            continue
        if stack.name not in stacked:
            raise ValueError(
                f"stacked must contain stack {stack.name!r}, because values name its "
                f"table {tables[0].name!r}; got stacks {sorted(stacked)}. Pass that "
                "stack too, or leave the table out of values."
            )
        packed = stacked[stack.name]
        checked = {
            table.name: _checked(values[table.name], packed, table, not_finite)
            for table in tables
        }
        result[stack.name] = _with_values(packed, checked, stack, plan)
    not_finite.warn()
    return result


def check_values(values: Any, plan: EmbeddingPlan) -> None:
    """Raises TypeError unless values are a mapping, and a plan is one."""
    line = "te.functional.with_table_values(stacked, values, plan)"
    check_type("te.functional.with_table_values: plan", PLAN, plan, line)
    name = plan.stacks[0].tables[0].name
    check_mapping("values", values, f"{{{name!r}: array}}, by table name")


def _checked(
    values: Any, packed: PackedRows, table: TablePlan, not_finite: NotFinite
) -> np.ndarray:
    """Returns the values of a table as rows that can be stored, `[rows, dim]`."""
    layout = packed.layout
    shape = (table.num_rows, *layout.row_shape)
    owner = f"values of table {table.name!r}"
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{owner} must have shape {shape}: {error}") from None
    if array.shape != shape:
        raise ValueError(f"{owner} must have shape {shape}, got {array.shape}.")
    # NumPy does not know that bfloat16 is a floating type.
    kinds = (jnp.floating, jnp.integer, jnp.bool_)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in kinds):
        raise ValueError(f"{owner} must be real numbers, got dtype {array.dtype}.")
    array = array.reshape(shape[0], layout.dim)
    dtype = packed.lines.dtype
    is_narrow = layout.narrow_dtype is not None
    may_overflow = is_narrow or (
        jnp.issubdtype(dtype, jnp.floating) and not np.can_cast(array.dtype, dtype)
    )
    num_rows = _rows_per_block(layout)
    for start in range(0, shape[0], num_rows):
        rows = array[start : start + num_rows]
        if may_overflow:
            check_range(rows, start, layout.narrow_dtype or dtype.name, owner)
        not_finite.look_at(rows, start, owner)
    return array.astype(np.float32, copy=False) if is_narrow else array


def check_range(rows: np.ndarray, start: int, dtype: str, owner: str) -> None:
    """Refuses rows that a narrower type cannot hold.

    Args:
      rows: `[rows, ...]`, real numbers.
      start: number of the first row, for messages.
      dtype: name of the type.
      owner: owner of the rows, for messages.

    Raises:
      ValueError: if a number is beyond the range of the type.
    """
    if dtype == "int8":
        # Each row is spread between its smallest and largest element.
        with np.errstate(invalid="ignore", over="ignore"):
            rows = rows.astype(np.float32, copy=False)
            ranges = rows.max(axis=1) - rows.min(axis=1)
        is_bad = ~np.isfinite(ranges)
        if is_bad.any():
            row = int(np.argmax(is_bad))
            raise ValueError(
                f"{owner} must be finite for dtype int8, and so must the range of each "
                f"row; got {rows[row].min()} to {rows[row].max()} in row "
                f"{start + row}."
            )
        return
    largest = float(jnp.finfo(dtype).max)
    # In their own type, the limit of a wider one may be infinite.
    rows = rows.astype(np.promote_types(rows.dtype, np.float32), copy=False)
    is_bad = np.isfinite(rows) & (np.abs(rows) > largest)
    if is_bad.any():
        row, *column = map(int, np.argwhere(is_bad)[0])
        place = f", column {column[0]}" if column else ""
        raise ValueError(
            f"{owner} must lie within {largest:g} of zero for dtype {dtype}, got "
            f"{rows[row, *column]} in row {start + row}{place}."
        )


def _unstack(
    packed: PackedRows, stack: StackPlan, plan: EmbeddingPlan
) -> dict[str, np.ndarray]:
    """Returns the rows of each table of a stack, by table name."""
    layout = packed.layout
    dtype = packed.lines.dtype if layout.narrow_dtype is None else np.float32
    values = {
        table.name: np.empty((table.num_rows, layout.dim), dtype)
        for table in stack.tables
    }
    if _has_all_shards(packed, stack):
        _copy_shards(packed, stack, values)
    else:
        for turn in read_blocks(packed, stack, plan, receivers="all"):
            for table, start, rows in turn:
                new = values_of_file_rows(rows, layout).reshape(len(rows), layout.dim)
                values[table][start : start + len(rows)] = new
    return {
        table.name: values[table.name].reshape(-1, *layout.row_shape)
        for table in stack.tables
    }


def _has_all_shards(packed: PackedRows, stack: StackPlan) -> bool:
    """Returns True if the devices of this process hold every row."""
    lines = packed.lines
    starts = {shard.index[0].start or 0 for shard in lines.addressable_shards}
    return lines.is_fully_addressable or len(starts) == stack.num_shards


def _copy_shards(
    packed: PackedRows, stack: StackPlan, values: dict[str, np.ndarray]
) -> None:
    """Copies the rows of each shard to their places: faster than by blocks of rows."""
    lines_of = _lines_of_shards(packed)
    for shard in range(stack.num_shards):
        for start, lines in _blocks(lines_of(shard), packed.layout):
            stored = rows_of_lines(lines, packed.layout)
            for part in _parts_of_block(start, len(stored), shard, stack):
                rows = load_rows(stored[part.of_block], packed.layout)
                values[part.table_name][part.of_table] = rows


class _Part(NamedTuple):
    """The rows of a table that lie in a block of a shard's rows.

    Attributes:
      table_name: name of the table.
      of_block: their range in the block.
      of_table: the same rows of the table: every `num_shards`-th one.
    """

    table_name: str
    of_block: slice
    of_table: slice


def _parts_of_block(
    start: int, num_rows: int, shard: int, stack: StackPlan
) -> Iterator[_Part]:
    """Yields the tables in a block of rows, which begins at row `start` of a shard."""
    stride = stack.num_shards
    for table in stack.tables:
        offset, size = table.row_offset, table.num_rows
        first = max(start, -(-(offset - shard) // stride))
        end = min(start + num_rows, -(-(offset + size - shard) // stride))
        if first < end:
            first_row = first * stride + shard - offset
            last_row = (end - 1) * stride + shard - offset
            yield _Part(
                table.name,
                slice(first - start, end - start),
                slice(first_row, last_row + 1, stride),
            )


def _lines_of_shards(packed: PackedRows) -> Callable[[int], Any]:
    """Returns a function that returns the lines of a shard of this process."""
    lines, size = packed.lines, packed.layout.num_lines
    local = {
        (shard.index[0].start or 0) // size: shard.data
        for shard in lines.addressable_shards
        if shard.data.shape[0] == size
    }
    if local:
        return lambda shard: local[shard]
    # The rows are no result of this plan's programs: one device may hold all of them.
    whole = np.asarray(lines)
    return lambda shard: whole[shard * size : (shard + 1) * size]


def _blocks(lines: Any, layout: RowLayout) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the first row and the lines, `[lines, lanes]`, of each block of a shard.

    A block of a device's array is copied to the host alone: JAX would keep the copy of
    the whole array.
    """
    num_lines = _rows_per_block(layout) // layout.rows_per_line
    for start in range(0, layout.num_lines, num_lines):
        block = lines
        if num_lines < layout.num_lines:
            end = min(start + num_lines, layout.num_lines)
            block = (
                lines[start:end]
                if isinstance(lines, np.ndarray)
                else jax.lax.dynamic_slice_in_dim(lines, start, end - start)
            )
        block = np.asarray(block).reshape(-1, layout.lanes)
        yield start * layout.rows_per_line, block


def _rows_per_block(layout: RowLayout) -> int:
    row_bytes = LANE_BYTES * layout.lanes // layout.rows_per_line
    num_rows = max(1, _BLOCK_BYTES // max(1, row_bytes))
    return round_up(num_rows, layout.rows_per_line)


def _with_values(
    packed: PackedRows,
    values: Mapping[str, np.ndarray],
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> PackedRows:
    """Returns packed rows with the values of some tables replaced, shard by shard."""
    layout, sharding = packed.layout, plan.rows_sharding(stack)
    shape = packed.lines.shape
    indices = sharding.addressable_devices_indices_map(shape)
    devices_of: dict[int, list[Any]] = {}
    for device, index in indices.items():
        assert index is not None
        start = index[0].start or 0
        devices_of.setdefault(start // layout.num_lines, []).append(device)
    lines_of = _lines_of_shards(packed)
    arrays: list[jax.Array] = []
    for shard, devices in devices_of.items():
        lines = _new_lines(lines_of(shard), layout, values, shard, stack)
        lines = lines.reshape(layout.num_lines, *shape[1:])
        arrays += [jax.device_put(lines, device) for device in devices]
        jax.block_until_ready(arrays)
    lines = jax.make_array_from_single_device_arrays(shape, sharding, arrays)
    return dataclasses.replace(packed, lines=lines)


def _new_lines(
    lines: Any,
    layout: RowLayout,
    values: Mapping[str, np.ndarray],
    shard: int,
    stack: StackPlan,
) -> np.ndarray:
    """Returns the whole lines of a shard, with the values of some tables replaced."""
    new = np.empty((layout.num_lines, layout.lanes), lines.dtype)
    for start, block in _blocks(lines, layout):
        stored = np.array(rows_of_lines(block, layout))
        for part in _parts_of_block(start, len(stored), shard, stack):
            if part.table_name in values:
                rows = values[part.table_name][part.of_table]
                stored[part.of_block] = store_rows(rows, layout)
        first_line = start // layout.rows_per_line
        new[first_line : first_line + len(block)] = lines_of_rows(stored, layout)
    return new
