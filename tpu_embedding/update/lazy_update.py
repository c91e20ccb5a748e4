"""Applies any row-local optax transformation to touched rows only.

A rule is written, or taken from optax, as if the table were a dense `[rows, dim]`
array. `lift_to_rows` gathers the touched rows of table and slot variables, runs the
rule on them, and adds the differences back in place. So rules know nothing of row ids,
shards, packing or rounds.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from tpu_embedding.optimizers.probe import ProbedSlot, probe_rule
from tpu_embedding.optimizers.row_optimizer import RowOptimizer
from tpu_embedding.optimizers.table_rows import TableRows, table_rows_context
from tpu_embedding.plan.forms import Updates
from tpu_embedding.plan.stack_plan import StackPlan
from tpu_embedding.rows.access import (
    add_to_rows,
    gather_rows,
    replace_rows,
    row_differences,
)
from tpu_embedding.rows.packed_rows import PackedRows, full_rows, pack_rows, unpack_rows
from tpu_embedding.xla import read_before_write

RowsOf = Callable[[Int[Array, " rows"]], TableRows]
"""Returns the facts that a rule may ask about the rows with some ids."""

_PADDING_ROWS: Final = 8
"""Rows of a step on no row. One row would broadcast as the value of a table does."""


def lift_to_rows(
    optimizer: optax.GradientTransformation | RowOptimizer,
    rows_of: RowsOf | None = None,
    form: Updates = "whole",
) -> optax.GradientTransformation:
    """Turns a transformation of dense rows into one of `RowUpdates`.

    Slot variables of rows that the updates do not name keep their bits (lazy
    semantics): a moment decays only when its row is touched. Values that belong to no
    row, such as the step count, advance with every update.

    Args:
      optimizer: any row-local optax transformation, chained, scheduled or with
        `optax.inject_hyperparams`.
      rows_of: answers rules that ask for totals over the rows of a table; None: such
        a rule sees the given rows as one whole table.
      form: form of the update. In `"blocks"`, slots are read before one is written.

    Returns:
      A transformation whose `init` takes the `PackedRows` of a table and whose
      `update` maps `RowUpdates`, state and table to `RowUpdates` and state. Slot
      variables in its state are `PackedRows`. Everything is per shard.

    Example:
      >>> import jax.numpy as jnp
      >>> import tpu_embedding as te
      >>> from tpu_embedding.rows.packed_rows import RowLayout
      >>> layout = RowLayout(num_rows=4, row_shape=(2,))
      >>> table = PackedRows(lines=jnp.ones((4, 2)), layout=layout)
      >>> rows = lift_to_rows(optax.sgd(0.5))
      >>> updates = te.functional.RowUpdates(
      ...     row_ids=jnp.array([3]), values=jnp.ones((1, 2)))
      >>> updates, _ = rows.update(updates, rows.init(table), table)
      >>> updates.values.tolist()
      [[-0.5, -0.5]]
    """

    def init(params: Any) -> Any:
        table: PackedRows = params
        all_rows = jnp.arange(table.layout.num_rows, dtype=jnp.int32)
        with table_rows_context(rows_of and rows_of(all_rows)):
            state = optimizer.init(unpack_rows(table))
        leaves, tree = jax.tree.flatten(state)
        slots = probe_rule(optimizer, table.layout.dim).leaves
        return tree.unflatten(
            [
                leaf if slot is None else _new_slot(leaf, slot, table)
                for leaf, slot in zip(leaves, slots, strict=True)
            ]
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        table: PackedRows = params
        row_ids = updates.row_ids
        leaves, tree = jax.tree.flatten(state, is_leaf=is_slot)
        old = [gather_rows(x, row_ids) if is_slot(x) else x for x in leaves]
        if form == "blocks":
            old, leaves = read_before_write((old, leaves))
        with table_rows_context(rows_of and rows_of(row_ids)):
            values, new_state = optimizer.update(
                updates.values, tree.unflatten(old), gather_rows(table, row_ids)
            )
        new = tree.flatten_up_to(new_state)
        slots = probe_rule(optimizer, table.layout.dim).leaves
        leaves = [
            after
            if slot is None
            else move_rows(leaf, row_ids, before, after, slot.is_moved_by_adding)
            for leaf, before, after, slot in zip(leaves, old, new, slots, strict=True)
        ]
        return dataclasses.replace(updates, values=values), tree.unflatten(leaves)

    return optax.GradientTransformation(init, update)


def step_on_no_row(
    optimizer: optax.GradientTransformation | RowOptimizer,
    state: Any,
    dim: int,
    table_sizes: Sequence[int] | None = None,
) -> Any:
    """Returns the state after a step that touched no row: counts and such advance.

    The rule runs on a few rows of padding, whose results are dropped. So no row of a
    table or slot variable is read or written, and devices communicate nothing.

    Args:
      optimizer: see `lift_to_rows`.
      state: from `lift_to_rows(optimizer).init`. Slot variables may be shapes.
      dim: columns of the table.
      table_sizes: rows of each table, of which the rule asks for totals; None: it
        asks for none.
    """
    zeros = jnp.zeros((_PADDING_ROWS, dim), jnp.float32)
    leaves, tree = jax.tree.flatten(state, is_leaf=is_slot)

    def rows_of_padding(leaf: Any) -> Any:
        if not is_slot(leaf):
            return leaf
        dtype = jnp.float32 if leaf.layout.narrow_dtype else leaf.lines.dtype
        return jnp.zeros((_PADDING_ROWS, *leaf.layout.row_shape), dtype)

    old = tree.unflatten(map(rows_of_padding, leaves))
    known = None if table_sizes is None else _padding_rows(table_sizes)
    with table_rows_context(known):
        _, new_state = optimizer.update(zeros, old, zeros)
    new = tree.flatten_up_to(new_state)
    return tree.unflatten(
        [
            before if is_slot(before) else after
            for before, after in zip(leaves, new, strict=True)
        ]
    )


def _padding_rows(table_sizes: Sequence[int]) -> TableRows:
    """Returns rows of which none belongs to a table; totals over them are zero."""
    no_row = jnp.zeros(_PADDING_ROWS, bool)
    return TableRows(
        table_sizes=jnp.asarray(table_sizes, jnp.float32),
        tables=no_row.astype(jnp.int32) if len(table_sizes) > 1 else None,
        is_used=no_row,
        is_touched=no_row,
        all_reduce=lambda totals, _: totals,
    )


def is_slot(leaf: Any) -> bool:
    """Returns True if a part of a lifted optimizer's state is a slot variable."""
    return isinstance(leaf, PackedRows)


