"""Updates every row of a table, touched or not.

The rule runs over the table block by block, in place. For each round of the gradient,
it runs on the rows that the round covers.

Rules that need totals over the table, or run once per several steps, must see all
rounds of the gradient before they run. Their state keeps a dense gradient, a slot
variable of the table's size. Each step adds its gradient to this slot variable, and the
pass over the table clears it.
"""

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from tpu_embedding.optimizers.table_rows import AllReduce
from tpu_embedding.rows.access import (
    add_to_rows,
    blocks_of,
    gather_lines,
    read_block,
    write_block,
)
from tpu_embedding.rows.packed_rows import PackedRows, RowLayout, full_rows
from tpu_embedding.rows.row_gradients import GradientRounds, RowGradients
from tpu_embedding.types import PADDING_ROW_ID, RowRange, RowUpdates
from tpu_embedding.update.lazy_update import (
    Arrays,
    RuleStep,
    is_slot,
    slots_of,
)
from tpu_embedding.update.table_writer import TableWriter
from tpu_embedding.update.totals import across_shards, find_totals, known_totals
from tpu_embedding.xla import read_before_write, run_if

_CHUNK: Final = 1024
"""Gradients that a block reads at a time."""


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


def init_kept_gradient(rule_state: Any, layout: RowLayout) -> KeptGradientState:
    """Returns a rule's state with a dense gradient of zeros. Per shard."""
    gradient = jax.ShapeDtypeStruct(layout.row_shape, jnp.float32)
    touches = jax.ShapeDtypeStruct((), jnp.int32)
    return KeptGradientState(
        gradient=full_rows(0, layout.slot_layout(gradient), gradient.dtype),
        touches=full_rows(0, layout.slot_layout(touches), touches.dtype),
        step=jnp.zeros((), jnp.int32),
        inner=rule_state,
    )


def update_kept_gradient(
    table: PackedRows,
    state: KeptGradientState,
    gradient: GradientRounds,
    writer: TableWriter,
) -> tuple[PackedRows, KeptGradientState]:
    """Adds to the kept gradient, and runs the rule on every row if an update is due.

    Per shard; in place where donated.
    """
    stack = writer.stack
    step = RuleStep(stack.optimizer, state.inner, stack.dim)

    def collect(
        kept: tuple[PackedRows, PackedRows], gradients: RowGradients, _: Any
    ) -> tuple[PackedRows, PackedRows]:
        collected, touches = kept
        updates = gradients.as_row_updates()
        ones = jnp.ones(updates.row_ids.shape, jnp.int32)
        return (
            add_to_rows(collected, updates.row_ids, updates.values),
            add_to_rows(touches, updates.row_ids, ones),
        )

    def average(_start: Any, _size: int, kept: Any) -> tuple[Array, Array]:
        collected, touches = kept
        return collected / num_steps, touches

    kept = gradient.fold(collect, (state.gradient, state.touches))
    num_steps = stack.optimizer.gradient_steps
    rows = None
    if step.is_finite is not None:
        end_row = jnp.where(step.is_finite, jnp.int32(PADDING_ROW_ID), 0)
        rows = RowRange(jnp.int32(0), end_row)

    def run(carry: tuple[PackedRows, Any, Any]) -> tuple[PackedRows, Any, Any]:
        table, inner, kept = carry
        arrays = Arrays(table, slots_of(inner), kept)
        arrays, new_values = _sweep(arrays, step, writer, average, rows)
        return arrays.table, step.new_state(arrays.slots, new_values), arrays.kept

    count, carry = state.step + 1, (table, state.inner, kept)
    carry = run(carry) if num_steps == 1 else run_if(count >= num_steps, run, carry)
    table, inner, (collected, touches) = carry
    count = jnp.where(count >= num_steps, 0, count)
    return table, KeptGradientState(collected, touches, count, inner)


def update_every_row(
    table: PackedRows, state: Any, gradient: GradientRounds, writer: TableWriter
) -> tuple[PackedRows, Any]:
    """Runs a rule on every row, round by round, without a kept gradient.

    Each round of the gradient covers its own range of rows, so each row is updated
    once. Per shard; in place where donated.
    """
    stack = writer.stack
    step = RuleStep(stack.optimizer, state, stack.dim)

    def update_round(
        arrays: Arrays, gradients: RowGradients, rows: RowRange | None
    ) -> Arrays:
        in_order = _sorted_gradients(gradients.as_row_updates())
        arrays, in_order = read_before_write((arrays, in_order))
        dense_gradient = functools.partial(_dense_gradient, in_order)
        return _sweep(arrays, step, writer, dense_gradient, rows)[0]

    gradient = step.only_if_finite(gradient)
    arrays = gradient.fold(update_round, Arrays(table, slots_of(state)))
    return arrays.table, step.new_state(arrays.slots, step.without_rows())


