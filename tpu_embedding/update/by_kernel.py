"""Updates rows with one kernel that reads them, runs the rule and writes them back."""

from typing import Any

import jax

from tpu_embedding.optimizers.analysis.kernel_lowering import (
    LoweredRule,
    lower_to_kernel,
)
from tpu_embedding.optimizers.analysis.slots import moved_by_adding
from tpu_embedding.optimizers.row_optimizer import RowOptimizer
from tpu_embedding.rows.access import gather_rows, update_packed
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.rows.row_gradients import PackedRowGradients
from tpu_embedding.update.lazy_update import is_slot, move_rows


def update_by_kernel(
    optimizer: RowOptimizer,
    table: PackedRows,
    state: Any,
    gradients: PackedRowGradients,
) -> tuple[PackedRows, Any]:
    """Updates as `lift_to_rows` does, in one kernel. Per shard; in place where donated.

    XLA would write the result of each step to HBM: the rows of slot variables, and the
    differences to add to them and to the table. XLA still moves slot variables of one
    value per row: a kernel would write 4 of the 32 bytes that a SparseCore addresses.

    Args:
      optimizer: a rule that the plan lets a kernel run (`plan/backends.py`).
      table: rows of this shard.
      state: from `lift_to_rows(optimizer).init`.
      gradients: each row once.

    Returns:
      New table and state.
    """
    rule = lower_to_kernel(optimizer, table.layout.dim)
    assert isinstance(rule, LoweredRule)
    leaves, tree = jax.tree.flatten(state, is_leaf=is_slot)
    slots = [leaf for leaf in leaves if is_slot(leaf)]
    flat = [slot for slot in slots if slot.layout.is_flat]
    arrays = [table, *(slot for slot in slots if not slot.layout.is_flat)]
    scalars, new_leaves = rule.prepare([None if is_slot(x) else x for x in leaves])
    row_ids = gradients.row_ids
    old_row_scalars = [gather_rows(slot, row_ids).reshape(-1) for slot in flat]
    (new_table, *new_arrays), new_row_scalars = update_packed(
        rule.kernel_body, arrays, row_ids, gradients.values, scalars, old_row_scalars
    )
    remaining_arrays = iter(new_arrays)
    remaining_scalars = zip(old_row_scalars, new_row_scalars, strict=True)
    is_moved = moved_by_adding(optimizer, table.layout.dim)

    def new_leaf(leaf: Any, new: Any, by_adding: bool) -> Any:
        if not is_slot(leaf):
            return new
        if not leaf.layout.is_flat:
            return next(remaining_arrays)
        return move_rows(leaf, row_ids, *next(remaining_scalars), by_adding)

    new_leaves = map(new_leaf, leaves, new_leaves, is_moved)
    return new_table, tree.unflatten(new_leaves)
