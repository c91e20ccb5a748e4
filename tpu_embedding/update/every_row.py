"""Updates every row of a table, touched or not.

The rule runs over the table block by block, in place. For each round of the gradient,
it runs on the rows that the round covers.

Rules that need totals over the table, or run once per several steps, must see all
rounds of the gradient before they run. Their state keeps a dense gradient, a slot
variable of the table's size. Each step adds its gradient to this slot variable, and the
pass over the table clears it.
"""

import dataclasses
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
    RuleStep,
    is_slot,
    slots_of,
    start_step,
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


class _SweptArrays(NamedTuple):
    """The arrays that a pass over all rows changes.

    Attributes:
      table: the table's rows.
      slots: slot variables.
      kept: `gradient` and `touches` of a `KeptGradientState`, or empty.
    """

    table: Any
    slots: list[Any]
    kept: tuple[Any, ...] = ()


def init_kept_gradient(rule_state: Any, layout: RowLayout) -> KeptGradientState:
    """Returns a rule's state with a dense gradient of zeros. Per shard."""

    def zeros(row_shape: tuple[int, ...], dtype: Any) -> PackedRows:
        row = jax.ShapeDtypeStruct(row_shape, dtype)
        return full_rows(0, layout.slot_layout(row), dtype)

    return KeptGradientState(
        gradient=zeros(layout.row_shape, jnp.float32),
        touches=zeros((), jnp.int32),
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
    step = start_step(stack.optimizer, state.inner, stack.dim)

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
    sweep = _Sweep(
        step=step,
        writer=writer,
        gradient_of=average,
        rows=rows,
    )

    def run(carry: tuple[PackedRows, Any, Any]) -> tuple[PackedRows, Any, Any]:
        table, inner, kept = carry
        arrays = _SweptArrays(table, slots_of(inner), kept)
        arrays, new_values = _sweep_table(arrays, sweep)
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
    step = start_step(stack.optimizer, state, stack.dim)

    def update_round(
        arrays: _SweptArrays, gradients: RowGradients, rows: RowRange | None
    ) -> _SweptArrays:
        in_order = _sorted_gradients(gradients.as_row_updates())
        arrays, in_order = read_before_write((arrays, in_order))
        sweep = _Sweep(
            step=step,
            writer=writer,
            gradient_of=lambda start, size, _: in_order.in_block(start, size),
            rows=rows,
        )
        arrays, _ = _sweep_table(arrays, sweep)
        return arrays

    gradient = step.only_if_finite(gradient)
    arrays = gradient.fold(update_round, _SweptArrays(table, slots_of(state)))
    return arrays.table, step.new_state(arrays.slots, step.without_rows())


class _SortedGradients(NamedTuple):
    """A round's gradients, sorted by row and followed by a chunk of padding.

    Attributes:
      row_ids: int32 `[n]`, ascending.
      values: `[n, dim]`.
    """

    row_ids: Array
    values: Array

    def in_block(self, start: Any, size: int) -> tuple[Array, Array]:
        """Returns a block's dense gradient, and a mask with 1 for touched rows."""
        chunk = min(_CHUNK, self.row_ids.shape[0] // 2)
        end_row = start + size
        ends = jnp.asarray([start, end_row], jnp.int32)
        first, end = jnp.searchsorted(self.row_ids, ends).astype(jnp.int32)

        def add_chunk(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            position, gradient, touches = carry
            ids, values = (
                jax.lax.dynamic_slice_in_dim(array, position, chunk)
                for array in (self.row_ids, self.values)
            )
            # Ids of later blocks and of padding are mapped out of range.
            at = jnp.where(ids < end_row, ids - start, size)
            return (
                position + chunk,
                gradient.at[at].set(values, mode="drop", wrap_negative_indices=False),
                touches.at[at].set(1, mode="drop", wrap_negative_indices=False),
            )

        def is_before_end(carry: tuple[Array, Array, Array]) -> Array:
            position, _, _ = carry
            return position < end

        zeros = jnp.zeros((size, self.values.shape[1]), jnp.float32)
        carry = (first, zeros, jnp.zeros(size, jnp.int32))
        _, gradient, touches = jax.lax.while_loop(is_before_end, add_chunk, carry)
        return gradient, touches


def _sorted_gradients(gradients: RowUpdates) -> _SortedGradients:
    (num_rows,) = gradients.row_ids.shape
    positions = jnp.arange(num_rows, dtype=jnp.int32)
    row_ids, order = jax.lax.sort((gradients.row_ids, positions), num_keys=1)
    room = min(_CHUNK, num_rows)
    return _SortedGradients(
        jnp.pad(row_ids, (0, room), constant_values=PADDING_ROW_ID),
        jnp.pad(gather_lines(gradients.values, order), ((0, room), (0, 0))),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sweep:
    """A pass of a rule over all rows of a shard. It exists only during tracing.

    Attributes:
      step: the rule's step.
      writer: writes the table's rows.
      gradient_of: maps a block's start, size and kept gradient to the block's gradient
        `[size, dim]` and its touches `[size]`, above 0 for rows that were looked up.
      rows: range of rows that the pass updates, or `None` for all.
    """

    step: RuleStep
    writer: TableWriter
    gradient_of: Callable[[Any, int, Any], tuple[Array, Array]]
    rows: RowRange | None


def _sweep_table(arrays: _SweptArrays, sweep: _Sweep) -> tuple[_SweptArrays, list[Any]]:
    """Runs the rule on the first block, then on all later blocks in a loop.

    Returns:
      The updated arrays, and the rule's new values.
    """
    all_rows = jax.tree.leaves(arrays, is_leaf=is_slot)
    blocks = blocks_of([rows.layout for rows in all_rows])
    totals: list[Array] = []
    if sweep.step.probed.takes_totals:
        totals = find_totals(
            lambda block, all_reduce: _run_on_block(arrays, block, all_reduce, sweep),
            blocks.first,
            lambda add_block, total: blocks.loop(
                lambda start, total: add_block(total, (start, blocks.size)), total
            ),
            across_shards(sweep.writer.stack),
        )
    arrays, totals = read_before_write((arrays, totals))
    arrays, new_values = _run_on_block(
        arrays, blocks.first, known_totals(totals), sweep
    )

    def run_later_block(start: Any, arrays: _SweptArrays) -> _SweptArrays:
        block = start, blocks.size
        arrays, _ = _run_on_block(arrays, block, known_totals(totals), sweep)
        return arrays

    return blocks.loop(run_later_block, arrays), new_values


def _run_on_block(
    arrays: _SweptArrays,
    block: tuple[Any, int],
    all_reduce: AllReduce,
    sweep: _Sweep,
) -> tuple[_SweptArrays, list[Any]]:
    """Runs the rule on a block's rows, and clears its kept gradient.

    Args:
      arrays: all rows.
      block: first row and number of rows.
      all_reduce: answers the rule's requests for totals.
      sweep: the pass.

    Returns:
      The arrays with the block updated, and the rule's new values.
    """
    start, size = block
    writer = sweep.writer
    old = jax.tree.map(
        lambda rows: read_block(rows, start, size), arrays, is_leaf=is_slot
    )
    rows = jnp.zeros_like(old.table) if writer.stack.optimizer.sets_rows else old.table
    gradient, touches = sweep.gradient_of(start, size, old.kept)
    row_ids = start + jnp.arange(size, dtype=jnp.int32)
    known = writer.known_rows(row_ids, touches > 0, all_reduce)
    is_moved = known.is_used
    if sweep.rows is not None:
        is_moved &= (row_ids >= sweep.rows.first_row) & (row_ids < sweep.rows.end_row)
    updates, new_slots, new_values = sweep.step.run(gradient, rows, old.slots, known)

    def if_moved(new: Array, old: Array) -> Array:
        return jnp.where(is_moved.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    updates = jnp.where(is_moved[:, None], updates, 0)
    new = _SweptArrays(
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
