"""Finds the tables that the rows of a shard belong to."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from tpu_embedding.optimizers.table_rows import AllReduce, TableRows
from tpu_embedding.plan.stack_plan import StackPlan


def tables_of_rows(
    row_ids: Int[Array, " rows"],
    is_touched: Bool[Array, " rows"],
    all_reduce: AllReduce,
    stack: StackPlan,
) -> TableRows:
    """Returns the facts that rules may ask about rows of a shard. Per shard.

    Args:
      row_ids: rows of this shard; ids beyond the last row are padding.
      is_touched: True for rows that this step looked up.
      all_reduce: reduces the totals of these rows over all parts.
      stack: the stack's plan.
    """
    is_used, of_stack = rows_of_stack(row_ids, stack)
    offsets = np.asarray([table.row_offset for table in stack.tables], np.int32)
    tables = None
    if len(offsets) > 1:
        tables = jnp.searchsorted(offsets, of_stack, side="right", method="compare_all")
        tables = tables.astype(jnp.int32) - 1
    sizes = [table.num_rows for table in stack.tables]
    return TableRows(
        table_sizes=jnp.asarray(sizes, jnp.float32),
        tables=tables,
        is_used=is_used & (of_stack < stack.num_rows),
        is_touched=is_touched,
        all_reduce=all_reduce,
    )


def rows_of_stack(
    row_ids: Int[Array, " rows"], stack: StackPlan
) -> tuple[Bool[Array, " rows"], Int[Array, " rows"]]:
    """Returns the rows of the stack that rows of this shard are. Per shard.

    Returns:
      False for padding, and the row within the stack; for padding, any row.
    """
    is_used = row_ids < stack.rows_per_shard
    shard = jax.lax.axis_index(stack.shard_axes)
    # The product of a padding id would overflow.
    local_ids = stack.layout.undealt(jnp.where(is_used, row_ids, 0))
    return is_used, local_ids * stack.num_shards + shard
