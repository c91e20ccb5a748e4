"""A kernel that reads rows, runs the rule on them and writes them."""

from typing import Any

import jax
import jax.numpy as jnp

from tpu_embedding.lookup._merge import PackedRowGradients
from tpu_embedding.optimizers.analysis.kernel_lowering import lower_to_kernel
from tpu_embedding.optimizers.analysis.slots import moved_by_adding
from tpu_embedding.optimizers.row_optimizer import RowOptimizer
from tpu_embedding.rows.packed_rows import (
    PackedRows,
    can_update,
    gather_rows,
    update_packed,
)
from tpu_embedding.update.lift import is_slot, move_rows


def update_by_kernel(
    optimizer: RowOptimizer, table: PackedRows, state: Any, gradient: PackedRowGradients
) -> tuple[PackedRows, Any] | None:
    """Does what `lift_to_rows` does, in one kernel. Per shard; in place where donated.

    XLA writes what each step makes of the rows to memory: rows of slot variables, what
    is to be added to them, and to the table. (Slot variables of one value for each row
    XLA reads and moves as before: a kernel would have to write 4 bytes of 32.)

    Args:
      optimizer: the rule.
      table: rows of this shard.
      state: from `lift_to_rows(optimizer).init`.
      gradient: each row once.

    Returns:
      New table and state; None where no kernel can: not all of these are float32, of
      a size that kernels reach, or the rule is not one of `lower_to_kernel`.
    """
    if table.layout.runner is None:
        return None
    rule = lower_to_kernel(optimizer, table.layout.dim)
    if rule is None:
        return None
    leaves, tree = jax.tree.flatten(state, is_leaf=is_slot)
    slots = [leaf for leaf in leaves if is_slot(leaf)]
    flat = [slot for slot in slots if slot.layout.is_flat]
    arrays = [table, *(slot for slot in slots if not slot.layout.is_flat)]
    is_float = all(slot.lines.dtype == jnp.float32 for slot in flat)
    whole_rows = bool(flat) or rule.kernel_body.num_sums > 0
    if not is_float or not can_update(
        arrays, num_values=len(flat), whole_rows=whole_rows
    ):
        return None
    numbers, new_leaves = rule.prepare([None if is_slot(x) else x for x in leaves])
    row_ids = gradient.row_ids
    old_values = [gather_rows(slot, row_ids).reshape(-1) for slot in flat]
    (new_table, *new_arrays), new_values = update_packed(
        rule.kernel_body, arrays, row_ids, gradient.values, numbers, old_values
    )
    arrays_left = iter(new_arrays)
    values_left = zip(old_values, new_values, strict=True)
    is_moved = moved_by_adding(optimizer, table.layout.dim)

    def new_leaf(leaf: Any, new: Any, by_adding: bool) -> Any:
        if not is_slot(leaf):
            return new
        if not leaf.layout.is_flat:
            return next(arrays_left)
        return move_rows(leaf, row_ids, *next(values_left), by_adding)

    new_leaves = map(new_leaf, leaves, new_leaves, is_moved)
    return new_table, tree.unflatten(new_leaves)