def slots_of(state: Any) -> list[PackedRows]:
    """Returns the slot variables of a lifted optimizer's state."""
    return [x for x in jax.tree.leaves(state, is_leaf=is_slot) if is_slot(x)]


def with_slots(state: Any, slots: list[PackedRows]) -> Any:
    """Returns the state with its slot variables replaced; counts and such stay."""
    remaining = iter(slots)
    return map_slots(lambda _: next(remaining), state)


def map_slots(function: Callable[..., Any], state: Any, *others: Any) -> Any:
    """Returns the state with `function(slot, *others)` as its slot variables.

    Args:
      function: takes a slot variable, and the part of each other state in its place.
      state: state of a lifted optimizer.
      *others: states of the same structure, whose slots may be of any type.
    """
    return jax.tree.map(
        lambda x, *parts: function(x, *parts) if is_slot(x) else x,
        state,
        *others,
        is_leaf=is_slot,
    )


def state_specs(state: Any, stack: StackPlan) -> Any:
    """Returns the partition of each part of a stack's state.

    Slot variables lie like the rows of their table; other values are replicated.
    """
    return jax.tree.map(
        lambda leaf: stack.rows_spec if is_slot(leaf) else PartitionSpec(),
        state,
        is_leaf=is_slot,
    )


def values_of(state: Any) -> list[Any]:
    """Returns what belongs to no row in a lifted optimizer's state, such as counts."""
    leaves = jax.tree.leaves(state, is_leaf=is_slot)
    return [x for x in leaves if not is_slot(x)]


def with_values(state: Any, values: list[Any]) -> Any:
    """Returns the state with such values replaced; slot variables stay."""
    remaining = iter(values)
    return jax.tree.map(
        lambda x: x if is_slot(x) else next(remaining), state, is_leaf=is_slot
    )


def move_rows(
    slot: PackedRows,
    row_ids: Int[Array, " ids"],
    old: Array,
    new: Array,
    is_moved_by_adding: bool,
) -> PackedRows:
    """Sets rows of a slot variable to their new values; see `ProbedSlot`."""
    if is_moved_by_adding:
        return add_to_rows(slot, row_ids, row_differences(old, new))
    return replace_rows(slot, row_ids, old, new)


def _new_slot(leaf: Any, slot: ProbedSlot, table: PackedRows) -> PackedRows:
    """Packs the rows of a slot variable, or fills it if all elements are one value."""
    layout = table.layout.slot_layout(slot.row)
    if slot.initial_value is None:
        return pack_rows(leaf, layout)
    return full_rows(slot.initial_value, layout, slot.row.dtype)
