"""The optimizer state of a stacked table.

It is the state of the stack's rule, as optax returns it, in which `PackedRows` stand
for slot variables, arrays with a row per row of the table. All other leaves, such as
step counts, are shared by all rows.

Two wrappers may enclose it: `KeptGradientState` for a rule that needs the dense
gradient, and around it `RoundedState` for a table of a narrow dtype.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from tpu_embedding.optimizers.probe import probe_rule
from tpu_embedding.optimizers.row_optimizer import KeptGradient, RowOptimizer
from tpu_embedding.optimizers.table_rows import (
    AllReduce,
    TableRows,
    table_rows_context,
)
from tpu_embedding.plan.plan import StackPlan
from tpu_embedding.rows.access import blocks_of, lines_of_block
from tpu_embedding.rows.packed_rows import (
    PackedRows,
    full_rows,
    pack_rows,
    unpack_rows,
)
from tpu_embedding.update.totals import (
    across_shards,
    find_totals,
    known_totals,
    tables_of_rows,
)
from tpu_embedding.xla import computed_apart

PADDING_ROWS: Final = 8
"""Rows of a part without rows. A single row would broadcast, as totals do."""


class RoundedState(NamedTuple):
    """The state of a rule whose table is narrow.

    Attributes:
      step: int32 scalar, updates so far.
      inner: the rule's state.
    """

    step: Array
    inner: Any


class KeptGradientState(NamedTuple):
    """The state of a rule that needs the dense gradient.

    Attributes:
      gradient: `[rows, dim]`, sum over the steps since the rule last ran.
      touches: int32 `[rows]`, number of these steps that looked the row up.
      step: int32 scalar, number of these steps.
      inner: the rule's state.
    """

    gradient: PackedRows
    touches: PackedRows
    step: Array
    inner: Any


def init_state(table: PackedRows, stack: StackPlan) -> Any:
    """Returns the optimizer's state for a stacked table. Per shard.

    Totals are summed block by block. Rows that are stored on the host are summed in the
    same order, so totals have the same bits wherever the rows are stored.
    """
    totals: list[Array] = []
    if stack.optimizer.takes_totals:
        totals = find_totals(
            lambda block, all_reduce: init_block(
                computed_apart(lines_of_block(table, *block)),
                block[0],
                all_reduce,
                stack,
            ),
            blocks_of([table.layout]).as_parts(),
            across_shards(stack),
        )
    return state_around(init_block(table, 0, known_totals(totals), stack), stack)


def init_block(
    rows: PackedRows, start: Any, all_reduce: AllReduce, stack: StackPlan
) -> Any:
    """Returns the rule's state for a block of this shard's rows. Per shard.

    Args:
      rows: the block's rows.
      start: the block's first local row.
      all_reduce: answers the rule's requests for totals.
      stack: the rows' stack.
    """
    known = None
    if stack.optimizer.takes_totals:
        row_ids = start + jnp.arange(rows.layout.num_rows, dtype=jnp.int32)
        is_touched = jnp.zeros(row_ids.shape, bool)
        known = tables_of_rows(row_ids, is_touched, all_reduce, stack)
    return init_rule(stack.optimizer, rows, known)


def init_rule(
    optimizer: optax.GradientTransformation | RowOptimizer,
    table: PackedRows,
    known: TableRows | None = None,
) -> Any:
    """Returns a rule's state for a table. Per shard.

    Args:
      optimizer: the rule.
      table: this shard's rows.
      known: facts about these rows, for a rule that needs totals.
    """
    with table_rows_context(known):
        leaves, tree = jax.tree.flatten(optimizer.init(unpack_rows(table)))
    slots = probe_rule(optimizer, table.layout.dim).leaves
    new_leaves = []
    for leaf, slot in zip(leaves, slots, strict=True):
        if slot is not None:
            layout = table.layout.slot_layout(slot.row)
            if slot.initial_value is None:
                leaf = pack_rows(leaf, layout)
            else:
                leaf = full_rows(slot.initial_value, layout, slot.row.dtype)
        new_leaves.append(leaf)
    return tree.unflatten(new_leaves)


@functools.lru_cache(maxsize=4096)
def abstract_state(stack: StackPlan) -> Any:
    """Returns a state structured like `init_state`'s, without running the rule."""
    probed = probe_rule(stack.optimizer, stack.dim)
    leaves, tree = jax.tree.flatten(probed.state)
    leaves = [
        leaf
        if slot is None
        else PackedRows(lines=slot.row, layout=stack.layout.slot_layout(slot.row))
        for leaf, slot in zip(leaves, probed.leaves, strict=True)
    ]
    around = functools.partial(state_around, stack=stack)
    return jax.eval_shape(around, tree.unflatten(leaves))


