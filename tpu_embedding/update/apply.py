"""Updates table and slot variables, in each of the ways a `RowOptimizer` names."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpu_embedding.lookup._merge import PackedRowGradients, merge
from tpu_embedding.lookup._stack import StackGradient, for_each_later_update
from tpu_embedding.optimizers.table_rows import AllReduce, TableRows
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.rows.packed_rows import PackedRows, add_to_rows
from tpu_embedding.types import PADDING_ROW_ID, RowRange
from tpu_embedding.update.by_kernel import update_by_kernel
from tpu_embedding.update.every_element import apply_to_every_element
from tpu_embedding.update.every_row import apply_to_every_row, init_every_row
from tpu_embedding.update.lift import lift_to_rows, slots_of, with_slots
from tpu_embedding.update.sequence import apply_in_sequence
from tpu_embedding.update.shard_rows import shard_rows
from tpu_embedding.update.totals import across_shards, find_totals, known_totals


def init_state(table: PackedRows, stack: StackPlan, plan: EmbeddingPlan) -> Any:
    """Returns the optimizer's state for a stacked table. Per shard."""
    assert stack.optimizer is not None
    if stack.optimizer.keeps_gradient:
        return init_every_row(table, stack, plan)
    return _lifted(stack, plan, across_shards(plan)).init(table)


def apply_gradient(
    table: PackedRows,
    state: Any,
    gradient: StackGradient,
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> tuple[PackedRows, Any]:
    """Updates a stacked table with the gradient of a step. Per shard.

    In place where donated. The rounds of the gradient are applied one after the other.
    Their rows are different, so the result is that of one update with all rows, if
    what belongs to no row (step count, learning rate) stays the same for each round
    and advances once.

    Args:
      table: rows of this shard.
      state: from `init_state`.
      gradient: of the stack.
      stack: its plan.
      plan: for the mesh.

    Returns:
      New table and state.
    """
    optimizer = stack.optimizer
    assert optimizer is not None
    if optimizer.keeps_gradient:
        return apply_to_every_row(table, state, gradient, stack, plan)
    if gradient.later is None:
        return _apply_round(
            across_shards(plan), stack, plan, table, state, gradient.first
        )
    later = gradient.later
    totals: list[Any] = []
    if optimizer.takes_totals:
        totals = find_totals(
            lambda all_reduce: _apply_round(
                all_reduce, stack, plan, table, state, gradient.first
            ),
            lambda fold, carry: for_each_later_update(
                later,
                lambda carry, sums, _: fold(
                    carry,
                    lambda all_reduce: _apply_round(
                        all_reduce, stack, plan, table, state, sums
                    ),
                ),
                carry,
                stack,
                plan,
            ),
            across_shards(plan),
        )
        # All rows are read for the totals before any is written, or XLA copies them.
        totals, table, state = jax.lax.optimization_barrier((totals, table, state))
    first_rows = RowRange(jnp.int32(0), later.remaining.end_row[0])
    new_table, new_state = _apply_round(
        known_totals(totals), stack, plan, table, state, gradient.first, first_rows
    )

    def apply_later(carry, sums, row_range):
        table, slots = carry
        table, state_of_round = _apply_round(
            known_totals(totals),
            stack,
            plan,
            table,
            with_slots(state, slots),
            sums,
            row_range,
        )
        return table, slots_of(state_of_round)

    new_table, slots = for_each_later_update(
        later, apply_later, (new_table, slots_of(new_state)), stack, plan
    )
    return new_table, with_slots(new_state, slots)


def _apply_round(
    all_reduce: AllReduce,
    stack: StackPlan,
    plan: EmbeddingPlan,
    table: PackedRows,
    state: Any,
    gradient: PackedRowGradients,
    row_range: RowRange | None = None,
) -> tuple[PackedRows, Any]:
    """Applies the gradient of one round, whose rows are those of a range."""
    optimizer = stack.optimizer
    assert optimizer is not None
    if optimizer.rows == "every":
        return apply_to_every_element(
            optimizer, table, state, gradient.updates, row_range
        )
    if optimizer.duplicates == "sequence":
        rule: Any = _lifted(stack, plan, all_reduce)
        return apply_in_sequence(rule, table, state, gradient.updates)
    if optimizer.duplicates == "sum":
        updated = update_by_kernel(optimizer, table, state, gradient)
        if updated is not None:
            return updated
    occurrence_squares = None
    if optimizer.duplicates == "norm":
        squares = jnp.sum(jnp.square(gradient.updates.values), axis=1)
        known = _touched_rows(gradient.row_ids, all_reduce, None, stack, plan)
        occurrence_squares = known.total(squares)
        num_rows = min(gradient.row_ids.shape[0], stack.rows_per_shard)
        gradient = merge(gradient.row_ids, gradient.values, num_rows)
    rule = _lifted(stack, plan, all_reduce, occurrence_squares)
    updates, state = rule.update(gradient.updates, state, table)
    return add_to_rows(table, updates.row_ids, updates.values), state


def _lifted(
    stack: StackPlan,
    plan: EmbeddingPlan,
    all_reduce: AllReduce,
    occurrence_squares: Float[Array, " tables"] | None = None,
) -> Any:
    assert stack.optimizer is not None

    def rows_of(row_ids):
        return _touched_rows(row_ids, all_reduce, occurrence_squares, stack, plan)

    takes_totals = stack.optimizer.takes_totals
    return lift_to_rows(stack.optimizer, rows_of if takes_totals else None)


def _touched_rows(
    row_ids: Int[Array, " rows"],
    all_reduce: AllReduce,
    occurrence_squares: Float[Array, " tables"] | None,
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> TableRows:
    is_touched = row_ids != PADDING_ROW_ID
    known = shard_rows(row_ids, is_touched, all_reduce, stack, plan)
    return dataclasses.replace(known, occurrence_squares=occurrence_squares)
