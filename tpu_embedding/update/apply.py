"""Updates a stacked table and its slot variables with a step's gradient.

Each driver has a function `(table, state, gradient, writer) -> (table, state)` in
`DRIVERS`. Drivers for touched rows are here, drivers for all rows in `every_row.py`.
Everything runs per shard, and in place if the arrays are donated.

A gradient arrives in rounds, which are applied one after another. Different rounds have
different rows, so the result equals one update with all rows. Values shared by all
rows, such as the step count and learning rate, advance once per step. If a learning
rate is not finite, the step does not change any rows.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from tpu_embedding.optimizers.row_optimizer import (
    EveryRow,
    InSequence,
    KeptGradient,
    Touched,
)
from tpu_embedding.optimizers.table_rows import AllReduce, TableRows
from tpu_embedding.plan.plan import StackPlan
from tpu_embedding.rows.access import blocks_of, lines_of_block
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.rows.row_gradients import GradientRounds, RowGradients
from tpu_embedding.types import PADDING_ROW_ID, RowRange, RowUpdates
from tpu_embedding.update.every_row import (
    init_kept_gradient,
    update_every_row,
    update_kept_gradient,
)
from tpu_embedding.update.lazy_update import (
    PADDING_ROWS,
    Arrays,
    RuleStep,
    abstract_rule_state,
    init_rule,
    slots_of,
    with_values,
)
from tpu_embedding.update.table_writer import RoundedState, TableWriter, open_state
from tpu_embedding.update.totals import (
    across_shards,
    find_totals,
    known_totals,
    tables_of_rows,
)
from tpu_embedding.xla import computed_apart, read_before_write

UpdateStack = Callable[
    [PackedRows, Any, GradientRounds, TableWriter], tuple[PackedRows, Any]
]
"""Maps this shard's rows, the rule's state, the stack's gradient and the writer to new
rows and a new state."""


def init_state(table: PackedRows, stack: StackPlan) -> Any:
    """Returns the optimizer's state for a stacked table. Per shard.

    Totals are summed block by block. Rows that are stored on the host are summed in the
    same order, so totals have the same bits wherever the rows are stored.
    """
    totals: list[Array] = []
    if stack.optimizer.takes_totals:
        blocks = blocks_of([table.layout])
        totals = find_totals(
            lambda block, all_reduce: init_block(
                computed_apart(lines_of_block(table, *block)),
                block[0],
                all_reduce,
                stack,
            ),
            blocks.first,
            blocks.fold_later,
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


@functools.lru_cache(maxsize=4096)
def abstract_state(stack: StackPlan) -> Any:
    """Returns a state structured like `init_state`'s, without running the rule."""
    rule_state = abstract_rule_state(stack.optimizer, stack.layout)
    return jax.eval_shape(functools.partial(state_around, stack=stack), rule_state)


def state_around(rule_state: Any, stack: StackPlan) -> Any:
    """Returns a stack's initial state, given its rule's state."""
    state = rule_state
    if isinstance(stack.optimizer.driver, KeptGradient):
        state = init_kept_gradient(rule_state, stack.layout)
    if stack.layout.narrow_dtype is None:
        return state
    return RoundedState(step=jnp.zeros((), jnp.int32), inner=state)


def state_without_rows(state: Any, stack: StackPlan) -> Any:
    """Returns a stack's state after a step that did not touch its rows.

    Values shared by all rows advance as in any other step, so step counts agree across
    tables, however tables are stacked. Slot variables are not read or written, so XLA
    does not copy them and devices do not communicate.

    Args:
      state: from `init_state`. The rule must update touched rows only.
      stack: the stack, with its rule.
    """
    writer, state = open_state(state, stack)
    step = RuleStep(stack.optimizer, state, stack.dim)
    known = None
    if stack.optimizer.takes_totals:
        # Totals over no rows are zero, and the rule's values may depend on them.
        row_ids = jnp.full(PADDING_ROWS, PADDING_ROW_ID, jnp.int32)
        known = writer.known_rows(row_ids, row_ids < 0, lambda totals, _: totals)
    return writer.closed(with_values(state, step.without_rows(known)))