def state_around(rule_state: Any, stack: StackPlan) -> Any:
    """Returns a stack's initial state, given its rule's state. Per shard."""
    state, layout = rule_state, stack.layout
    if isinstance(stack.optimizer.driver, KeptGradient):
        gradient = jax.ShapeDtypeStruct(layout.row_shape, jnp.float32)
        touches = jax.ShapeDtypeStruct((), jnp.int32)
        state = KeptGradientState(
            gradient=full_rows(0, layout.slot_layout(gradient), gradient.dtype),
            touches=full_rows(0, layout.slot_layout(touches), touches.dtype),
            step=jnp.zeros((), jnp.int32),
            inner=rule_state,
        )
    if layout.narrow_dtype is None:
        return state
    return RoundedState(step=jnp.zeros((), jnp.int32), inner=state)


def rule_state_of(state: Any) -> Any:
    """Returns the state of a stack's rule, without the wrappers."""
    while isinstance(state, RoundedState | KeptGradientState):
        state = state.inner
    return state


def is_slot(leaf: Any) -> bool:
    """Returns True if a node of a state is a slot variable."""
    return isinstance(leaf, PackedRows)


def slots_of(state: Any) -> list[PackedRows]:
    """Returns the slot variables of a state."""
    return [x for x in jax.tree.leaves(state, is_leaf=is_slot) if is_slot(x)]


def values_of(state: Any) -> list[Any]:
    """Returns the values shared by all rows, such as counts."""
    return [x for x in jax.tree.leaves(state, is_leaf=is_slot) if not is_slot(x)]


def with_slots(state: Any, slots: Sequence[Any]) -> Any:
    """Returns the state with its slot variables replaced."""
    remaining = iter(slots)
    return map_slots(lambda _: next(remaining), state)


def with_values(state: Any, values: Sequence[Any]) -> Any:
    """Returns the state with its shared values replaced."""
    remaining = iter(values)
    return jax.tree.map(
        lambda leaf: leaf if is_slot(leaf) else next(remaining), state, is_leaf=is_slot
    )


def with_values_if(condition: Any, new: Any, old: Any) -> Any:
    """Returns a new state, with the old shared values if a condition is False."""
    if condition is None:
        return new
    pairs = zip(values_of(new), values_of(old), strict=True)
    return with_values(new, [jnp.where(condition, *pair) for pair in pairs])


def map_slots(function: Callable[..., Any], state: Any, *others: Any) -> Any:
    """Returns the state with `function(slot, *others)` as its slot variables.

    Args:
      function: called with a slot variable and the matching subtree of each other
        state.
      state: an optimizer's state.
      *others: states with the same structure, except that slots may have any type.
    """
    return jax.tree.map(
        lambda leaf, *subtrees: function(leaf, *subtrees) if is_slot(leaf) else leaf,
        state,
        *others,
        is_leaf=is_slot,
    )


def structure_of_state(state: Any) -> jax.tree_util.PyTreeDef:
    """Returns a state's structure, independent of where slot rows are stored."""
    return jax.tree.structure(
        map_slots(lambda slot: PackedRows(lines=0, layout=slot.layout), state)
    )


def state_specs(state: Any, stack: StackPlan) -> Any:
    """Returns the partition spec of each node of a stack's state.

    Slot variables are sharded like their table's rows; other values are replicated.
    """
    return jax.tree.map(
        lambda leaf: stack.rows_spec if is_slot(leaf) else PartitionSpec(),
        state,
        is_leaf=is_slot,
    )