def _sorted_gradients(gradients: RowUpdates) -> RowUpdates:
    """Returns gradients sorted by row and followed by a chunk of padding."""
    (num_rows,) = gradients.row_ids.shape
    positions = jnp.arange(num_rows, dtype=jnp.int32)
    row_ids, order = jax.lax.sort((gradients.row_ids, positions), num_keys=1)
    room = min(_CHUNK, num_rows)
    return RowUpdates(
        row_ids=jnp.pad(row_ids, (0, room), constant_values=PADDING_ROW_ID),
        values=jnp.pad(gather_lines(gradients.values, order), ((0, room), (0, 0))),
    )


def _dense_gradient(
    in_order: RowUpdates, start: Any, size: int, _: Any
) -> tuple[Array, Array]:
    """Returns a block's gradient from sorted ones, and 1 for its touched rows."""
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
        # Ids of later blocks and of padding are mapped out of range.
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
    arrays: Arrays,
    step: RuleStep,
    writer: TableWriter,
    gradient_of: Callable[[Any, int, Any], tuple[Array, Array]],
    covered: RowRange | None,
) -> tuple[Arrays, list[Any]]:
    """Runs the rule on all rows of a shard: on the first block, then in a loop.

    Args:
      arrays: all rows.
      step: the rule's step.
      writer: writes the table's rows.
      gradient_of: maps a block's start, size and kept gradient to the block's gradient
        `[size, dim]` and its touches `[size]`, above 0 for rows that were looked up.
      covered: range of rows that the pass updates, or `None` for all.

    Returns:
      The arrays, with the kept gradient cleared, and the rule's new values.
    """
    stack = writer.stack
    all_rows = jax.tree.leaves(arrays, is_leaf=is_slot)
    blocks = blocks_of([rows.layout for rows in all_rows])

    def run_on_block(
        arrays: Arrays, block: tuple[Any, int], all_reduce: AllReduce
    ) -> tuple[Arrays, list[Any]]:
        start, size = block
        old = jax.tree.map(
            lambda rows: read_block(rows, start, size), arrays, is_leaf=is_slot
        )
        rows = jnp.zeros_like(old.table) if stack.optimizer.sets_rows else old.table
        gradient, touches = gradient_of(start, size, old.kept)
        row_ids = start + jnp.arange(size, dtype=jnp.int32)
        known = writer.known_rows(row_ids, touches > 0, all_reduce)
        is_moved = known.is_used
        if covered is not None:
            is_moved &= (row_ids >= covered.first_row) & (row_ids < covered.end_row)
        updates, new_slots, new_values = step.run(gradient, rows, old.slots, known)

        def if_moved(new: Array, old: Array) -> Array:
            return jnp.where(is_moved.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        updates = jnp.where(is_moved[:, None], updates, 0)
        new = Arrays(
            table=writer.stored_rows(row_ids, rows, updates),
            slots=list(map(if_moved, new_slots, old.slots)),
            kept=jax.tree.map(jnp.zeros_like, old.kept),
        )
        new, new_values = read_before_write((new, new_values))
        written = jax.tree.map(
            lambda rows, new_rows: write_block(rows, start, new_rows),
            arrays,
            new,
            is_leaf=is_slot,
        )
        return written, new_values

    totals: list[Array] = []
    if step.probed.takes_totals:
        totals = find_totals(
            lambda block, all_reduce: run_on_block(arrays, block, all_reduce),
            blocks.first,
            blocks.fold_later,
            across_shards(stack),
        )
    arrays, totals = read_before_write((arrays, totals))
    arrays, new_values = run_on_block(arrays, blocks.first, known_totals(totals))

    def run_later_block(arrays: Arrays, block: tuple[Any, int]) -> Arrays:
        return run_on_block(arrays, block, known_totals(totals))[0]

    return blocks.fold_later(run_later_block, arrays), new_values
