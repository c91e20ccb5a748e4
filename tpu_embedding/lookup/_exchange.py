"""Stage 4, exchange: the all-to-all between shards and the owners of their rows.

Ids travel in buckets of equal size, one per destination. Rows and gradients do the same
in a padded exchange. In a ragged exchange their buckets follow each other without
padding between them.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from tpu_embedding.config import QuantizationConfig
from tpu_embedding.lookup._route import Round, bucket_starts
from tpu_embedding.plan.capacity import LANES, RoundSize
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.stack_plan import StackPlan
from tpu_embedding.rows.access import gather_rows
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.types import PADDING_ROW_ID


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets:
    """The buckets of a ragged buffer, one per other shard. All in rows. Per shard.

    Attributes:
      starts: int32 `[num_shards]`, first row of each bucket.
      sizes: int32 `[num_shards]`, rows of each bucket.
      remote_starts: int32 `[num_shards]`, first row of the same bucket in the buffer
        of the other shard.
    """

    starts: Int[Array, " shards"]
    sizes: Int[Array, " shards"]
    remote_starts: Int[Array, " shards"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedBuckets:
    """The buckets of both row buffers of a shard in a ragged exchange. Per shard.

    Attributes:
      as_source: rows that this shard requests, one bucket per owner.
      as_owner: rows that are requested from this shard, one bucket per source.
      sent_rows: length, in rows, of the buffer of `as_source`.
    """

    as_source: Buckets
    as_owner: Buckets
    sent_rows: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Requests:
    """Rows that all shards request from this one in a round. Per shard.

    Attributes:
      row_ids: int32 `[received_rows]`, local rows; `PADDING_ROW_ID` in unused places.
      buckets: the buckets of a ragged exchange; None: all buckets have one size.
    """

    row_ids: Int[Array, " received"]
    buckets: RaggedBuckets | None


def send_requests(current: Round, size: RoundSize, stack: StackPlan) -> Requests:
    """Sends requests to owners, and returns those that this shard receives. Per shard.

    Args:
      current: the requests of this shard.
      size: buffer sizes of the round.
      stack: gives the mesh axes.
    """
    row_ids = exchange(current.row_ids, stack)
    if size.kind == "padded":
        return Requests(row_ids=row_ids, buckets=None)
    source_sizes = current.num_ids
    source_starts = bucket_starts(source_sizes)
    received = exchange(jnp.stack([source_sizes, source_starts], axis=1), stack)
    owner_sizes, starts_at_source = received[:, 0], received[:, 1]
    owner_starts = bucket_starts(owner_sizes)
    return Requests(
        row_ids=_compact(row_ids, size),
        buckets=RaggedBuckets(
            as_source=Buckets(
                starts=source_starts,
                sizes=source_sizes,
                remote_starts=exchange(owner_starts, stack),
            ),
            as_owner=Buckets(
                starts=owner_starts,
                sizes=owner_sizes,
                remote_starts=starts_at_source,
            ),
            sent_rows=size.sent_rows,
        ),
    )


def fetch_rows(
    table: PackedRows, requests: Requests, stack: StackPlan, plan: EmbeddingPlan
) -> Float[Array, "sent dim"]:
    """Gathers the rows requested from this shard and sends them back. Per shard.

    Returns:
      The rows that this shard requested, float32, in the places of its requests.
      Places without a request are undefined.
    """
    with jax.named_scope("gather"):
        rows = gather_rows(table, requests.row_ids)
        rows = _gathered_as_a_whole(rows, plan)
    # Rows of bfloat16 cross the network as such. The conversion is exact.
    is_short = table.layout.narrow_dtype == "bfloat16" and stack.num_shards > 1
    rows = rows.astype(jnp.bfloat16 if is_short else jnp.float32)
    buckets = requests.buckets
    if buckets is None:
        rows = exchange(rows, stack)
    else:
        rows = _exchange_ragged(
            rows, buckets.as_owner, buckets.as_source, buckets.sent_rows, stack, plan
        )
    return _quantized(rows.astype(jnp.float32), stack)


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


def send_gradients(
    gradients: Float[Array, "sent dim"],
    requests: Requests,
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> Float[Array, "received dim"]:
    """Sends the gradient of each fetched row to its owner. Per shard.

    Returns:
      The gradients in the places of `requests.row_ids`. Gradients of padding are
      undefined.
    """
    buckets = requests.buckets
    if buckets is None:
        return exchange(gradients, stack)
    num_rows = requests.row_ids.shape[0]
    return _exchange_ragged(
        gradients, buckets.as_source, buckets.as_owner, num_rows, stack, plan
    )


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


def _gathered_as_a_whole(rows: Array, plan: EmbeddingPlan) -> Array:
    """Keeps XLA:CPU from moving arithmetic on gathered rows into the exchange's slices.

    Without it, the copy of a row is no vector operation; see `rows/access.py`.
    """
    if plan.mesh.devices.flat[0].platform != "cpu":
        return rows
    return jax.lax.optimization_barrier(rows)


@jax.named_scope("exchange")
def _exchange_ragged(
    rows: Shaped[Array, "from dim"],
    sent: Buckets,
    received: Buckets,
    num_rows: int,
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> Shaped[Array, "to dim"]:
    """Sends the buckets of this shard's buffer to the other shards. Per shard.

    Args:
      rows: the buffer.
      sent: buckets of the buffer.
      received: the buckets of the result.
      num_rows: length of the result, in rows.
      stack: gives the mesh axes.
      plan: gives the platform.
    """
    if plan.mesh.devices.flat[0].platform == "tpu":
        return jax.lax.ragged_all_to_all(
            rows,
            jax.lax.empty((num_rows, rows.shape[1]), rows.dtype),
            sent.starts,
            sent.sizes,
            sent.remote_starts,
            received.sizes,
            axis_name=stack.shard_axes,
        )
    # XLA has no ragged all-to-all for CPU. This emulation gives the same result from
    # the senders' buckets. It is made for tests, not for speed.
    all_rows = jax.lax.all_gather(rows, stack.shard_axes)
    buckets = jnp.stack([sent.starts, sent.sizes, sent.remote_starts], axis=1)
    starts, sizes, targets = exchange(buckets, stack).T
    offsets = jnp.arange(num_rows, dtype=jnp.int32)[:, None] - targets[None, :]
    is_from = (offsets >= 0) & (offsets < sizes[None, :])
    source = jnp.argmax(is_from, axis=1)
    row = starts[source] + jnp.take_along_axis(offsets, source[:, None], axis=1)[:, 0]
    received_rows = all_rows[source, jnp.clip(row, 0, rows.shape[0] - 1)]
    # Rows that no shard sends are undefined. A NaN shows if one is used.
    undefined = jnp.asarray(jnp.nan, rows.dtype)
    return jnp.where(jnp.any(is_from, axis=1)[:, None], received_rows, undefined)


def _compact(
    row_ids: Int[Array, " padded"], size: RoundSize
) -> Int[Array, " received"]:
    """Moves padding to the end. Per shard.

    Row ids keep their order. The result has `received_rows` entries. It is found by a
    sort, because a TPU scatters single integers slowly.
    """
    places = jnp.arange(row_ids.shape[0], dtype=jnp.int32)
    keys = jnp.where(row_ids != PADDING_ROW_ID, places, row_ids.shape[0])
    _, row_ids = jax.lax.sort((keys, row_ids), num_keys=1, is_stable=False)
    missing = max(0, size.received_rows - row_ids.shape[0])
    filled = jnp.pad(row_ids, (0, missing), constant_values=PADDING_ROW_ID)
    return filled[: size.received_rows]
