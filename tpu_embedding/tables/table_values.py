"""Converts between stacks and tables: stacks on devices, one NumPy array per table.

The layout of a stack changes with the devices, the stacking and the packing. The arrays
per table do not: they hold the logical rows as the user declared them. Everything here
runs on the host and handles whole tables.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from tpu_embedding.plan.check_rows import check_stack
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.rows.narrow_rows import NarrowDtype
from tpu_embedding.rows.packed_rows import (
    PackedRows,
    lines_of_rows,
    load_rows,
    rows_of_lines,
    store_rows,
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
        layout = packed.layout
        stored = _unpack(packed, stack)
        for table in stack.tables:
            num_rows = table.config.vocabulary_size
            rows = stored[table.row_offset : table.row_offset + num_rows]
            rows = load_rows(rows, layout)
            values[table.name] = rows.reshape(num_rows, *layout.row_shape)
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
        stored = _unpack(packed, stack)
        for table in tables:
            num_rows = table.config.vocabulary_size
            shape = (num_rows, *packed.layout.row_shape)
            array = _checked(values[table.name], shape, packed, table.name)
            stored[table.row_offset : table.row_offset + num_rows] = array
        result[stack.name] = _pack(stored, packed, stack, plan)
    return result


def _checked(
    values: Any, shape: tuple[int, ...], packed: PackedRows, table_name: str
) -> np.ndarray:
    """Returns the values of a table as stored rows, `[rows, row_lanes]`."""
    owner = f"values of table {table_name!r}"
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
    layout = packed.layout
    array = array.reshape(shape[0], layout.dim)
    if layout.narrow_dtype is None:
        return array
    array = array.astype(np.float32)
    _check_range(array, layout.narrow_dtype, owner)
    return store_rows(array, layout)


def _check_range(rows: np.ndarray, dtype: NarrowDtype, owner: str) -> None:
    """Refuses rows that a narrow type cannot hold."""
    if dtype == "int8":
        # Each row is spread between its smallest and largest element.
        with np.errstate(invalid="ignore", over="ignore"):
            ranges = rows.max(axis=1) - rows.min(axis=1)
        is_bad = ~np.isfinite(ranges)
        if is_bad.any():
            row = int(np.argmax(is_bad))
            raise ValueError(
                f"{owner} must be finite for dtype int8, and so must the range of each "
                f"row; got {rows[row].min()} to {rows[row].max()} in row {row}."
            )
        return
    largest = float(jnp.finfo(dtype).max)
    is_bad = np.isfinite(rows) & (np.abs(rows) > largest)
    if is_bad.any():
        row, column = map(int, np.argwhere(is_bad)[0])
        raise ValueError(
            f"{owner} must lie within {largest:g} of zero for dtype {dtype}, got "
            f"{rows[row, column]} in row {row}, column {column}."
        )


def _unpack(packed: PackedRows, stack: StackPlan) -> np.ndarray:
    """Returns the stack's stored rows, `[rows of all shards, row_lanes]`, in order."""
    layout = packed.layout
    lines = packed.lines
    if not lines.is_fully_addressable:
        lines = multihost_utils.process_allgather(lines, tiled=True)
    rows = rows_of_lines(np.asarray(lines).reshape(-1, layout.lanes), layout)
    rows = rows.reshape(stack.num_shards, -1, layout.row_lanes)[:, : layout.num_rows]
    return np.array(rows.transpose(1, 0, 2).reshape(-1, layout.row_lanes))


def _pack(
    stored: np.ndarray, packed: PackedRows, stack: StackPlan, plan: EmbeddingPlan
) -> PackedRows:
    """Returns stored rows in stack order as packed rows with the layout of `packed`."""
    layout = packed.layout
    shape = (layout.num_rows, stack.num_shards, layout.row_lanes)
    by_shard = stored.reshape(shape).transpose(1, 0, 2)
    num_places = layout.num_lines * layout.rows_per_line
    missing = num_places - layout.num_rows
    padded = np.pad(by_shard, ((0, 0), (0, missing), (0, 0)))
    lines = lines_of_rows(padded.reshape(-1, layout.row_lanes), layout)
    lines = lines.reshape(packed.lines.shape)
    sharding = plan.rows_sharding(stack)
    placed = jax.make_array_from_callback(lines.shape, sharding, lines.__getitem__)
    return dataclasses.replace(packed, lines=placed)
