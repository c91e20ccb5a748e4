"""Updates every row of a table, touched or not.

The rule runs over the table block by block, in place: once for each round of the
gradient, on the rows that the round covers.

A rule that asks for totals over the table, or runs once per several steps, must see the
gradient of all rounds. Its state keeps a dense gradient, a slot variable of the table's
size. Each step adds its gradient to it, and the pass over the table clears it.
"""

import dataclasses
import functools
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from tpu_embedding.optimizers.table_rows import AllReduce, table_rows_context
from tpu_embedding.plan.stack_plan import TrainedStackPlan
from tpu_embedding.rows.access import (
    add_to_rows,
    blocks_of,
    gather_lines,
    read_block,
    write_block,
)
from tpu_embedding.rows.packed_rows import PackedRows, full_rows
from tpu_embedding.rows.row_gradients import GradientRounds, RowGradients
from tpu_embedding.types import PADDING_ROW_ID, RowRange, RowUpdates
from tpu_embedding.update.lazy_update import (
    is_slot,
    lift_to_rows,
    slots_of,
    with_slots,
)
from tpu_embedding.update.table_writer import TableWriter
from tpu_embedding.update.tables_of_rows import tables_of_rows
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


def init_every_row(table: PackedRows, stack: TrainedStackPlan) -> Any:
    """Returns the state for a stacked table. Per shard."""

    def rows_of(row_ids):
        is_touched = jnp.zeros(row_ids.shape, bool)
        return tables_of_rows(row_ids, is_touched, across_shards(stack), stack)

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
    writer: TableWriter,
    rows: RowRange | None = None,
) -> tuple[PackedRows, KeptGradientState]:
    """Adds to the kept gradient, and runs the rule on every row when it is due.

    Per shard; in place where donated.

    Args:
      table: rows of this shard.
      state: from `init_every_row`.
      gradient: gradient of the step.
      writer: writes the rows of the table.
      rows: rows that move; None: all.
    """
    collected, touches = gradient.fold(_collect, (state.gradient, state.touches))
    leaves, tree = jax.tree.flatten(
        (table, state.inner, collected, touches), is_leaf=is_slot
    )
    sweep = _Sweep(tree=tree, writer=writer, rows=rows)
    step = state.step + 1
    num_steps = writer.stack.optimizer.gradient_steps
    if num_steps == 1:
        leaves = _run_on_all_rows(leaves, sweep)
    else:
        run = functools.partial(_run_on_all_rows, sweep=sweep)
        leaves = run_if(step >= num_steps, run, leaves)
    table, inner, collected, touches = tree.unflatten(leaves)
    return table, KeptGradientState(
        collected, touches, jnp.where(step >= num_steps, 0, step), inner
    )


def _collect(
    kept: tuple[PackedRows, PackedRows], gradients: RowGradients, rows: Any
) -> tuple[PackedRows, PackedRows]:
    """Adds the gradient of a round to the kept one, and counts the touches."""
    del rows
    gradient, touches = kept
    updates = gradients.as_row_updates()
    ones = jnp.ones(updates.row_ids.shape, jnp.int32)
    return (
        add_to_rows(gradient, updates.row_ids, updates.values),
        add_to_rows(touches, updates.row_ids, ones),
    )


