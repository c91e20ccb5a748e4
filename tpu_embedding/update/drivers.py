"""Applies gradients to stacks: drivers choose the parts that a rule runs on.

    Touched         for each round: its rows
    InSequence      for each round, for k = 0, 1, ...: the k-th occurrence of each row
    EveryRow        for each round: all rows that it covers, block by block
    KeptGradient    once all rounds are known: all rows, block by block

Rounds (docs/concepts/skew.md) never share a row, so applying them one by one has the
same result as a single update. Shared values, such as the step count, advance once per
step.
"""

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
from tpu_embedding.optimizers.table_rows import AllReduce
from tpu_embedding.plan.plan import StackPlan
from tpu_embedding.rows.access import (
    add_to_rows,
    blocks_of,
    gather_lines,
    read_block,
)
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.rows.row_gradients import Parts, RowGradients
from tpu_embedding.types import PADDING_ROW_ID, RowRange, RowUpdates
from tpu_embedding.update.parts import Arrays, Part, StackStep
from tpu_embedding.update.state import is_slot
from tpu_embedding.update.totals import across_shards, find_totals, known_totals
from tpu_embedding.xla import read_before_write, run_if

_CHUNK: Final = 1024
"""Number of gradients that `_dense_gradient` reads at a time."""

Driver = Callable[[StackStep, Arrays, Parts], tuple[Arrays, list[Any]]]
"""Runs a step on the arrays, and returns new arrays and new shared values."""

GradientOfBlock = Callable[[Any, int, Arrays], tuple[Array, Array]]
"""Maps a block's start and size, and the arrays, to the block's gradient `[size, dim]`
and touches `[size]`. Touches are above 0 for rows that were looked up."""


@jax.named_scope("update")
def update_stack(
    table: PackedRows,
    state: Any,
    gradient: Parts,
    stack: StackPlan,
    table_sizes: Array | None = None,
) -> tuple[PackedRows, Any]:
    """Updates a stacked table and its optimizer state, in place where donated.

    All arrays are per shard. See `StackStep` for `table_sizes`.
    """
    step = StackStep(stack, state, table_sizes)
    is_finite = step.is_finite
    # A learning rate that isn't finite must not change any row, so the rows are removed
    # from the gradient here. A kept gradient is collected as usual, but then
    # `_update_kept_gradient` moves no rows.
    if is_finite is not None and step.kept is None:
        gradient = gradient.map(lambda round: round.only_if(is_finite))
    driver = _DRIVERS[type(stack.optimizer.driver)]
    arrays, new_values = driver(step, step.arrays(table), gradient)
    return arrays.table, step.state_after(arrays, new_values)


def state_without_rows(
    state: Any, stack: StackPlan, table_sizes: Array | None = None
) -> Any:
    """Advances shared values after a step that touched no rows in this stack.

    The rule must update only touched rows.
    """
    # Step counts then agree across tables, however the tables are stacked. Slot
    # variables are neither read nor written, so XLA doesn't copy them.
    step = StackStep(stack, state, table_sizes)
    return step.state_after(None, step.values_without_rows())


def _update_touched(
    step: StackStep, arrays: Arrays, gradient: Parts
) -> tuple[Arrays, list[Any]]:
    def run(
        arrays: Arrays, gradients: RowGradients, all_reduce: AllReduce
    ) -> tuple[Arrays, list[Any]]:
        updates = gradients.as_row_updates()
        part = Part(
            updates.row_ids,
            updates.values,
            # As in TensorFlow, a row that was looked up is touched even if its gradient
            # is zero.
            is_touched=updates.row_ids != PADDING_ROW_ID,
            occurrences=gradients.occurrences,
        )
        return step.run_on_rows(arrays, part, all_reduce)

    return _run_parts(step, arrays, gradient, run)


