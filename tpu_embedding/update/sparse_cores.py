"""Updates a stacked table on SparseCores. Per shard.

One operation of XLA sends the gradients of samples to the owners of their rows, sums
them by row, and applies the optimizer's rule to table and slot variables, in place. If
the ids of the step are beyond its limit, the update of `apply.py` runs instead.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float

from tpu_embedding.optimizers.probe import rates_are_finite
from tpu_embedding.plan.stack_backend import rule_on_sparse_cores
from tpu_embedding.plan.stack_plan import TrainedStackPlan
from tpu_embedding.rows.packed_rows import PackedRows, rows_of_lines
from tpu_embedding.sparse_core import operations
from tpu_embedding.sparse_core.limits import SparseCoreIds
from tpu_embedding.update.lazy_update import (
    slots_of,
    values_of,
    with_slots,
    with_values,
)

UpdateRows = Callable[[PackedRows, Any], tuple[PackedRows, Any]]
"""Maps table and state to new ones."""


def apply_on_sparse_cores(
    table: PackedRows,
    state: Any,
    ids: SparseCoreIds,
    gradients: Float[Array, "samples width"],
    otherwise: UpdateRows,
    stack: TrainedStackPlan,
) -> tuple[PackedRows, Any]:
    """Updates a stacked table by one operation. Per shard; in place where donated.

    Args:
      table: rows of this shard.
      state: the optimizer's state.
      ids: ids of the samples.
      gradients: cotangents of the samples, in the order of `ids`.
      otherwise: the update of steps whose ids are beyond the limits, and of those whose
        learning rate is not finite.
      stack: plan of the stack.

    Returns:
      New table and state.
    """
    rule = rule_on_sparse_cores(stack.optimizer, stack.dim)

    def update_rows(table: PackedRows, state: Any) -> tuple[PackedRows, Any]:
        arrays = [table, *slots_of(state)]
        hyperparameters, new_values = rule.values(values_of(state))
        new = operations.update(
            ids.ids,
            gradients,
            tuple(rows_of_lines(x.lines, x.layout) for x in arrays),
            hyperparameters,
            rule,
            ids.sizes,
        )
        table, *slots = (
            dataclasses.replace(x, lines=rows.reshape(x.lines.shape))
            for x, rows in zip(arrays, new, strict=True)
        )
        return table, with_values(with_slots(state, slots), new_values)

    (may_run,) = ids.fits
    is_finite = rates_are_finite(stack.optimizer, stack.dim, values_of(state))
    if is_finite is not None:
        may_run &= is_finite
    return jax.lax.cond(may_run, update_rows, otherwise, table, state)
