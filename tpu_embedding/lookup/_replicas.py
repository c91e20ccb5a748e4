"""Adds up the gradients of devices that hold equal copies of a shard. Per shard.

Each copy of a shard is asked for rows by its own group of devices. After this stage all
copies hold the same gradient, bit by bit: they sum the same values in the same order,
or take part in one all-reduce. So the copies stay equal after the update.

A GPU adds repeated rows in no fixed order, unless XLA is told to be deterministic.
There, only an all-reduce gives all copies the same bits.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from tpu_embedding.lookup._sum_by_row import merge
from tpu_embedding.optimizers.row_optimizer import InSequence
from tpu_embedding.plan.stack_plan import TrainedStackPlan
from tpu_embedding.rows.access import add_to_rows
from tpu_embedding.rows.packed_rows import (
    PackedRows,
    RowLayout,
    round_up,
    unpack_rows,
)
from tpu_embedding.rows.row_gradients import RowGradients
from tpu_embedding.types import PADDING_ROW_ID


def gather_from_replicas(
    received: RowGradients, stack: TrainedStackPlan
) -> RowGradients:
    """Returns the gradients that all copies of the shard received.

    Args:
      received: by this copy; rows may repeat.
      stack: plan of the stack.

    Returns:
      The gradients of all copies, one after the other; rows repeat. If the optimizer
      sees occurrences in sequence, they are in the order of their samples.
    """
    if stack.num_replicas == 1:
        return received

    def gather(buffer: Array) -> Array:
        buffers = jax.lax.all_gather(buffer, stack.replica_axes)
        if isinstance(stack.optimizer.driver, InSequence):
            return _in_sample_order(buffers, stack)
        return buffers.reshape(-1, *buffer.shape[1:])

    with jax.named_scope("replicas"):
        row_ids = gather(received.row_ids)
        values = gather(received.values)
    return RowGradients(row_ids=row_ids, values=values)


def add_dense_gradients(
    received: RowGradients, stack: TrainedStackPlan
) -> RowGradients:
    """Adds the gradients of all copies up by an all-reduce of a dense gradient.

    Its buffer has the size of the shard. An all-reduce of counts tells which rows were
    touched by any copy.

    Args:
      received: by this copy; rows may repeat.
      stack: plan of the stack.

    Returns:
      The sums of all rows of the shard; the ids of untouched rows are padding.
    """
    if stack.num_shards > 1:
        received = merge(received.row_ids, received.values, stack.rows_per_shard)
    updates = received.as_row_updates()
    num_rows = round_up(stack.rows_per_shard, stack.layout.rows_per_line)
    # In lines, as the table: XLA:TPU would pad narrow rows to 128 lanes each.
    layout = RowLayout(
        num_rows=num_rows,
        row_shape=stack.layout.row_shape,
        line_lanes=stack.layout.line_lanes,
    )
    sums = add_to_rows(_zeros(layout, jnp.float32), updates.row_ids, updates.values)
    counts = add_to_rows(
        _zeros(RowLayout(num_rows=num_rows, row_shape=()), jnp.int32),
        updates.row_ids,
        jnp.ones(updates.row_ids.shape, jnp.int32),
    )
    with jax.named_scope("replicas"):
        lines, touches = jax.lax.psum((sums.lines, counts.lines), stack.replica_axes)
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    return RowGradients(
        row_ids=jnp.where(touches > 0, rows, PADDING_ROW_ID),
        values=unpack_rows(PackedRows(lines=lines, layout=layout)),
    )


def _zeros(layout: RowLayout, dtype) -> PackedRows:
    return PackedRows(lines=jnp.zeros(layout.lines_shape, dtype), layout=layout)


def _in_sample_order(buffers: Array, stack: TrainedStackPlan) -> Array:
    """Sorts the buckets of all copies by the device of their samples, and joins them.

    Args:
      buffers: `[num_replicas, num_shards * bucket, ...]`, in equal buckets.
      stack: plan of the stack.
    """
    axes = (*stack.replica_axes, *stack.shard_axes)
    sizes = [jax.lax.axis_size(axis) for axis in axes]
    rest = buffers.shape[2:]
    buckets = buffers.reshape(*sizes, -1, *rest)
    order = [axes.index(axis) for axis in stack.sample_axes]
    trailing = range(len(axes), buckets.ndim)
    return buckets.transpose(*order, *trailing).reshape(-1, *rest)
