"""A kernel that reads rows, runs the rule on them and writes them."""

from typing import Any

import jax

from tpu_embedding.layout.packed_rows import PackedRows, can_update, update_packed
from tpu_embedding.lookup._merge import RowSums
from tpu_embedding.optimizers.kernel_rules import kernel_rule
from tpu_embedding.optimizers.row_optimizer import RowOptimizer
from tpu_embedding.update.lift import is_slot


def update_by_kernel(
    optimizer: RowOptimizer, table: PackedRows, state: Any, gradient: RowSums
) -> tuple[PackedRows, Any] | None:
    """Does what `lift_to_rows` does, in one kernel. Per shard; in place where donated.

    XLA writes what each step makes of the rows to memory: rows of slot variables, what
    is to be added to them, and to the table.

    Args:
      optimizer: the rule.
      table: rows of this shard.
      state: from `lift_to_rows(optimizer).init`.
      gradient: each row once.

    Returns:
      New table and state; None where no kernel can: not all of these are float32 rows
      of a size that kernels reach, or the rule is not one of `kernel_rule`.
    """
    leaves, tree = jax.tree.flatten(state, is_leaf=is_slot)
    arrays = [table, *filter(is_slot, leaves)]
    if not can_update(arrays):
        return None
    rule = kernel_rule(optimizer, table.layout.dim)
    if rule is None:
        return None
    numbers, leaves = rule.prepare([None if is_slot(x) else x for x in leaves])
    table, *slots = update_packed(
        rule.run, arrays, gradient.row_ids, gradient.values, numbers
    )
    remaining = iter(slots)
    new = [next(remaining) if leaf is None else leaf for leaf in leaves]
    return table, tree.unflatten(new)