def _update_in_sequence(
    step: StackStep, arrays: Arrays, gradient: Parts
) -> tuple[Arrays, list[Any]]:
    """Runs the rule once per occurrence of a row, in sample order."""
    all_reduce = across_shards(step.stack)

    def run_round(arrays: Arrays, gradients: RowGradients) -> Arrays:
        updates = gradients.as_row_updates()
        # All occurrences of a row are in one round.
        earlier = _num_earlier_occurrences(updates.row_ids)
        is_used = updates.row_ids != PADDING_ROW_ID
        num_passes = jnp.max(jnp.where(is_used, earlier + 1, 0))

        def run_pass(passes: tuple[Array, Arrays]) -> tuple[Array, Arrays]:
            number, arrays = passes
            is_due = earlier == number
            row_ids = jnp.where(is_due, updates.row_ids, PADDING_ROW_ID)
            part = Part(row_ids, updates.values, is_due, occurrence=number)
            # Shared values advance once per step, so a pass drops its new values.
            return number + 1, step.run_on_rows(arrays, part, all_reduce)[0]

        start = (jnp.int32(0), arrays)
        return jax.lax.while_loop(lambda x: x[0] < num_passes, run_pass, start)[1]

    return gradient.fold(run_round, arrays), step.values_without_rows()


def _update_every_row(
    step: StackStep, arrays: Arrays, gradient: Parts
) -> tuple[Arrays, list[Any]]:
    """Runs the rule on every row, without a dense gradient in memory."""

    def run_round(arrays: Arrays, gradients: RowGradients) -> Arrays:
        # Sort gradients, so that a binary search finds the gradients of a block.
        in_order = _sorted_gradients(gradients.as_row_updates())
        arrays, in_order = read_before_write((arrays, in_order))

        def gradient_of(start: Any, size: int, _: Arrays) -> tuple[Array, Array]:
            return _dense_gradient(in_order, start, size)

        return _sweep(step, arrays, gradient_of, gradients.covered)[0]

    return gradient.fold(run_round, arrays), step.values_without_rows()


def _update_kept_gradient(
    step: StackStep, arrays: Arrays, gradient: Parts
) -> tuple[Arrays, list[Any]]:
    """Adds to the kept gradient, and runs the rule on every row if an update is due."""
    # A rule with totals, or with several steps per update, must see all rounds before
    # it moves any row. So the state keeps a dense gradient, and the sweep clears it.

    def collect(
        kept: tuple[PackedRows, ...], gradients: RowGradients
    ) -> tuple[PackedRows, ...]:
        collected, touches = kept
        updates = gradients.as_row_updates()
        ones = jnp.ones(updates.row_ids.shape, jnp.int32)
        return (
            add_to_rows(collected, updates.row_ids, updates.values),
            add_to_rows(touches, updates.row_ids, ones),
        )

    arrays = arrays._replace(kept=gradient.fold(collect, arrays.kept))
    num_steps, covered = step.stack.optimizer.gradient_steps, None
    if step.is_finite is not None:
        # With an empty range, the sweep moves no row but clears the kept gradient.
        end_row = jnp.where(step.is_finite, jnp.int32(PADDING_ROW_ID), 0)
        covered = RowRange(jnp.int32(0), end_row)

    def gradient_of(start: Any, size: int, arrays: Arrays) -> tuple[Array, Array]:
        collected, touches = (read_block(x, start, size) for x in arrays.kept)
        return collected / num_steps, touches

    def sweep(carry: tuple[Arrays, list[Any]]) -> tuple[Arrays, list[Any]]:
        return _sweep(step, carry[0], gradient_of, covered)

    carry = (arrays, step.old_values)
    assert step.kept is not None
    if num_steps == 1:
        return sweep(carry)
    return run_if(step.kept.step + 1 >= num_steps, sweep, carry)


_DRIVERS: Final[Mapping[type, Driver]] = {
    Touched: _update_touched,
    EveryRow: _update_every_row,
    KeptGradient: _update_kept_gradient,
    InSequence: _update_in_sequence,
}


