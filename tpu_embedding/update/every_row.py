"""Updates every row of a table with a rule that sees whole rows, or all rows.

The state keeps a dense gradient, a slot variable of the table's size. Each step adds
its gradient to it. Then the rule runs over the table block by block, in place, and the
kept gradient is cleared. So the rule sees every row, touched or not, and may run once
per several steps.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from tpu_embedding.optimizers.finite_rates import rates_are_finite
from tpu_embedding.optimizers.table_rows import AllReduce, table_rows_context
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.stack_plan import TrainedStackPlan
from tpu_embedding.rows.access import add_to_rows
from tpu_embedding.rows.consecutive_rows import blocks_of, read_block, write_block
from tpu_embedding.rows.packed_rows import PackedRows, full_rows
from tpu_embedding.rows.row_gradients import GradientRounds, RowGradients
from tpu_embedding.update.lazy_update import is_slot, lift_to_rows
from tpu_embedding.update.shard_rows import shard_rows
from tpu_embedding.update.table_writer import TableWriter
from tpu_embedding.update.totals import across_shards, find_totals, known_totals


class KeptGradientState(NamedTuple):
    """The state of a rule that needs the dense gradient.

    Attributes:
      gradient: `[rows, dim]`, the sum of the steps since the rule last ran.
      touches: int32 `[rows]`, steps since then that looked the row up.
      step: int32 scalar, steps since then.
      inner: state of the rule.
    """

    gradient: PackedRows
    touches: PackedRows
    step: Array
    inner: Any


def init_every_row(
    table: PackedRows, stack: TrainedStackPlan, plan: EmbeddingPlan
) -> Any:
    """Returns the state for a stacked table. Per shard."""

    def rows_of(row_ids):
        is_touched = jnp.zeros(row_ids.shape, bool)
        return shard_rows(row_ids, is_touched, across_shards(stack, plan), stack)

    takes_totals = stack.optimizer.takes_totals
    rule: Any = lift_to_rows(stack.optimizer, rows_of if takes_totals else None)
    return KeptGradientState(
        gradient=_slot_of_zeros(table, table.layout.row_shape, jnp.float32),
        touches=_slot_of_zeros(table, (), jnp.int32),
        step=jnp.zeros((), jnp.int32),
        inner=rule.init(table),
    )


def _slot_of_zeros(
    table: PackedRows, row_shape: tuple[int, ...], dtype: Any
) -> PackedRows:
    row = jax.ShapeDtypeStruct(row_shape, dtype)
    return full_rows(0, table.layout.slot_layout(row), dtype)


def apply_to_every_row(
    table: PackedRows,
    state: KeptGradientState,
    gradient: GradientRounds,
    stack: TrainedStackPlan,
    plan: EmbeddingPlan,
    writer: TableWriter,
) -> tuple[PackedRows, KeptGradientState]:
    """Adds to the kept gradient, and runs the rule on every row when it is due.

    Per shard; in place where donated.
    """
    collected, touches = _collect(state, gradient, stack, plan)
    leaves, tree = jax.tree.flatten(
        (table, collected, touches, state.inner), is_leaf=is_slot
    )
    run = functools.partial(
        _run_on_all_rows, tree=tree, stack=stack, plan=plan, writer=writer
    )
    step = state.step + 1
    num_steps = stack.optimizer.gradient_steps
    if num_steps == 1:
        leaves = run(leaves)
    else:
        # A loop of at most one turn: XLA:TPU copies the rows for a conditional.
        _, leaves = jax.lax.while_loop(
            lambda carry: carry[0],
            lambda carry: (jnp.zeros((), bool), run(carry[1])),
            (step >= num_steps, leaves),
        )
    table, collected, touches, inner = tree.unflatten(leaves)
    return table, KeptGradientState(
        collected, touches, jnp.where(step >= num_steps, 0, step), inner
    )


def _collect(
    state: KeptGradientState,
    gradient: GradientRounds,
    stack: TrainedStackPlan,
    plan: EmbeddingPlan,
) -> tuple[PackedRows, PackedRows]:
    """Adds the gradient of a step to the kept one, and counts the touches."""

    def add(kept, gradients: RowGradients, rows=None):
        del rows
        gradient, touches = kept
        updates = gradients.as_row_updates()
        ones = jnp.ones(updates.row_ids.shape, jnp.int32)
        return (
            add_to_rows(gradient, updates.row_ids, updates.values),
            add_to_rows(touches, updates.row_ids, ones),
        )

    return gradient.fold(add, (state.gradient, state.touches))


def _run_on_all_rows(
    leaves: list[Any],
    *,
    tree: Any,
    stack: TrainedStackPlan,
    plan: EmbeddingPlan,
    writer: TableWriter,
) -> list[Any]:
    """Runs the rule block by block: the first block alone, the others in a loop."""
    run = functools.partial(
        _run_on_block, tree=tree, stack=stack, plan=plan, writer=writer
    )
    blocks = blocks_of([leaf.layout for leaf in leaves if is_slot(leaf)])

    def fold_rest(fold, carry):
        def fold_next(start, carry):
            return fold(carry, functools.partial(run, leaves, (start, blocks.size)))

        return blocks.loop(fold_next, carry)

    totals: list[Array] = []
    if stack.optimizer.takes_totals:
        totals = find_totals(
            functools.partial(run, leaves, blocks.first),
            fold_rest,
            across_shards(stack, plan),
        )
    # All rows are read for the totals before any is written, or XLA copies the table.
    leaves, totals = jax.lax.optimization_barrier((leaves, totals))
    # Values that belong to no row advance once; every block must see the old ones.
    result = run(leaves, blocks.first, known_totals(totals))
    slots = [leaf for leaf in result if is_slot(leaf)]

    def run_next(start, slots):
        remaining = iter(slots)
        current = [next(remaining) if is_slot(leaf) else leaf for leaf in leaves]
        new = run(current, (start, blocks.size), known_totals(totals))
        return [leaf for leaf in new if is_slot(leaf)]

    remaining = iter(blocks.loop(run_next, slots))
    return [next(remaining) if is_slot(leaf) else leaf for leaf in result]


def _run_on_block(
    leaves: list[Any],
    block: tuple[Any, int],
    all_reduce: AllReduce,
    *,
    tree: Any,
    stack: TrainedStackPlan,
    plan: EmbeddingPlan,
    writer: TableWriter,
) -> list[Any]:
    """Runs the rule on rows `start` to `start + size`, and clears their gradient.

    Returns:
      The leaves, with the new rows of this block.
    """
    start, size = block
    old = [read_block(leaf, start, size) if is_slot(leaf) else leaf for leaf in leaves]
    rows, gradient, touches, inner = tree.unflatten(old)
    if writer.sets_rows:
        rows = jnp.zeros_like(rows)
    row_ids = start + jnp.arange(size, dtype=jnp.int32)
    known = dataclasses.replace(
        shard_rows(row_ids, touches > 0, all_reduce, stack),
        stored=functools.partial(writer.values_after, row_ids, layout=stack.layout),
    )
    is_finite = rates_are_finite(stack.optimizer, stack.dim, jax.tree.leaves(inner))
    is_moved = known.is_used if is_finite is None else known.is_used & is_finite
    with table_rows_context(known):
        updates, new_inner = stack.optimizer.update(
            gradient / stack.optimizer.gradient_steps, inner, rows
        )
    updates = jnp.where(is_moved[:, None], updates, 0)
    cleared = jnp.zeros_like(gradient), jnp.zeros_like(touches)
    new_rows = writer.stored_rows(row_ids, rows, updates)
    new = tree.flatten_up_to((new_rows, *cleared, new_inner))
    if is_finite is not None:
        for i in range(1 + len(cleared), len(new)):
            is_kept = is_slot(leaves[i]) | ~jnp.isfinite(new[i])
            new[i] = jnp.where(~is_finite & is_kept, old[i], new[i])
    # The block is read before it is written.
    new = jax.lax.optimization_barrier(new)
    return [
        write_block(leaf, start, part) if is_slot(leaf) else part
        for leaf, part in zip(leaves, new, strict=True)
    ]
