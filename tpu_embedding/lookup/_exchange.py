"""Stage 4: the all-to-all between a shard and the owners of its rows.

Ids go out in parts of equal size. Rows and gradients go back and forth either in such
parts too, or, in a ragged exchange, one after the other without room between.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpu_embedding.config import QuantizationConfig
from tpu_embedding.lookup._route import Round, lines_of, starts_of
from tpu_embedding.plan.capacity import LANES, RoundSize
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.rows.access import gather_packed
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.types import PADDING_ROW_ID


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """Where the parts of a ragged buffer lie, in lines of it. Per shard.

    Attributes:
      starts: int32 `[num_shards]`, the first line of the part for, or of, each shard.
      sizes: int32 `[num_shards]`, its lines.
      remote_starts: int32 `[num_shards]`, where the same part begins in the buffer of
        the other shard.
    """

    starts: Int[Array, " shards"]
    sizes: Int[Array, " shards"]
    remote_starts: Int[Array, " shards"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedParts:
    """The parts of both buffers of a shard.

    Attributes:
      asked: what the shard asks the others for.
      received: what the others ask it for.
      sent_rows: places of the first buffer.
    """

    asked: Parts
    received: Parts
    sent_rows: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Requests:
    """What the shards ask one of them for in a round, and the way back. Per shard.

    Attributes:
      row_ids: int32 `[received_rows]`, local rows; padding where unused.
      parts: of a ragged exchange; None: all parts have the same size.
    """

    row_ids: Int[Array, " received"]
    parts: RaggedParts | None


def send_requests(current: Round, size: RoundSize, plan: EmbeddingPlan) -> Requests:
    """Asks the owners for the rows of a round, and learns what this shard is asked.

    Per shard.
    """
    row_ids = exchange(current.row_ids, plan)
    if size.kind == "padded":
        return Requests(row_ids=row_ids, parts=None)
    asked_sizes = lines_of(current.num_ids, size)
    asked_starts = starts_of(asked_sizes)
    facts = exchange(jnp.stack([asked_sizes, asked_starts], axis=1), plan)
    received_sizes, starts_at_source = facts[:, 0], facts[:, 1]
    received_starts = starts_of(received_sizes)
    return Requests(
        row_ids=_compact(row_ids, size),
        parts=RaggedParts(
            asked=Parts(
                starts=asked_starts,
                sizes=asked_sizes,
                remote_starts=exchange(received_starts, plan),
            ),
            received=Parts(
                starts=received_starts,
                sizes=received_sizes,
                remote_starts=starts_at_source,
            ),
            sent_rows=size.sent_rows,
        ),
    )


def fetch_rows(
    table: PackedRows, requests: Requests, stack: StackPlan, plan: EmbeddingPlan
) -> PackedRows:
    """Gathers the rows that were asked of this shard and sends them back. Per shard.

    Returns:
      The rows this shard asked for, float32, in the places where it asked. Places
      without a request hold anything.
    """
    rows = gather_packed(table, requests.row_ids)
    lines = rows.lines.astype(jnp.float32)
    if stack.quantization is not None:
        lines = quantize(lines, stack.quantization)
    rows = PackedRows(lines=lines, layout=rows.layout)
    parts = requests.parts
    if parts is None:
        return _exchange_padded(rows, plan)
    return _exchange_ragged(rows, parts.received, parts.asked, parts.sent_rows, plan)


def send_gradients(
    gradients: PackedRows, requests: Requests, plan: EmbeddingPlan
) -> PackedRows:
    """Sends the gradient of each row that was fetched to its owner. Per shard.

    Returns:
      The gradients in the places of `requests.row_ids`. Those of padding hold
      anything.
    """
    parts = requests.parts
    if parts is None:
        return _exchange_padded(gradients, plan)
    num_rows = requests.row_ids.shape[0]
    return _exchange_ragged(gradients, parts.asked, parts.received, num_rows, plan)


def exchange(buffer: Array, plan: EmbeddingPlan) -> Array:
    """Sends bucket `d` of the buffer to shard `d`; receives a bucket from each shard.

    Args:
      buffer: `[num_shards * bucket_size, ...]`, per shard.
      plan: for the mesh axes.

    Returns:
      The parts received, in the order of their senders; the same shape. Applied to
      what comes back, it returns answers to the places that the questions had.
    """
    if plan.num_shards == 1:
        return buffer
    shape = buffer.shape
    if buffer.ndim == 1 and buffer.size % (plan.num_shards * LANES) == 0:
        # On TPU an int32 array of this shape lies in memory as the flat one does.
        buffer = buffer.reshape(-1, LANES)
    received = jax.lax.all_to_all(
        buffer, plan.axis_names, split_axis=0, concat_axis=0, tiled=True
    )
    return received.reshape(shape)


def quantize(
    rows: Float[Array, "*shape"], config: QuantizationConfig
) -> Float[Array, "*shape"]:
    """Rounds each element to the nearest of the configured values."""
    step = (config.upper - config.lower) / (config.num_buckets - 1)
    clipped = jnp.clip(rows, config.lower, config.upper)
    return jnp.floor((clipped - config.lower) / step + 0.5) * step + config.lower


def _exchange_padded(rows: PackedRows, plan: EmbeddingPlan) -> PackedRows:
    """Sends parts of equal size, which fill lines. Per shard."""
    return PackedRows(lines=exchange(rows.lines, plan), layout=rows.layout)


def _exchange_ragged(
    rows: PackedRows,
    sent: Parts,
    received: Parts,
    num_rows: int,
    plan: EmbeddingPlan,
) -> PackedRows:
    """Moves the parts of one buffer to their places in the others'. Per shard."""
    layout = rows.layout.buffer_layout(num_rows)
    if not layout.is_flat:
        lines = _move_ragged(rows.lines, sent, received, layout.num_lines, plan)
        return PackedRows(lines=lines, layout=layout)
    lines = _move_ragged(rows.lines[:, None], sent, received, layout.num_lines, plan)
    return PackedRows(lines=lines[:, 0], layout=layout)


