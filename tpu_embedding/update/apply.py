"""Updates table and slot variables, in each of the ways a `RowOptimizer` names."""

from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from tpu_embedding.layout.packed_rows import PackedRows, add_to_rows, gather_rows
from tpu_embedding.optimizers.row_optimizer import RowOptimizer
from tpu_embedding.types import PADDING_ROW_ID, RowRange, RowUpdates
from tpu_embedding.update.lift import (
    is_slot,
    lift_to_rows,
    slots_of,
    with_slots,
)

_LINES_PER_BLOCK: Final = 8192
"""Lines that a pass over all rows takes at a time: 4 MiB of 128 float32 lanes."""


def apply_updates(
    optimizer: RowOptimizer,
    table: PackedRows,
    state: Any,
    gradient: RowUpdates,
    row_range: RowRange | None = None,
) -> tuple[PackedRows, Any]:
    """Applies a gradient by rows. Per shard; in place where donated.

    Args:
      optimizer: the rule.
      table: rows of this shard.
      state: from `lift_to_rows(optimizer).init`.
      gradient: of rows within the range.
      row_range: rows that the gradient is about, where it is not the only one of its
        step; None: all.

    Returns:
      New table and state.
    """
    if optimizer.rows == "every":
        return _apply_to_every_row(optimizer, table, state, gradient, row_range)
    if optimizer.duplicates == "sequence":
        return _apply_in_sequence(optimizer, table, state, gradient)
    return _apply_to_touched_rows(optimizer, table, state, gradient)


def _apply_to_touched_rows(
    optimizer: RowOptimizer, table: PackedRows, state: Any, gradient: RowUpdates
) -> tuple[PackedRows, Any]:
    rule: Any = lift_to_rows(optimizer)
    updates, state = rule.update(gradient, state, table)
    return add_to_rows(table, updates.row_ids, updates.values), state


def _apply_to_every_row(
    optimizer: RowOptimizer,
    table: PackedRows,
    state: Any,
    gradient: RowUpdates,
    row_range: RowRange | None,
) -> tuple[PackedRows, Any]:
    """Updates all rows with gradient zero, and corrects those that have one.

    The first is a pass over the lines as they lie in memory, so the rule must treat
    each element for itself. The correction is the difference between the rule's
    results with and without the gradient, computed from the old rows.
    """
    row_ids = gradient.row_ids
    leaves, tree = jax.tree.flatten((table, state), is_leaf=is_slot)
    old = [gather_rows(x, row_ids) if is_slot(x) else x for x in leaves]
    # The old rows must be read before the pass writes, or XLA copies the table.
    leaves, old = jax.lax.optimization_barrier((leaves, old))
    with_gradient = _step(optimizer, tree, old, gradient.values)
    without = _step(optimizer, tree, old, jnp.zeros_like(gradient.values))
    passed = iter(_pass_over_lines(optimizer, tree, leaves, row_range))
    return tree.unflatten(
        [
            add_to_rows(next(passed), row_ids, moved - unmoved)
            if is_slot(leaf)
            else moved
            for leaf, moved, unmoved in zip(leaves, with_gradient, without, strict=True)
        ]
    )


def _pass_over_lines(
    optimizer: RowOptimizer,
    tree: Any,
    leaves: list[Any],
    row_range: RowRange | None,
) -> list[PackedRows]:
    """Runs the rule with gradient zero on every row of a range.

    Block by block in a loop, whose updates of slices are in place on every platform;
    as one expression, XLA may compute a slot twice, once into a copy.
    """
    packed = [x for x in leaves if is_slot(x)]
    num_lines, lanes = packed[0].lines.shape
    block = min(num_lines, _LINES_PER_BLOCK)

    def run(i, lines):
        # The last block begins earlier than its turn, to be full.
        start = jnp.minimum(i * block, num_lines - block)
        old = jax.lax.optimization_barrier(
            [jax.lax.dynamic_slice_in_dim(x, start, block) for x in lines]
        )
        remaining = iter(old)
        dense = [next(remaining) if is_slot(x) else x for x in leaves]
        new = _step(optimizer, tree, dense, jnp.zeros((block, lanes), old[0].dtype))
        rows = _rows_of_lanes(packed[0], start, block)
        is_due = rows >= i * block * packed[0].layout.rows_per_line
        if row_range is not None:
            is_due &= (rows >= row_range.first_row) & (rows < row_range.end_row)
        new_slots = [x for x, leaf in zip(new, leaves, strict=True) if is_slot(leaf)]
        return [
            jax.lax.dynamic_update_slice_in_dim(
                whole, jnp.where(is_due, after, before), start, axis=0
            )
            for whole, after, before in zip(lines, new_slots, old, strict=True)
        ]

    num_blocks = -(-num_lines // block)
    lines = jax.lax.fori_loop(0, num_blocks, run, [x.lines for x in packed])
    return [
        PackedRows(lines=new, layout=x.layout)
        for new, x in zip(lines, packed, strict=True)
    ]


def _step(
    optimizer: RowOptimizer, tree: Any, leaves: list[Array], gradient: Array
) -> list[Array]:
    """Runs the rule on dense arrays; returns the new table and state as leaves."""
    rows, state = tree.unflatten(leaves)
    updates, state = optimizer.update(gradient, state, rows)
    return tree.flatten_up_to((rows + updates, state))


def _rows_of_lanes(
    packed: PackedRows, start: Int[Array, ""], num_lines: int
) -> Int[Array, "lines lanes"]:
    """Returns which row each lane of some lines belongs to."""
    layout = packed.layout
    shape = (num_lines, layout.lanes)
    line = start + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return line * layout.rows_per_line + lane // layout.dim


def _apply_in_sequence(
    optimizer: RowOptimizer, table: PackedRows, state: Any, gradient: RowUpdates
) -> tuple[PackedRows, Any]:
    """Runs the rule once per occurrence of a row, in the order of the samples.

    As many passes as the most frequent row has occurrences; what belongs to no row
    advances once.
    """
    occurrences = _occurrences(gradient.row_ids)
    is_used = gradient.row_ids != PADDING_ROW_ID
    num_passes = jnp.max(jnp.where(is_used, occurrences + 1, 0))

    def run(carry):
        done, table, slots = carry
        row_ids = jnp.where(occurrences == done, gradient.row_ids, PADDING_ROW_ID)
        table, new_state = _apply_to_touched_rows(
            optimizer,
            table,
            with_slots(state, slots),
            RowUpdates(row_ids=row_ids, values=gradient.values),
        )
        return done + 1, table, slots_of(new_state)

    _, table, slots = jax.lax.while_loop(
        lambda carry: carry[0] < num_passes,
        run,
        (jnp.int32(0), table, slots_of(state)),
    )
    # One step for the counts and the like, on no row at all.
    nothing = RowUpdates(
        row_ids=jnp.full((1,), PADDING_ROW_ID, jnp.int32),
        values=jnp.zeros((1, table.layout.dim), gradient.values.dtype),
    )
    table, state = _apply_to_touched_rows(
        optimizer, table, with_slots(state, slots), nothing
    )
    return table, state


def _occurrences(row_ids: Int[Array, " n"]) -> Int[Array, " n"]:
    """Counts, for each place, the equal ids before it."""
    places = jnp.arange(row_ids.shape[0], dtype=jnp.int32)
    sorted_ids, order = jax.lax.sort((row_ids, places), num_keys=1, is_stable=True)
    firsts = jnp.searchsorted(sorted_ids, sorted_ids, side="left").astype(jnp.int32)
    return jnp.zeros_like(places).at[order].set(places - firsts)
