"""Updates every row of a table, touched or not.

The rule runs over the table block by block, in place: once for each round of the
gradient, on the rows that the round covers.

A rule that asks for totals over the table, or runs once per several steps, must see the
gradient of all rounds. Its state keeps a dense gradient, a slot variable of the table's
size. Each step adds its gradient to it, and the pass over the table clears it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from tpu_embedding.optimizers.table_rows import AllReduce
from tpu_embedding.rows.access import add_to_rows, gather_lines
from tpu_embedding.rows.consecutive_rows import blocks_of, read_block, write_block
from tpu_embedding.rows.packed_rows import PackedRows, RowLayout, full_rows
from tpu_embedding.rows.row_gradients import GradientRounds, RowGradients
from tpu_embedding.types import PADDING_ROW_ID, RowRange, RowUpdates
from tpu_embedding.update.lazy_update import RuleStep, slots_of, start_step
from tpu_embedding.update.table_writer import TableWriter
from tpu_embedding.update.totals import across_shards, find_totals, known_totals
from tpu_embedding.xla import read_before_write, run_if

_CHUNK: Final = 1024
"""Gradients that a block takes at a time."""


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


def init_kept_gradient(rule_state: Any, layout: RowLayout) -> KeptGradientState:
    """Returns the state of a rule with a dense gradient of zeros. Per shard.

    Args:
      rule_state: state of the rule.
      layout: layout of the table.
    """

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
    """Adds to the kept gradient, and runs the rule on every row when it is due.

    Per shard; in place where donated.
    """
    stack = writer.stack
    step = start_step(stack.optimizer, state.inner, stack.dim)
    kept = gradient.fold(_collect, [state.gradient, state.touches])
    num_steps = stack.optimizer.gradient_steps
    rows = None
    if step.is_finite is not None:
        end_row = jnp.where(step.is_finite, jnp.int32(PADDING_ROW_ID), 0)
        rows = RowRange(jnp.int32(0), end_row)
    sweep = _Sweep(
        step=step,
        writer=writer,
        gradient_of=lambda _start, _size, kept: (kept[0] / num_steps, kept[1]),
        rows=rows,
    )

    def run(carry: tuple[PackedRows, Any, list[PackedRows]]) -> Any:
        table, inner, kept = carry
        packed, new_values = _sweep_table([table, *slots_of(inner), *kept], sweep)
        table, *slots = packed[:-2]
        return table, step.new_state(slots, new_values), packed[-2:]

    count, carry = state.step + 1, (table, state.inner, kept)
    carry = run(carry) if num_steps == 1 else run_if(count >= num_steps, run, carry)
    table, inner, (collected, touches) = carry
    count = jnp.where(count >= num_steps, 0, count)
    return table, KeptGradientState(collected, touches, count, inner)


def _collect(
    kept: list[PackedRows], gradients: RowGradients, rows: RowRange | None
) -> list[PackedRows]:
    """Adds the gradient of a round to the kept one, and counts the touches."""
    del rows
    gradient, touches = kept
    updates = gradients.as_row_updates()
    ones = jnp.ones(updates.row_ids.shape, jnp.int32)
    return [
        add_to_rows(gradient, updates.row_ids, updates.values),
        add_to_rows(touches, updates.row_ids, ones),
    ]


def update_every_row(
    table: PackedRows, state: Any, gradient: GradientRounds, writer: TableWriter
) -> tuple[PackedRows, Any]:
    """Runs a rule that keeps no gradient on every row: those that a round covers.

    Per shard; in place where donated.
    """
    stack = writer.stack
    step = start_step(stack.optimizer, state, stack.dim)

    def apply_round(
        packed: list[PackedRows], gradients: RowGradients, rows: RowRange | None
    ) -> list[PackedRows]:
        in_order = _sorted_gradients(gradients.as_row_updates())
        packed, in_order = read_before_write((packed, in_order))
        sweep = _Sweep(
            step=step,
            writer=writer,
            gradient_of=lambda start, size, _: in_order.of_block(start, size),
            rows=rows,
        )
        return _sweep_table(packed, sweep)[0]

    gradient = step.only_if_finite(gradient)
    table, *slots = gradient.fold(apply_round, [table, *slots_of(state)])
    return table, step.new_state(slots, step.new_values)


class _SortedGradients(NamedTuple):
    """The gradients of a round, sorted by row; padding of a whole chunk last.

    Attributes:
      row_ids: int32 `[n]`, rising.
      values: `[n, dim]`.
    """

    row_ids: Array
    values: Array

    def of_block(self, start: Any, size: int) -> tuple[Array, Array]:
        """Returns the dense gradient of a block of rows, and which it touches."""
        chunk = min(_CHUNK, self.row_ids.shape[0] // 2)
        end_row = start + size
        ends = jnp.asarray([start, end_row], jnp.int32)
        first, end = jnp.searchsorted(self.row_ids, ends).astype(jnp.int32)

        def add(carry):
            position, gradient, touches = carry
            ids, values = (
                jax.lax.dynamic_slice_in_dim(x, position, chunk)
                for x in (self.row_ids, self.values)
            )
            at = jnp.where(ids < end_row, ids - start, size)
            return (
                position + chunk,
                gradient.at[at].set(values, mode="drop", wrap_negative_indices=False),
                touches.at[at].set(1, mode="drop", wrap_negative_indices=False),
            )

        nothing = jnp.zeros((size, self.values.shape[1]), jnp.float32)
        carry = (first, nothing, jnp.zeros(size, jnp.int32))
        return jax.lax.while_loop(lambda carry: carry[0] < end, add, carry)[1:]


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
    """A run of a rule over all rows of a shard. It exists while a step is traced.

    Attributes:
      step: the step of the rule.
      writer: writes the rows of the table.
      gradient_of: returns the gradient of a block `[size, dim]` and the touches of its
        rows `[size]`, given its start and size, and its rows of the kept gradient.
      rows: rows that move; None: all.
    """

    step: RuleStep
    writer: TableWriter
    gradient_of: Callable[[Any, int, list[Array]], tuple[Array, Array]]
    rows: RowRange | None


def _sweep_table(
    packed: list[PackedRows], sweep: _Sweep
) -> tuple[list[PackedRows], list[Any]]:
    """Runs the rule block by block: the first block alone, all later ones in a loop.

    Args:
      packed: the table, its slot variables, and the kept gradient and touches, if any.
      sweep: what to run.

    Returns:
      The same, with all rows new; and the new values of the rule.
    """
    blocks = blocks_of([array.layout for array in packed])
    totals: list[Array] = []
    if sweep.step.probed.takes_totals:
        totals = find_totals(
            lambda block, all_reduce: _run_on_block(packed, block, all_reduce, sweep),
            blocks.first,
            lambda add_block, total: blocks.loop(
                lambda start, total: add_block(total, (start, blocks.size)), total
            ),
            across_shards(sweep.writer.stack),
        )
    packed, totals = read_before_write((packed, totals))

    def run(
        packed: list[PackedRows], block: tuple[Any, int]
    ) -> tuple[list[PackedRows], list[Any]]:
        return _run_on_block(packed, block, known_totals(totals), sweep)

    packed, new_values = run(packed, blocks.first)
    packed = blocks.loop(
        lambda start, packed: run(packed, (start, blocks.size))[0], packed
    )
    return packed, new_values


def _run_on_block(
    packed: list[PackedRows],
    block: tuple[Any, int],
    all_reduce: AllReduce,
    sweep: _Sweep,
) -> tuple[list[PackedRows], list[Any]]:
    """Runs the rule on rows `start` to `start + size`, and clears a kept gradient.

    Returns:
      The arrays, with the new rows of this block; and the new values of the rule.
    """
    start, size = block
    writer, num_slots = sweep.writer, len(sweep.step.probed.slots)
    rows, *others = (read_block(array, start, size) for array in packed)
    slots, kept = others[:num_slots], others[num_slots:]
    if writer.stack.optimizer.sets_rows:
        rows = jnp.zeros_like(rows)
    gradient, touches = sweep.gradient_of(start, size, kept)
    row_ids = start + jnp.arange(size, dtype=jnp.int32)
    known = writer.known_rows(row_ids, touches > 0, all_reduce)
    is_moved = known.is_used
    if sweep.rows is not None:
        is_moved &= (row_ids >= sweep.rows.first_row) & (row_ids < sweep.rows.end_row)
    updates, new_slots, new_values = sweep.step.run(gradient, rows, slots, known)
    updates = jnp.where(is_moved[:, None], updates, 0)
    new_rows = writer.stored_rows(row_ids, rows, updates)
    moved = [
        _where(is_moved, new, old) for new, old in zip(new_slots, slots, strict=True)
    ]
    cleared = [jnp.zeros_like(x) for x in kept]
    new, new_values = read_before_write(([new_rows, *moved, *cleared], new_values))
    written = [
        write_block(array, start, block)
        for array, block in zip(packed, new, strict=True)
    ]
    return written, new_values


def _where(condition: Array, new: Array, old: Array) -> Array:
    """Returns the new values of rows where a condition holds, and else the old ones."""
    return jnp.where(condition.reshape(-1, *[1] * (new.ndim - 1)), new, old)
