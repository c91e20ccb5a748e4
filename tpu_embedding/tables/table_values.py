"""Converts between stacks and tables: stacks on devices, one NumPy array per table.

The layout of a stack changes with the devices, the stacking and the packing. The arrays
per table do not: they hold the logical rows as the user declared them. Everything here
runs on the host and handles whole tables.
"""

import dataclasses

import jax
import numpy as np
from jax.experimental import multihost_utils

from tpu_embedding.plan.check_rows import check_stack
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.rows.packed_rows import PackedRows


def unstack_tables(
    stacked: dict[str, PackedRows], plan: EmbeddingPlan
) -> dict[str, np.ndarray]:
    """Returns each table's values, or one slot variable's values, by table name.

    Args:
      stacked: stack name to packed rows, global. They hold either the tables or one
        slot variable of each stack. Stacks may be missing.
      plan: plan of the embedding layer.

    Returns:
      Table name to array `[vocabulary_size, *row_shape]`, in logical row order.

    Raises:
      ValueError: if the arrays were made for another plan.
    """
    values = {}
    for stack in plan.stacks:
        if stack.name not in stacked:
            continue
        check_stack(stacked[stack.name], stack)
        rows = _unpack(stacked[stack.name], stack)
        for table in stack.tables:
            end = table.row_offset + table.config.vocabulary_size
            values[table.name] = rows[table.row_offset : end]
    return values


def with_table_values(
    stacked: dict[str, PackedRows], values: dict[str, np.ndarray], plan: EmbeddingPlan
) -> dict[str, PackedRows]:
    """Returns the stacks with the values of the given tables replaced.

    Args:
      stacked: stack name to packed rows, as in `unstack_tables`.
      values: table name to array `[vocabulary_size, *row_shape]`.
      plan: plan of the embedding layer.

    Raises:
      ValueError: if a table is unknown, its stack is missing, its array has the wrong
        shape, or the stacks were made for another plan.
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
        rows = _unpack(packed, stack)
        for table in tables:
            array = np.asarray(values[table.name])
            shape = (table.config.vocabulary_size, *packed.layout.row_shape)
            if array.shape != shape:
                raise ValueError(
                    f"values of table {table.name!r} must have shape {shape}, got "
                    f"{array.shape}."
                )
            rows[table.row_offset : table.row_offset + shape[0]] = array
        result[stack.name] = _pack(rows, packed, stack, plan)
    return result


def _unpack(packed: PackedRows, stack: StackPlan) -> np.ndarray:
    """Returns the stack's rows, `[rows of all shards, *row_shape]`, in stack order."""
    layout = packed.layout
    lines = packed.lines
    if not lines.is_fully_addressable:
        lines = multihost_utils.process_allgather(lines, tiled=True)
    lines = np.asarray(lines).reshape(-1, layout.lanes)
    lines = lines[:, : layout.rows_per_line * layout.dim]
    rows = lines.reshape(stack.num_shards, -1, layout.dim)[:, : layout.num_rows]
    rows = rows.transpose(1, 0, 2).reshape(-1, *layout.row_shape)
    return np.array(rows)


def _pack(
    rows: np.ndarray, packed: PackedRows, stack: StackPlan, plan: EmbeddingPlan
) -> PackedRows:
    """Returns rows in stack order as packed rows with the layout of `packed`."""
    layout = packed.layout
    by_shard = rows.reshape(layout.num_rows, stack.num_shards, layout.dim)
    num_places = layout.num_lines * layout.rows_per_line
    padded = np.zeros((stack.num_shards, num_places, layout.dim), rows.dtype)
    padded[:, : layout.num_rows] = by_shard.transpose(1, 0, 2)
    lines = np.zeros((stack.num_shards * layout.num_lines, layout.lanes), rows.dtype)
    used_lanes = layout.rows_per_line * layout.dim
    lines[:, :used_lanes] = padded.reshape(-1, used_lanes)
    lines = lines.reshape(packed.lines.shape)
    placed = jax.make_array_from_callback(lines.shape, plan.sharding, lines.__getitem__)
    return dataclasses.replace(packed, lines=placed)
