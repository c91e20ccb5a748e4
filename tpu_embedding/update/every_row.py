"""Updates every row of a table with a rule that sees whole rows, or all rows.

The state keeps a dense gradient, a slot variable of the table's size. Each step adds
its gradient to it. Then the rule runs over the table block by block, in place, and the
kept gradient is cleared. So the rule sees every row, touched or not, and may run once
per several steps.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from tpu_embedding.optimizers.table_rows import AllReduce, table_rows_context
from tpu_embedding.plan.plan import EmbeddingPlan, TrainedStackPlan
from tpu_embedding.rows.access import add_to_rows
from tpu_embedding.rows.packed_rows import (
    PackedRows,
    RowLayout,
    pack_rows,
    round_up,
    unpack_rows,
)
from tpu_embedding.rows.row_gradients import GradientRounds, PackedRowGradients
from tpu_embedding.update.lift import is_slot, lift_to_rows
from tpu_embedding.update.shard_rows import shard_rows
from tpu_embedding.update.totals import across_shards, find_totals, known_totals

Carry = TypeVar("Carry")

_ROWS_PER_BLOCK: Final = 8192
"""Approximate number of rows per block of the pass: 4 MiB of 128 float32 lanes."""


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
        return shard_rows(row_ids, is_touched, across_shards(plan), stack, plan)

    takes_totals = stack.optimizer.takes_totals
    rule: Any = lift_to_rows(stack.optimizer, rows_of if takes_totals else None)
    touches = jnp.zeros(table.layout.num_rows, jnp.int32)
    return KeptGradientState(
        gradient=jax.tree.map(jnp.zeros_like, table),
        touches=pack_rows(touches, _touches_layout(table)),
        step=jnp.zeros((), jnp.int32),
        inner=rule.init(table),
    )


def _touches_layout(table: PackedRows) -> RowLayout:
    return table.layout.slot_layout(jax.ShapeDtypeStruct((), jnp.int32))


def apply_to_every_row(
    table: PackedRows,
    state: KeptGradientState,
    gradient: GradientRounds,
    stack: TrainedStackPlan,
    plan: EmbeddingPlan,
) -> tuple[PackedRows, KeptGradientState]:
    """Adds to the kept gradient, and runs the rule on every row when it is due.

    Per shard; in place where donated.
    """
    collected, touches = _collect(state, gradient, stack, plan)
    leaves, tree = jax.tree.flatten(
        (table, collected, touches, state.inner), is_leaf=is_slot
    )
    run = functools.partial(_run_on_all_rows, tree=tree, stack=stack, plan=plan)
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

    def add(kept, gradients: PackedRowGradients, rows=None):
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
    leaves: list[Any], *, tree: Any, stack: TrainedStackPlan, plan: EmbeddingPlan
) -> list[Any]:
    """Runs the rule block by block: the first block alone, the others in a loop."""
    run = functools.partial(_run_on_block, tree=tree, stack=stack, plan=plan)
    layouts = [leaf.layout for leaf in leaves if is_slot(leaf)]
    alignment = math.lcm(*(layout.rows_per_line for layout in layouts))
    size = round_up(_ROWS_PER_BLOCK, alignment)
    num_full, rest = divmod(layouts[0].num_rows, size)
    first = (num_full * size, rest) if rest else (0, size)
    others = (0, num_full) if rest else (1, num_full)

    def fold_rest(fold, carry):
        return _loop(
            *others,
            lambda i, carry: fold(
                carry, functools.partial(run, leaves, (i * size, size))
            ),
            carry,
        )

    totals: list[Array] = []
    if stack.optimizer.takes_totals:
        totals = find_totals(
            functools.partial(run, leaves, first), fold_rest, across_shards(plan)
        )
    # All rows are read for the totals before any is written, or XLA copies the table.
    leaves, totals = jax.lax.optimization_barrier((leaves, totals))
    # Values that belong to no row advance once; every block must see the old ones.
    result = run(leaves, first, known_totals(totals))
    slots = [leaf for leaf in result if is_slot(leaf)]

    def run_next(i, slots):
        remaining = iter(slots)
        current = [next(remaining) if is_slot(leaf) else leaf for leaf in leaves]
        new = run(current, (i * size, size), known_totals(totals))
        return [leaf for leaf in new if is_slot(leaf)]

    remaining = iter(_loop(*others, run_next, slots))
    return [next(remaining) if is_slot(leaf) else leaf for leaf in result]


def _run_on_block(
    leaves: list[Any],
    block: tuple[Any, int],
    all_reduce: AllReduce,
    *,
    tree: Any,
    stack: TrainedStackPlan,
    plan: EmbeddingPlan,
) -> list[Any]:
    """Runs the rule on rows `start` to `start + size`, and clears their gradient.

    Returns:
      The leaves, with the new rows of this block.
    """
    start, size = block
    old = [_cut(leaf, start, size) if is_slot(leaf) else leaf for leaf in leaves]
    rows, gradient, touches, inner = tree.unflatten(old)
    row_ids = start + jnp.arange(size, dtype=jnp.int32)
    known = shard_rows(row_ids, touches > 0, all_reduce, stack, plan)
    with table_rows_context(known):
        updates, inner = stack.optimizer.update(
            gradient / stack.optimizer.gradient_steps, inner, rows
        )
    updates = jnp.where(known.is_used[:, None], updates, 0)
    cleared = jnp.zeros_like(gradient), jnp.zeros_like(touches)
    new = tree.flatten_up_to((rows + updates, *cleared, inner))
    # The block is read before it is written.
    new = jax.lax.optimization_barrier(new)
    return [
        _paste(leaf, start, part) if is_slot(leaf) else part
        for leaf, part in zip(leaves, new, strict=True)
    ]


def _loop(
    start: int, end: int, body: Callable[[Any, Carry], Carry], carry: Carry
) -> Carry:
    """Runs a `fori_loop`, and does not trace its body if it has no turn."""
    return jax.lax.fori_loop(start, end, body, carry) if start < end else carry


def _cut(packed: PackedRows, start: Any, size: int) -> Array:
    """Returns rows `start` to `start + size`; a line must begin at `start`."""
    layout = dataclasses.replace(packed.layout, num_rows=size, num_spare_rows=0)
    first_line = start // layout.rows_per_line
    lines = jax.lax.dynamic_slice_in_dim(packed.lines, first_line, layout.num_lines)
    return unpack_rows(PackedRows(lines=lines, layout=layout))


def _paste(packed: PackedRows, start: Any, rows: Array) -> PackedRows:
    layout = dataclasses.replace(
        packed.layout, num_rows=rows.shape[0], num_spare_rows=0
    )
    lines = jax.lax.dynamic_update_slice_in_dim(
        packed.lines,
        pack_rows(rows, layout).lines,
        start // layout.rows_per_line,
        axis=0,
    )
    return PackedRows(lines=lines, layout=packed.layout)
