"""Stage 4: the all-to-all between a shard and the owners of its rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpu_embedding.config import QuantizationConfig
from tpu_embedding.layout.packed_rows import PackedRows, gather_rows
from tpu_embedding.layout.plan import EmbeddingPlan, StackPlan


def exchange(buffer: Array, plan: EmbeddingPlan) -> Array:
    """Sends part `d` of the buffer to shard `d`, and receives a part from each.

    Args:
      buffer: `[num_shards * capacity, ...]`, per shard.
      plan: for the mesh axes.

    Returns:
      The parts received, in the order of their senders; the same shape. Applied to
      what comes back, it returns answers to the places that the questions had.
    """
    if plan.num_shards == 1:
        return buffer
    return jax.lax.all_to_all(
        buffer, plan.axis_names, split_axis=0, concat_axis=0, tiled=True
    )


def fetch_rows(
    table: PackedRows,
    received_row_ids: Int[Array, " buffer"],
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> Float[Array, "buffer dim"]:
    """Gathers the rows that were asked of this shard and sends them back. Per shard.

    Returns:
      The rows this shard asked for, float32, in the places where it asked.
    """
    rows = gather_rows(table, received_row_ids).astype(jnp.float32)
    if stack.quantization is not None:
        rows = quantize(rows, stack.quantization)
    return exchange(rows, plan)


def quantize(
    rows: Float[Array, "rows dim"], config: QuantizationConfig
) -> Float[Array, "rows dim"]:
    """Rounds each element to the nearest of the configured values."""
    step = (config.upper - config.lower) / (config.num_buckets - 1)
    clipped = jnp.clip(rows, config.lower, config.upper)
    return jnp.floor((clipped - config.lower) / step + 0.5) * step + config.lower
