"""Initial optimizer states of stacked tables, and access to their parts.

A state is what optax returns for the rule, except that slot variables, which have one
entry per table row, are `PackedRows`. Other leaves, such as counts, aren't per row.
Two wrappers may enclose the state: `KeptGradientState` if the rule needs the dense
gradient, and `RoundedState`, always outermost, if the table is narrow.
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
"""Number of padding rows in a part without real rows. A single row would broadcast."""


class RoundedState(NamedTuple):
    """The state for a narrow table. `step` is an int32 update count."""

    step: Array
    inner: Any


class KeptGradientState(NamedTuple):
    """The state for a rule that needs the dense gradient.

    Attributes:
      gradient: `[rows, dim]`, the sum over all steps since the rule last ran.
      touches: int32 `[rows]`, the number of these steps that looked up each row.
      step: int32 scalar, the number of steps since the rule last ran.
    """

    gradient: PackedRows
    touches: PackedRows
    step: Array
    inner: Any


def init_state(table: PackedRows, stack: StackPlan) -> Any:
    """Initializes a stack's optimizer state on one shard."""
    totals: list[Array] = []
    if stack.optimizer.takes_totals:
        # Totals are summed block by block, as for rows on the host, so they have the
        # same bits wherever rows are stored. Fusing a block with its slice could change
        # these bits.
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
    """Initializes the rule state for a block that begins at local row `start`."""
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
    """Initializes a rule's state, with packed slots, for one shard of a table."""
    with table_rows_context(known):
        leaves, tree = jax.tree.flatten(optimizer.init(unpack_rows(table)))
    slots = probe_rule(optimizer, table.layout.dim).leaves
    new_leaves = []
    for leaf, slot in zip(leaves, slots, strict=True):
        if slot is not None:
            layout = table.layout.slot_layout(slot.row)
            # Constant slots are written in packed form. XLA then drops the dense leaf.
            if slot.initial_value is None:
                leaf = pack_rows(leaf, layout)
            else:
                leaf = full_rows(slot.initial_value, layout, slot.row.dtype)
        new_leaves.append(leaf)
    return tree.unflatten(new_leaves)


@functools.lru_cache(maxsize=4096)
def abstract_state(stack: StackPlan) -> Any:
    """Describes an initial state as shapes and dtypes, without running the rule."""
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
    """Strips the wrappers from a state."""
    while isinstance(state, RoundedState | KeptGradientState):
        state = state.inner
    return state


def is_slot(leaf: Any) -> bool:
    # This is also passed as `is_leaf`, since `PackedRows` is itself a pytree.
    return isinstance(leaf, PackedRows)


def slots_of(state: Any) -> list[PackedRows]:
    """Lists slot variables in leaf order."""
    return [x for x in jax.tree.leaves(state, is_leaf=is_slot) if is_slot(x)]


def values_of(state: Any) -> list[Any]:
    """Lists values that all rows share, such as counts, in leaf order."""
    return [x for x in jax.tree.leaves(state, is_leaf=is_slot) if not is_slot(x)]


def with_slots(state: Any, slots: Sequence[Any]) -> Any:
    """Replaces slot variables, in `slots_of` order."""
    remaining = iter(slots)
    return map_slots(lambda _: next(remaining), state)


def with_values(state: Any, values: Sequence[Any]) -> Any:
    """Replaces shared values, in `values_of` order."""
    remaining = iter(values)
    return jax.tree.map(
        lambda leaf: leaf if is_slot(leaf) else next(remaining), state, is_leaf=is_slot
    )


def with_values_if(condition: Any, new: Any, old: Any) -> Any:
    """Keeps old shared values if a condition is False. None counts as True."""
    if condition is None:
        return new
    # Slot variables always come from `new`, because a select would copy whole tables.
    pairs = zip(values_of(new), values_of(old), strict=True)
    return with_values(new, [jnp.where(condition, *pair) for pair in pairs])


def map_slots(function: Callable[..., Any], state: Any, *others: Any) -> Any:
    """Maps slots with `function(slot, *others)`. Other leaves don't change.

    Where `state` has a slot, `others` may have any subtree.
    """
    return jax.tree.map(
        lambda leaf, *subtrees: function(leaf, *subtrees) if is_slot(leaf) else leaf,
        state,
        *others,
        is_leaf=is_slot,
    )


def structure_of_state(state: Any) -> jax.tree_util.PyTreeDef:
    """Finds a state's structure. It doesn't depend on where slot rows are stored."""
    # Rows on the host are a different node type, but must match `abstract_state`.
    return jax.tree.structure(
        map_slots(lambda slot: PackedRows(lines=0, layout=slot.layout), state)
    )


def state_specs(state: Any, stack: StackPlan) -> Any:
    """Shards slot variables like the table, and replicates shared values."""
    return jax.tree.map(
        lambda leaf: stack.rows_spec if is_slot(leaf) else PartitionSpec(),
        state,
        is_leaf=is_slot,
    )