def apply_round_to_every_row(
    table: PackedRows,
    state: Any,
    gradients: RowUpdates,
    rows: RowRange | None,
    writer: TableWriter,
) -> tuple[PackedRows, Any]:
    """Runs a rule that keeps no gradient on every row that a round covers.

    Per shard; in place where donated.

    Args:
      table: rows of this shard.
      state: from `lift_to_rows(stack.optimizer).init`.
      gradients: gradients of rows of the round.
      rows: rows that the round covers; None: all.
      writer: writes the rows of the table.
    """
    leaves, tree = jax.tree.flatten((table, state), is_leaf=is_slot)
    of_round = _sorted_gradients(gradients)
    leaves, of_round = read_before_write((leaves, of_round))
    sweep = _Sweep(tree=tree, writer=writer, of_round=of_round, rows=rows)
    return tree.unflatten(_run_on_all_rows(leaves, sweep))


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
      tree: structure of the table, the rule's state, and the kept gradient and touches,
        if there are any.
      writer: writes the rows of the table.
      of_round: gradients of a round; None: the kept gradient counts.
      rows: rows that move; None: all.
    """

    tree: Any
    writer: TableWriter
    of_round: _SortedGradients | None = None
    rows: RowRange | None = None


def _run_on_all_rows(leaves: list[Any], sweep: _Sweep) -> list[Any]:
    """Runs the rule block by block: the first block alone, the others in a loop."""
    run = functools.partial(_run_on_block, sweep=sweep)
    blocks = blocks_of([leaf.layout for leaf in leaves if is_slot(leaf)])

    def fold_rest(fold, carry):
        def fold_next(start, carry):
            return fold(carry, functools.partial(run, leaves, (start, blocks.size)))

        return blocks.loop(fold_next, carry)

    totals: list[Array] = []
    if sweep.writer.stack.optimizer.takes_totals:
        totals = find_totals(
            functools.partial(run, leaves, blocks.first),
            fold_rest,
            across_shards(sweep.writer.stack),
        )
    leaves, totals = read_before_write((leaves, totals))
    # Values that belong to no row advance once; every block must see the old ones.
    result = run(leaves, blocks.first, known_totals(totals))

    def run_next(start, slots):
        current = with_slots(leaves, slots)
        return slots_of(run(current, (start, blocks.size), known_totals(totals)))

    return with_slots(result, blocks.loop(run_next, slots_of(result)))


def _run_on_block(
    leaves: list[Any],
    block: tuple[Any, int],
    all_reduce: AllReduce,
    sweep: _Sweep,
) -> list[Any]:
    """Runs the rule on rows `start` to `start + size`, and clears a kept gradient.

    Returns:
      The leaves, with the new rows of this block.
    """
    (start, size), writer = block, sweep.writer
    optimizer = writer.stack.optimizer
    old = [read_block(leaf, start, size) if is_slot(leaf) else leaf for leaf in leaves]
    rows, inner, *kept = sweep.tree.unflatten(old)
    if optimizer.sets_rows:
        rows = jnp.zeros_like(rows)
    if sweep.of_round is not None:
        gradient, touches = sweep.of_round.of_block(start, size)
    else:
        gradient, touches = kept
    row_ids = start + jnp.arange(size, dtype=jnp.int32)
    known = writer.known_rows(row_ids, touches > 0, all_reduce)
    is_moved = known.is_used
    if sweep.rows is not None:
        is_moved &= (row_ids >= sweep.rows.first_row) & (row_ids < sweep.rows.end_row)
    with table_rows_context(known):
        updates, new_inner = optimizer.update(
            gradient / optimizer.gradient_steps, inner, rows
        )
    updates = jnp.where(is_moved[:, None], updates, 0)
    new_rows = writer.stored_rows(row_ids, rows, updates)
    # The leaves of the rule's state follow the table.
    slots = map(is_slot, leaves[1:])
    new_inner = jax.tree.map(
        lambda old, new: _where(is_moved, new, old) if next(slots) else new,
        inner,
        new_inner,
    )
    cleared = [jnp.zeros_like(x) for x in kept]
    new = read_before_write(sweep.tree.flatten_up_to((new_rows, new_inner, *cleared)))
    return [
        write_block(leaf, start, part) if is_slot(leaf) else part
        for leaf, part in zip(leaves, new, strict=True)
    ]


def _where(condition: Array, new: Array, old: Array) -> Array:
    """Returns the new values of rows where a condition holds, and else the old ones."""
    return jnp.where(condition.reshape(-1, *[1] * (new.ndim - 1)), new, old)
