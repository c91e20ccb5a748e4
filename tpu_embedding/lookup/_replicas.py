"""Adds up the gradients of devices that hold equal copies of a shard. Per shard.

Each copy of a shard is asked for rows by its own group of devices. After this stage all
copies hold the same gradients, and sum them in the same order. So they stay equal bit
by bit after the update.

A GPU adds repeated rows in no fixed order, unless XLA is told to be deterministic.
"""

import jax
from jaxtyping import Array

from tpu_embedding.optimizers.row_optimizer import InSequence
from tpu_embedding.plan.stack_plan import TrainedStackPlan
from tpu_embedding.rows.row_gradients import RowGradients


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
