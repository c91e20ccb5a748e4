"""Updates table and slot variables with the gradient of a step. Per shard."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpu_embedding.optimizers.finite_rates import rates_are_finite
from tpu_embedding.optimizers.table_rows import AllReduce, TableRows
from tpu_embedding.plan.stack_plan import TrainedStackPlan
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.rows.row_gradients import GradientRounds, RowGradients
from tpu_embedding.types import PADDING_ROW_ID, RowRange
from tpu_embedding.update.every_row import (
    apply_round_to_every_row,
    apply_to_every_row,
    init_every_row,
)
from tpu_embedding.update.lazy_update import (
    is_slot,
    lift_to_rows,
    slots_of,
    step_on_no_row,
    with_slots,
)
from tpu_embedding.update.sequence import apply_in_sequence
from tpu_embedding.update.table_writer import RoundedState, TableWriter
from tpu_embedding.update.totals import across_shards, find_totals, known_totals
from tpu_embedding.xla import read_before_write

ApplyRound = Callable[
    [AllReduce, PackedRows, Any, RowGradients, RowRange | None],
    tuple[PackedRows, Any],
]
"""Applies the gradients of one round, those of a range of rows, to table and state."""


def init_state(table: PackedRows, stack: TrainedStackPlan) -> Any:
    """Returns the optimizer's state for a stacked table. Per shard."""
    if stack.optimizer.keeps_gradient:
        state = init_every_row(table, stack)
    else:
        rule = _lifted(TableWriter(stack=stack), across_shards(stack))
        state = rule.init(table)
    if stack.layout.narrow_dtype is None:
        return state
    return RoundedState(step=jnp.zeros((), jnp.int32), inner=state)


@jax.named_scope("update")
def apply_gradient(
    table: PackedRows,
    state: Any,
    gradient: GradientRounds,
    stack: TrainedStackPlan,
    used_rows: Any = None,
) -> tuple[PackedRows, Any]:
    """Updates a stacked table with the gradient of a step. Per shard.

    In place where donated. Rounds are applied one after the other. Their rows are
    different, so the result equals one update with all rows. Values that belong to no
    row, such as the step count and the learning rate, are the same for all rounds and
    advance once. If a learning rate is not finite, the step moves no row.

    Args:
      table: rows of this shard.
      state: from `init_state`.
      gradient: gradient of the stack, or `gradient_of_no_row`.
      stack: plan of the stack.
      used_rows: this shard's part of the `used_rows` of the stack's vocabulary.

    Returns:
      New table and state.
    """
    is_rounded = isinstance(state, RoundedState)
    writer = TableWriter(
        stack=stack,
        step=state.step if is_rounded else None,
        table_sizes=stack.vocabulary.stacks.table_sizes(used_rows, stack),
    )
    if not is_rounded:
        return _apply(table, state, gradient, writer)
    table, inner = _apply(table, state.inner, gradient, writer)
    return table, RoundedState(step=state.step + 1, inner=inner)


def step_without_gradient(state: Any, stack: TrainedStackPlan) -> Any:
    """Returns the state of a stack after a step that touched none of its rows.

    Values that belong to no row advance, as they do in any other step. So they count
    the same steps for all tables, whichever of them share a stack. Slot variables take
    no part: XLA has nothing to copy, and devices communicate nothing.

    Args:
      state: from `init_state`, of a rule for touched rows.
      stack: gives the rule.
    """
    if isinstance(state, RoundedState):
        inner = step_without_gradient(state.inner, stack)
        return RoundedState(step=state.step + 1, inner=inner)
    sizes = [x.num_rows for x in stack.tables] if stack.optimizer.takes_totals else None
    return step_on_no_row(stack.optimizer, state, stack.dim, sizes)