def update_touched(
    table: PackedRows, state: Any, gradient: GradientRounds, writer: TableWriter
) -> tuple[PackedRows, Any]:
    """Runs the rule once on each row that the step looked up.

    If there are several rounds, a rule with totals first runs to find the totals, and
    then runs again to use them.
    """
    stack, takes_totals = writer.stack, writer.stack.optimizer.takes_totals
    step = RuleStep(stack.optimizer, state, stack.dim, stack.updates)
    gradient, all_reduce = step.only_if_finite(gradient), across_shards(stack)
    slots, totals = slots_of(state), None
    if takes_totals and gradient.fold_later is not None:
        totals = find_totals(
            lambda gradients, all_reduce: step.update_rows(
                gradients.as_row_updates(),
                table,
                slots,
                _known_rows(gradients, all_reduce, writer),
            ),
            gradient.first,
            gradient.fold_later,
            all_reduce,
        )
        totals, table, slots = read_before_write((totals, table, slots))

    def update_round(
        arrays: Arrays, gradients: RowGradients
    ) -> tuple[Arrays, list[Any]]:
        table = writer.before_rule(arrays.table, gradients.row_ids)
        reduce = all_reduce if totals is None else known_totals(totals)
        known = _known_rows(gradients, reduce, writer) if takes_totals else None
        updates, slots, new_values = step.update_rows(
            gradients.as_row_updates(), table, arrays.slots, known
        )
        table = writer.add(table, gradients.row_ids, updates)
        return Arrays(table, slots), new_values

    arrays, new_values = update_round(Arrays(table, slots), gradient.first)
    if gradient.fold_later is not None:
        # All rounds compute the same new values from the old state.
        arrays = gradient.fold_later(
            lambda arrays, gradients, _: update_round(arrays, gradients)[0], arrays
        )
    return arrays.table, step.new_state(arrays.slots, new_values)


def update_in_sequence(
    table: PackedRows, state: Any, gradient: GradientRounds, writer: TableWriter
) -> tuple[PackedRows, Any]:
    """Runs the rule once per occurrence of a row, in sample order.

    It takes as many passes as the most frequent row has occurrences. All occurrences of
    a row are in the same round. Values shared by all rows advance once per step.
    """
    stack = writer.stack
    step = RuleStep(stack.optimizer, state, stack.dim)
    gradient = step.only_if_finite(gradient)

    def update_round(
        arrays: Arrays, gradients: RowGradients, _: RowRange | None
    ) -> Arrays:
        updates = gradients.as_row_updates()
        earlier = _num_earlier_occurrences(updates.row_ids)
        is_used = updates.row_ids != PADDING_ROW_ID
        num_passes = jnp.max(jnp.where(is_used, earlier + 1, 0))

        def run_pass(passes: tuple[Array, Arrays]) -> tuple[Array, Arrays]:
            # The first pass updates each row's first occurrence, and so on.
            number, arrays = passes
            row_ids = jnp.where(earlier == number, updates.row_ids, PADDING_ROW_ID)
            table = writer.before_rule(arrays.table, row_ids)
            row_updates, slots, _ = step.update_rows(
                RowUpdates(row_ids=row_ids, values=updates.values), table, arrays.slots
            )
            table = writer.add(table, row_ids, row_updates, occurrence=number)
            return number + 1, Arrays(table, slots)

        start = (jnp.int32(0), arrays)
        return jax.lax.while_loop(lambda x: x[0] < num_passes, run_pass, start)[1]

    arrays = gradient.fold(update_round, Arrays(table, slots_of(state)))
    return arrays.table, step.new_state(arrays.slots, step.without_rows())


DRIVERS: Final[Mapping[type, UpdateStack]] = {
    Touched: update_touched,
    EveryRow: update_every_row,
    KeptGradient: update_kept_gradient,
    InSequence: update_in_sequence,
}
"""Maps each driver to the function that updates a stack."""


def _known_rows(
    gradients: RowGradients, all_reduce: AllReduce, writer: TableWriter
) -> TableRows:
    """Returns the facts about a round's rows, for a rule with totals."""
    occurrence_total = None
    occurrences = gradients.occurrences
    if occurrences is not None:
        squares = jnp.sum(jnp.square(occurrences.values), axis=1)
        is_touched = occurrences.row_ids != PADDING_ROW_ID
        known = writer.known_rows(occurrences.row_ids, is_touched, all_reduce)
        occurrence_total = known.total(squares)
    is_touched = gradients.row_ids != PADDING_ROW_ID
    known = writer.known_rows(gradients.row_ids, is_touched, all_reduce)
    return dataclasses.replace(known, occurrence_squares=occurrence_total)


def _num_earlier_occurrences(row_ids: Int[Array, " n"]) -> Int[Array, " n"]:
    """Counts equal ids before each position."""
    positions = jnp.arange(row_ids.shape[0], dtype=jnp.int32)
    sorted_ids, order = jax.lax.sort((row_ids, positions), num_keys=1, is_stable=True)
    firsts = jnp.searchsorted(sorted_ids, sorted_ids, side="left").astype(jnp.int32)
    return jnp.zeros_like(positions).at[order].set(positions - firsts)
