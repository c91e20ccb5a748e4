"""Updates every row of a table with an elementwise rule, in one pass over its lines."""

from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from tpu_embedding.optimizers.row_optimizer import RowOptimizer
from tpu_embedding.rows.access import add_to_rows, gather_rows
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.types import RowRange, RowUpdates
from tpu_embedding.update.lift import is_slot

_LINES_PER_BLOCK: Final = 8192
"""Lines per block of the pass: 4 MiB of 128 float32 lanes."""

_VALUES_PER_BLOCK: Final = 2**20
"""Rows per block, where rows are single values: 4 MiB of float32."""


def apply_to_every_element(
    optimizer: RowOptimizer,
    table: PackedRows,
    state: Any,
    gradient: RowUpdates,
    row_range: RowRange | None,
) -> tuple[PackedRows, Any]:
    """Updates all rows with gradient zero, then corrects the rows with a gradient.

    Per shard; in place where donated.

    The pass runs over lines as they lie in memory, so the rule must be elementwise.
    The correction is the difference between the rule's results with and without the
    gradient, computed from the old rows.

    Args:
      optimizer: the rule.
      table: rows of this shard.
      state: from `lift_to_rows(optimizer).init`.
      gradient: of rows within the range.
      row_range: rows that this round covers, if the step has several rounds; None: all.
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

    A loop over blocks updates slices in place on every platform. In one expression,
    XLA may compute a slot variable twice, once into a copy.
    """
    packed = [x for x in leaves if is_slot(x)]
    num_lines, *lanes = packed[0].lines.shape
    block = _VALUES_PER_BLOCK if packed[0].layout.is_flat else _LINES_PER_BLOCK
    block = min(num_lines, block)

    def run(i, lines):
        # The last block starts early enough to be full.
        start = jnp.minimum(i * block, num_lines - block)
        old = jax.lax.optimization_barrier(
            [jax.lax.dynamic_slice_in_dim(x, start, block) for x in lines]
        )
        remaining = iter(old)
        dense = [next(remaining) if is_slot(x) else x for x in leaves]
        new = _step(optimizer, tree, dense, jnp.zeros((block, *lanes), old[0].dtype))
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
    """Returns the new table and state, as leaves, of one run on dense arrays."""
    rows, state = tree.unflatten(leaves)
    updates, state = optimizer.update(gradient, state, rows)
    return tree.flatten_up_to((rows + updates, state))


def _rows_of_lanes(
    packed: PackedRows, start: Int[Array, ""], num_lines: int
) -> Int[Array, "lines *lanes"]:
    """Returns the row that each lane of some lines belongs to."""
    layout = packed.layout
    if layout.is_flat:
        return start + jnp.arange(num_lines, dtype=jnp.int32)
    shape = (num_lines, layout.lanes)
    line = start + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return line * layout.rows_per_line + lane // layout.dim