def _apply(
    table: PackedRows, state: Any, gradient: GradientRounds, writer: TableWriter
) -> tuple[PackedRows, Any]:
    """Applies the rule to the rows of all rounds.

    A rule that keeps the gradient gets one of the whole table. A rule with totals over
    the table runs twice if there are several rounds: first for the totals, then with
    them. All others run once per round.
    """
    stack, optimizer = writer.stack, writer.stack.optimizer
    inner = state.inner if optimizer.keeps_gradient else state
    leaves = jax.tree.leaves(inner, is_leaf=is_slot)
    is_finite = rates_are_finite(optimizer, stack.dim, leaves)
    if optimizer.keeps_gradient:
        rows = _if_finite(None, is_finite)
        table, new = apply_to_every_row(table, state, gradient, writer, rows)
        return table, _with_finite_values(new, state, is_finite)

    def apply_round(all_reduce, table, state, gradients, rows):
        if is_finite is not None:
            gradients = gradients.only_if(is_finite)
        rows = _if_finite(rows, is_finite)
        return _apply_round(all_reduce, writer, table, state, gradients, rows)

    all_reduce, totals = across_shards(stack), None
    if optimizer.takes_totals and gradient.fold_later is not None:
        totals = _totals_over_rounds(apply_round, table, state, gradient, all_reduce)
        totals, table, state = read_before_write((totals, table, state))
    old = state

    def apply_next(carry, gradients, rows):
        table, new = carry
        # Values that belong to no row advance once: every round starts from the old.
        state = with_slots(old, slots_of(new))
        total_of = all_reduce if totals is None else known_totals(totals)
        return apply_round(total_of, table, state, gradients, rows)

    table, new = gradient.fold(apply_next, (table, old))
    return table, _with_finite_values(new, old, is_finite)


def _if_finite(rows: RowRange | None, is_finite: Any) -> RowRange | None:
    """Returns the rows that move: none if a learning rate is not finite."""
    if is_finite is None:
        return rows
    first_row, end_row = rows or RowRange(jnp.int32(0), jnp.int32(PADDING_ROW_ID))
    return RowRange(first_row, jnp.where(is_finite, end_row, 0))


def _with_finite_values(new: Any, old: Any, is_finite: Any) -> Any:
    """Keeps values of the state that a rate made NaN or infinite, such as totals."""
    if is_finite is None:
        return new

    def keep(after, before):
        if is_slot(after) or not jnp.issubdtype(after.dtype, jnp.floating):
            return after
        return jnp.where(is_finite | jnp.isfinite(after), after, before)

    return jax.tree.map(keep, new, old, is_leaf=is_slot)


def _totals_over_rounds(
    apply_round: ApplyRound,
    table: PackedRows,
    state: Any,
    gradient: GradientRounds,
    all_reduce: AllReduce,
) -> list[Any]:
    """Returns the totals that the rule asks for, over the rows of all rounds."""
    fold_later = gradient.fold_later
    assert fold_later is not None

    def run(all_reduce, gradients):
        return apply_round(all_reduce, table, state, gradients, None)

    return find_totals(
        lambda all_reduce: run(all_reduce, gradient.first),
        lambda fold, carry: fold_later(
            lambda carry, gradients, _: fold(
                carry, lambda all_reduce: run(all_reduce, gradients)
            ),
            carry,
        ),
        all_reduce,
    )


def _apply_round(
    all_reduce: AllReduce,
    writer: TableWriter,
    table: PackedRows,
    state: Any,
    gradients: RowGradients,
    rows: RowRange | None,
) -> tuple[PackedRows, Any]:
    """Applies the gradients of one round, whose rows are those of a range."""
    optimizer = writer.stack.optimizer
    if optimizer.duplicates != "sequence":
        table = writer.before_rule(table, gradients.row_ids)
    updates = gradients.as_row_updates()
    if optimizer.rows == "every":
        return apply_round_to_every_row(table, state, updates, rows, writer)
    if optimizer.duplicates == "sequence":
        rule: Any = _lifted(writer, all_reduce)
        table, state = apply_in_sequence(rule, table, state, updates, writer)
        return table, step_without_gradient(state, writer.stack)
    occurrence_total = None
    occurrences = gradients.occurrences
    if occurrences is not None:
        squares = jnp.sum(jnp.square(occurrences.values), axis=1)
        is_touched = occurrences.row_ids != PADDING_ROW_ID
        known = writer.known_rows(occurrences.row_ids, is_touched, all_reduce)
        occurrence_total = known.total(squares)
    rule = _lifted(writer, all_reduce, occurrence_total)
    updates, state = rule.update(updates, state, table)
    return writer.add(table, updates.row_ids, updates.values), state


def _lifted(
    writer: TableWriter,
    all_reduce: AllReduce,
    occurrence_squares: Float[Array, " tables"] | None = None,
) -> Any:
    """Lifts the stack's rule to touched rows, and answers what it asks about them."""
    optimizer = writer.stack.optimizer

    def rows_of(row_ids: Int[Array, " rows"]) -> TableRows:
        known = writer.known_rows(row_ids, row_ids != PADDING_ROW_ID, all_reduce)
        return dataclasses.replace(known, occurrence_squares=occurrence_squares)

    asks = optimizer.takes_totals
    return lift_to_rows(optimizer, rows_of if asks else None, writer.stack.updates)
