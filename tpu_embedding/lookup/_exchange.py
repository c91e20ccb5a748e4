"""Stage 4, exchange: the all-to-all between shards and the owners of their rows.

Ids, rows and gradients travel in buckets of equal size, one per destination.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpu_embedding.config import QuantizationConfig
from tpu_embedding.plan.capacity import LANES
from tpu_embedding.plan.stack_plan import StackPlan
from tpu_embedding.rows.access import gather_rows
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.xla import computed_apart


def fetch_rows(
    table: PackedRows,
    row_ids: Int[Array, " buffer"],
    stack: StackPlan,
) -> Float[Array, "buffer dim"]:
    """Gathers the rows asked of this shard, and sends them back. Per shard.

    Args:
      table: this shard's rows.
      row_ids: requests of a `Round`.
      stack: plan of the stack.

    Returns:
      The rows that this shard asked for, float32, in the positions of its requests.
      Those without a request are undefined.
    """
    with jax.named_scope("gather"):
        rows = gather_rows(table, row_ids)
        rows = _gathered_as_a_whole(rows, stack)
    # Rows of bfloat16 cross the network as such. The conversion is exact.
    is_short = table.layout.narrow_dtype == "bfloat16" and stack.num_shards > 1
    rows = rows.astype(jnp.bfloat16 if is_short else jnp.float32)
    return _quantized(exchange(rows, stack).astype(jnp.float32), stack)


def read_local_rows(
    table: PackedRows, row_ids: Int[Array, " ids"], stack: StackPlan
) -> Float[Array, "ids dim"]:
    """Gathers rows that this device owns itself, without an exchange. Per shard.

    Returns:
      The rows, float32; zeros for ids beyond the last row.
    """
    rows = _quantized(gather_rows(table, row_ids).astype(jnp.float32), stack)
    is_row = row_ids < table.layout.num_rows
    return jnp.where(is_row[:, None], rows, 0.0)


@jax.named_scope("exchange")
def exchange(buffer: Array, stack: StackPlan) -> Array:
    """Sends bucket `d` of the buffer to shard `d`; receives a bucket from each shard.

    Args:
      buffer: `[num_shards * bucket_size, ...]`, per shard.
      stack: gives the mesh axes that rows are split over.

    Returns:
      The received buckets in the order of their senders, of the same shape. A second
      exchange moves every bucket back to where it came from.
    """
    if stack.num_shards == 1:
        return buffer
    shape = buffer.shape
    if buffer.ndim == 1 and buffer.size % (stack.num_shards * LANES) == 0:
        # On TPU, an int32 array of this shape has the memory layout of the flat one.
        buffer = buffer.reshape(-1, LANES)
    received = jax.lax.all_to_all(
        buffer, stack.shard_axes, split_axis=0, concat_axis=0, tiled=True
    )
    return received.reshape(shape)


def quantize(
    rows: Float[Array, "*shape"], config: QuantizationConfig
) -> Float[Array, "*shape"]:
    """Rounds each element to the nearest quantized value."""
    step = (config.upper - config.lower) / (config.num_buckets - 1)
    clipped = jnp.clip(rows, config.lower, config.upper)
    return jnp.floor((clipped - config.lower) / step + 0.5) * step + config.lower


def _quantized(
    rows: Float[Array, "rows dim"], stack: StackPlan
) -> Float[Array, "rows dim"]:
    return rows if stack.quantization is None else quantize(rows, stack.quantization)


def _gathered_as_a_whole(rows: Array, stack: StackPlan) -> Array:
    """Keeps arithmetic on gathered rows out of the exchange's slices on CPUs."""
    if stack.hardware.name != "cpu":
        return rows
    return computed_apart(rows)