def _run_parts(
    step: StackStep,
    arrays: Arrays,
    parts: Parts,
    run: Callable[[Arrays, Any, AllReduce], tuple[Arrays, list[Any]]],
) -> tuple[Arrays, list[Any]]:
    """Runs the rule on all parts, one after another, with totals over all parts."""
    all_reduce = across_shards(step.stack)
    totals: list[Array] | None = None
    if step.stack.optimizer.takes_totals and parts.fold_later is not None:
        totals = find_totals(
            lambda part, all_reduce: run(arrays, part, all_reduce), parts, all_reduce
        )
        # Wait for the totals, because the last run overwrites the rows they depend on.
        totals, arrays = read_before_write((totals, arrays))

    def run_part(arrays: Arrays, part: Any) -> tuple[Arrays, list[Any]]:
        return run(arrays, part, known_totals(totals) if totals else all_reduce)

    arrays, new_values = run_part(arrays, parts.first)
    if parts.fold_later is not None:
        # All parts compute the same new shared values from the old state.
        arrays = parts.fold_later(lambda *carry: run_part(*carry)[0], arrays)
    return arrays, new_values


def _num_earlier_occurrences(row_ids: Int[Array, " n"]) -> Int[Array, " n"]:
    """Counts equal ids before each position."""
    # The sort is stable, since equal ids must stay in sample order.
    positions = jnp.arange(row_ids.shape[0], dtype=jnp.int32)
    sorted_ids, order = jax.lax.sort((row_ids, positions), num_keys=1, is_stable=True)
    firsts = jnp.searchsorted(sorted_ids, sorted_ids, side="left").astype(jnp.int32)
    return jnp.zeros_like(positions).at[order].set(positions - firsts)


def _sorted_gradients(gradients: RowUpdates) -> RowUpdates:
    (num_rows,) = gradients.row_ids.shape
    positions = jnp.arange(num_rows, dtype=jnp.int32)
    row_ids, order = jax.lax.sort((gradients.row_ids, positions), num_keys=1)
    # Without padding, `dynamic_slice` would shift the last chunk to earlier rows.
    room = min(_CHUNK, num_rows)
    return RowUpdates(
        row_ids=jnp.pad(row_ids, (0, room), constant_values=PADDING_ROW_ID),
        values=jnp.pad(gather_lines(gradients.values, order), ((0, room), (0, 0))),
    )


def _dense_gradient(in_order: RowUpdates, start: Any, size: int) -> tuple[Array, Array]:
    """Expands sorted gradients to a dense block, and marks touched rows with 1."""
    # A chunk is as long as the padding, so no chunk is shifted.
    chunk = min(_CHUNK, in_order.row_ids.shape[0] // 2)
    end_row = start + size
    ends = jnp.asarray([start, end_row], jnp.int32)
    first, end = jnp.searchsorted(in_order.row_ids, ends).astype(jnp.int32)

    def add_chunk(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        position, gradient, touches = carry
        ids, values = (
            jax.lax.dynamic_slice_in_dim(array, position, chunk)
            for array in (in_order.row_ids, in_order.values)
        )
        # Rows of later blocks and padding are mapped out of range. Because of the
        # search, rows of earlier blocks don't occur.
        at = jnp.where(ids < end_row, ids - start, size)
        return (
            position + chunk,
            gradient.at[at].set(values, mode="drop", wrap_negative_indices=False),
            touches.at[at].set(1, mode="drop", wrap_negative_indices=False),
        )

    zeros = jnp.zeros((size, in_order.values.shape[1]), jnp.float32)
    carry = (first, zeros, jnp.zeros(size, jnp.int32))
    return jax.lax.while_loop(lambda carry: carry[0] < end, add_chunk, carry)[1:]


def _sweep(
    step: StackStep,
    arrays: Arrays,
    gradient_of: GradientOfBlock,
    covered: RowRange | None,
) -> tuple[Arrays, list[Any]]:
    """Runs the rule on all rows in a range, block by block."""
    all_rows = jax.tree.leaves(arrays, is_leaf=is_slot)
    blocks = blocks_of([rows.layout for rows in all_rows])

    def run_block(
        arrays: Arrays, block: tuple[Any, int], all_reduce: AllReduce
    ) -> tuple[Arrays, list[Any]]:
        start, size = block
        row_ids = start + jnp.arange(size, dtype=jnp.int32)
        gradient, touches = gradient_of(start, size, arrays)
        part = Part(row_ids, gradient, touches > 0)
        return step.run_on_block(arrays, part, start, covered, all_reduce)

    return _run_parts(step, arrays, blocks.as_parts(), run_block)
