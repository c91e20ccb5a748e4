"""Stage 3, route: chooses the round and the buffer place of each unique id.

A round carries at most `capacity` ids from each shard to each owner. Rounds are exact
because an owner's rows are split into *ranges* that are equal for all source shards.
All requests for a row then travel in one round. So an owner can sum the gradients of a
row within its round, and an optimizer can finish a round before the next begins.

The range of a round ends before the first row that does not fit for some source. The
shards find it by one all-reduce (minimum) of an int32 per owner.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from tpu_embedding.lookup._dedup import (
    Dedup,
    broadcast_to_ids,
    count_below,
    key_at_rank,
    unsort,
)
from tpu_embedding.plan.capacity import RoundSize
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.stack_plan import StackPlan
from tpu_embedding.types import PADDING_ROW_ID


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class IdsByRow:
    """The ids of a shard, sorted by the row that they use. Per shard.

    Attributes:
      order: int32 `[ids]`, position of each id before sorting.
      places: int32 `[ids]`, place of its row in the row buffer of this round;
        `buffer_size` if the id is not part of the round.
    """

    order: Int[Array, " ids"]
    places: Int[Array, " ids"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """The requests of one shard in one round. Per shard.

    Attributes:
      places: int32 `[ids]`, place of each id's row in the buffer of fetched rows;
        `buffer_size` if the id is not part of this round.
      ids_by_row: the same places, sorted by row, for the backward pass.
      row_ids: int32 `[num_shards * bucket_size]`, requested rows as local rows of
        their owner, in one bucket per owner. Unused places hold `PADDING_ROW_ID`, and
        so does the last place.
      next_ranks: int32 `[num_shards]`, first rank per destination that is still
        pending after this round.
      end_row: int32 scalar, end of the range of this shard's own rows that this round
        covers. The range begins where that of the previous round ends.
      is_last: True if no shard has pending ids after this round; equal on all shards.
    """

    places: Int[Array, " ids"]
    ids_by_row: IdsByRow
    row_ids: Int[Array, " padded"]
    next_ranks: Int[Array, " shards"]
    end_row: Int[Array, ""]
    is_last: Bool[Array, ""]


@jax.named_scope("route")
def route(
    dedup: Dedup,
    first_ranks: Int[Array, " shards"],
    size: RoundSize,
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> Round:
    """Fills the exchange buffer of a round that may not be the last. Per shard.

    Args:
      dedup: the shard's unique ids.
      first_ranks: the first pending rank of each destination.
      size: buffer sizes of the round.
      stack: the stack's plan.
      plan: gives the mesh axes of the all-reduce.
    """
    end_ranks = dedup.first_ranks[1:]
    shards = jnp.arange(stack.num_shards, dtype=jnp.int32)
    first_pending_key = key_at_rank(first_ranks + size.capacity, dedup)
    first_pending_row = jnp.where(
        first_ranks + size.capacity < end_ranks,
        first_pending_key - shards * stack.rows_per_shard,
        stack.rows_per_shard,
    )
    # Over all axes: replicas of a shard take the same rows in a round.
    end_rows = jax.lax.pmin(first_pending_row, plan.sample_axes)
    next_ranks = count_below(shards * stack.rows_per_shard + end_rows, dedup)
    return _fill(
        dedup,
        first_ranks,
        next_ranks,
        end_rows[jax.lax.axis_index(stack.shard_axes)],
        jnp.all(end_rows == stack.rows_per_shard),
        size,
        stack,
    )


@jax.named_scope("route")
def route_all(dedup: Dedup, size: RoundSize, stack: StackPlan) -> Round:
    """Fills the exchange buffer of a batch that fits in one round. Per shard.

    It needs no all-reduce.
    """
    return _fill(
        dedup,
        dedup.first_ranks[:-1],
        dedup.first_ranks[1:],
        jnp.int32(stack.rows_per_shard),
        jnp.ones((), bool),
        size,
        stack,
    )


def _fill(
    dedup: Dedup,
    first_ranks: Int[Array, " shards"],
    next_ranks: Int[Array, " shards"],
    end_row: Int[Array, ""],
    is_last: Bool[Array, ""],
    size: RoundSize,
    stack: StackPlan,
) -> Round:
    rank_in_round = dedup.ranks - broadcast_to_ids(first_ranks, dedup)
    is_in_round = (
        (dedup.sorted_keys != PADDING_ROW_ID)
        & (rank_in_round >= 0)
        & (dedup.ranks < broadcast_to_ids(next_ranks, dedup))
    )
    destination = jax.lax.div(dedup.sorted_keys, jnp.int32(stack.rows_per_shard))
    row = dedup.sorted_keys - stack.rows_per_shard * destination
    places = size.bucket_size * destination + rank_in_round
    places = jnp.where(is_in_round, places, size.buffer_size)
    row_ids = jnp.full((size.buffer_size,), PADDING_ROW_ID, jnp.int32)
    row_ids = row_ids.at[places].set(row, mode="drop", wrap_negative_indices=False)
    return Round(
        places=unsort(places, dedup.order),
        ids_by_row=IdsByRow(order=dedup.order, places=places),
        row_ids=row_ids,
        next_ranks=next_ranks,
        end_row=end_row,
        is_last=is_last,
    )