def _move_ragged(
    lines: Float[Array, "from lanes"],
    sent: Parts,
    received: Parts,
    num_places: int,
    plan: EmbeddingPlan,
) -> Float[Array, "to lanes"]:
    if plan.mesh.devices.flat[0].platform == "tpu":
        return jax.lax.ragged_all_to_all(
            lines,
            jax.lax.empty((num_places, lines.shape[1]), lines.dtype),
            sent.starts,
            sent.sizes,
            sent.remote_starts,
            received.sizes,
            axis_name=plan.axis_names,
        )
    # XLA has none for CPU: what it would do with the same facts of the senders, for
    # tests, not for speed.
    all_lines = jax.lax.all_gather(lines, plan.axis_names)
    facts = exchange(jnp.stack([sent.starts, sent.sizes, sent.remote_starts], 1), plan)
    starts, sizes, targets = facts.T
    offsets = jnp.arange(num_places, dtype=jnp.int32)[:, None] - targets[None, :]
    is_from = (offsets >= 0) & (offsets < sizes[None, :])
    source = jnp.argmax(is_from, axis=1)
    line = starts[source] + jnp.take_along_axis(offsets, source[:, None], axis=1)[:, 0]
    of_source = all_lines[source, jnp.clip(line, 0, lines.shape[0] - 1)]
    # What nobody sends may be anything; this value would show if it were used.
    return jnp.where(jnp.any(is_from, axis=1)[:, None], of_source, jnp.nan)


def _compact(
    row_ids: Int[Array, " padded"], size: RoundSize
) -> Int[Array, " received"]:
    """Moves padding to the end, but for what fills lines; cuts or fills up.

    The rest keeps its order. A sort, because a TPU scatters single integers slowly.
    """
    places = jnp.arange(row_ids.shape[0], dtype=jnp.int32)
    is_taken = row_ids != PADDING_ROW_ID
    for place in range(1, size.rows_per_line):
        is_first_used = jnp.roll(row_ids, place) != PADDING_ROW_ID
        is_taken |= is_first_used & (places % size.rows_per_line == place)
    keys = jnp.where(is_taken, places, row_ids.shape[0])
    _, row_ids = jax.lax.sort((keys, row_ids), num_keys=1, is_stable=False)
    missing = max(0, size.received_rows - row_ids.shape[0])
    filled = jnp.pad(row_ids, (0, missing), constant_values=PADDING_ROW_ID)
    return filled[: size.received_rows]
