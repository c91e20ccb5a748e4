"""Updates every row of a table with an elementwise rule, in one pass over its lines.

A narrow table and its slot variables differ in the rows that share a line, so its pass
runs over blocks of rows.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from tpu_embedding.optimizers.row_optimizer import RowOptimizer
from tpu_embedding.rows.access import (
    add_to_rows,
    gather_rows,
    replace_stored_rows,
    row_differences,
)
from tpu_embedding.rows.consecutive_rows import blocks_of, read_block, write_block
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.types import RowRange, RowUpdates
from tpu_embedding.update.lazy_update import is_slot
from tpu_embedding.update.table_writer import TableWriter

_LINES_PER_BLOCK: Final = 8192
"""Lines per block of the pass: 4 MiB of 128 float32 lanes."""

_VALUES_PER_BLOCK: Final = 2**20
"""Rows per block, where rows are single values: 4 MiB of float32."""


class _Rule(NamedTuple):
    """The rule, and the structure of its state."""

    optimizer: RowOptimizer
    tree: Any

    def run(self, rows: Array, state: Sequence[Array], gradient: Array) -> "_Step":
        """Runs the rule on dense arrays."""
        updates, new_state = self.optimizer.update(
            gradient, self.tree.unflatten(state), rows
        )
        return _Step(updates, self.tree.flatten_up_to(new_state))


class _Step(NamedTuple):
    """The updates of some rows, and the leaves of the new state."""

    updates: Array
    state: list[Array]


def apply_to_every_element(
    optimizer: RowOptimizer,
    table: PackedRows,
    state: Any,
    gradient: RowUpdates,
    row_range: RowRange | None,
    writer: TableWriter,
) -> tuple[PackedRows, Any]:
    """Updates all rows with gradient zero, then corrects the rows with a gradient.

    Per shard; in place where donated.

    The pass runs over lines as they lie in memory, so the rule must be elementwise.
    The correction is the difference between the rule's results with and without the
    gradient, computed from the old rows. Rows of a narrow table are replaced instead,
    so that they are rounded once.

    Args:
      optimizer: the rule.
      table: rows of this shard.
      state: from `lift_to_rows(optimizer).init`.
      gradient: gradient of rows within the range.
      row_range: rows that this round covers, if the step has several rounds; None: all.
      writer: writes the rows of the table.
    """
    row_ids = gradient.row_ids
    leaves, tree = jax.tree.flatten(state, is_leaf=is_slot)
    rule = _Rule(optimizer, tree)
    rows = gather_rows(table, row_ids)
    old = [gather_rows(x, row_ids) if is_slot(x) else x for x in leaves]
    # The old rows must be read before the pass writes, or XLA copies the table.
    table, leaves, rows, old = jax.lax.optimization_barrier((table, leaves, rows, old))
    with_gradient = rule.run(rows, old, gradient.values)
    without = rule.run(rows, old, jnp.zeros_like(gradient.values))
    if table.layout.narrow_dtype is None:
        table, *slots = _pass_over_lines(rule, table, leaves, row_range)
        moved, unmoved = rows + with_gradient.updates, rows + without.updates
        table = add_to_rows(table, row_ids, row_differences(unmoved, moved))
    else:
        table, *slots = _pass_over_rows(rule, table, leaves, row_range, writer)
        new_rows = writer.stored_rows(row_ids, rows, with_gradient.updates)
        table = replace_stored_rows(table, row_ids, new_rows)
    remaining = iter(slots)
    new_leaves = [
        add_to_rows(next(remaining), row_ids, row_differences(unmoved, moved))
        if is_slot(leaf)
        else moved
        for leaf, moved, unmoved in zip(
            leaves, with_gradient.state, without.state, strict=True
        )
    ]
    return table, tree.unflatten(new_leaves)


def _pass_over_lines(
    rule: _Rule, table: PackedRows, leaves: list[Any], row_range: RowRange | None
) -> list[PackedRows]:
    """Runs the rule with gradient zero on every row of a range.

    A loop over blocks updates slices in place on every platform. In one expression,
    XLA may compute a slot variable twice, once into a copy.

    Returns:
      The table and the slot variables.
    """
    packed = [table, *(x for x in leaves if is_slot(x))]
    num_lines, *lanes = table.layout.lines_shape
    block = _VALUES_PER_BLOCK if table.layout.is_flat else _LINES_PER_BLOCK
    block = min(num_lines, block)

    def run(i, lines):
        """Updates a block of lines."""
        # The last block starts early enough to be full.
        start = jnp.minimum(i * block, num_lines - block)
        old = jax.lax.optimization_barrier(
            [jax.lax.dynamic_slice_in_dim(x, start, block) for x in lines]
        )
        zeros = jnp.zeros((block, *lanes), old[0].dtype)
        step = rule.run(old[0], _with_slots(leaves, old[1:]), zeros)
        rows = _rows_of_lanes(table, start, block)
        is_due = rows >= i * block * table.layout.rows_per_line
        is_due &= _is_within(rows, row_range)
        new = [old[0] + step.updates, *_slots_of(leaves, step.state)]
        return [
            jax.lax.dynamic_update_slice_in_dim(
                whole, jnp.where(is_due, after, before), start, axis=0
            )
            for whole, after, before in zip(lines, new, old, strict=True)
        ]

    num_blocks = -(-num_lines // block)
    lines = jax.lax.fori_loop(0, num_blocks, run, [x.lines for x in packed])
    return [
        PackedRows(lines=new, layout=x.layout)
        for x, new in zip(packed, lines, strict=True)
    ]


def _pass_over_rows(
    rule: _Rule,
    table: PackedRows,
    leaves: list[Any],
    row_range: RowRange | None,
    writer: TableWriter,
) -> list[PackedRows]:
    """Runs the rule as `_pass_over_lines` does, on blocks of rows."""

    def run(start, num_rows, packed):
        table, *slots = packed
        old = [read_block(x, start, num_rows) for x in packed]
        rows, *old_slots = jax.lax.optimization_barrier(old)
        step = rule.run(rows, _with_slots(leaves, old_slots), jnp.zeros_like(rows))
        row_ids = start + jnp.arange(num_rows, dtype=jnp.int32)
        is_due = _is_within(row_ids, row_range)[:, None]
        # An update of zero leaves a row its bits.
        updates = jnp.where(is_due, step.updates, 0)
        new_rows = writer.stored_rows(row_ids, rows, updates)
        new_slots = [
            jnp.where(is_due, after, before)
            for after, before in zip(
                _slots_of(leaves, step.state), old_slots, strict=True
            )
        ]
        return [
            write_block(x, start, new)
            for x, new in zip((table, *slots), (new_rows, *new_slots), strict=True)
        ]

    packed = [table, *(x for x in leaves if is_slot(x))]
    blocks = blocks_of([x.layout for x in packed])
    packed = run(*blocks.first, packed)
    return blocks.loop(lambda start, packed: run(start, blocks.size, packed), packed)


def _with_slots(leaves: list[Any], slots: Sequence[Array]) -> list[Array]:
    remaining = iter(slots)
    return [next(remaining) if is_slot(leaf) else leaf for leaf in leaves]


def _slots_of(leaves: list[Any], state: list[Array]) -> list[Array]:
    return [new for new, leaf in zip(state, leaves, strict=True) if is_slot(leaf)]


def _is_within(
    rows: Int[Array, "*shape"], row_range: RowRange | None
) -> Bool[Array, "*shape"]:
    if row_range is None:
        return jnp.ones(rows.shape, bool)
    return (rows >= row_range.first_row) & (rows < row_range.end_row)


def _rows_of_lanes(
    packed: PackedRows, start: Int[Array, ""], num_lines: int
) -> Int[Array, "lines *lanes"]:
    """Returns the row that each lane of some lines belongs to."""
    layout = packed.layout
    if layout.is_flat:
        return start + jnp.arange(num_lines, dtype=jnp.int32)
    shape = (num_lines, *layout.lines_shape[1:])
    line = start + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return line * layout.rows_per_line + lane // layout.row_lanes
