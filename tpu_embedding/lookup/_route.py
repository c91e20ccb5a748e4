"""Stage 3: which unique ids travel in which round, and to which place.

A round carries at most `capacity` ids from each shard to each other. What makes rounds
exact is how they are cut: an owner's rows are split into *ranges*, the same for every
source, so that all requests for a row travel in one round. Then the rows of different
rounds are different, duplicates can be summed within a round, and an optimizer may
finish one round before the next. The range of a round ends before the first row that
does not fit for some source: one all-reduce (minimum) of an int32 per destination.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from tpu_embedding.layout.capacity import part_size
from tpu_embedding.layout.plan import EmbeddingPlan, StackPlan
from tpu_embedding.lookup._dedup import (
    Dedup,
    count_below,
    for_each_id,
    key_at_rank,
    unsort,
)
from tpu_embedding.types import PADDING_ROW_ID


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """What one shard sends in one round. Per shard.

    Attributes:
      places: int32 `[ids]`, for each id of the shard the place of its row in the
        exchange buffer, `destination * part_size(capacity) + place`; the buffer's
        size where the id is not part of this round.
      row_ids: int32 `[num_shards * part_size(capacity)]`, the exchange buffer: rows
        asked for, as local rows of their owner; padding where unused, and always in
        the last place.
      next_ranks: int32 `[num_shards]`, the first rank of each destination that
        remains.
      end_row: the first of this shard's own rows that no shard asks for yet; the
        round is about the rows from the previous round's on.
      is_last: whether no shard has anything left, equal on all shards.
    """

    places: Int[Array, " ids"]
    row_ids: Int[Array, " buffer"]
    next_ranks: Int[Array, " shards"]
    end_row: Int[Array, ""]
    is_last: Bool[Array, ""]


def fits_in_one_round(capacity: int, max_unique_ids: int, stack: StackPlan) -> bool:
    """Whether no batch of this shape can ever need a second round."""
    if stack.keeps_duplicates:
        return True
    return capacity >= min(max_unique_ids, stack.rows_per_shard)


def route(
    dedup: Dedup,
    first_ranks: Int[Array, " shards"],
    capacity: int,
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> Round:
    """Fills the exchange buffer of a round that may not be the last. Per shard.

    Args:
      dedup: the shard's unique ids.
      first_ranks: the first rank of each destination that has not travelled yet.
      capacity: ids per destination.
      stack: the stack's plan.
      plan: for the mesh axes of the all-reduce.
    """
    end_ranks = dedup.first_ranks[1:]
    shards = jnp.arange(stack.num_shards, dtype=jnp.int32)
    first_key_left = key_at_rank(first_ranks + capacity, dedup)
    first_row_left = jnp.where(
        first_ranks + capacity < end_ranks,
        first_key_left - shards * stack.rows_per_shard,
        stack.rows_per_shard,
    )
    end_rows = jax.lax.pmin(first_row_left, plan.axis_names)
    next_ranks = count_below(shards * stack.rows_per_shard + end_rows, dedup)
    return _fill(
        dedup,
        first_ranks,
        next_ranks,
        end_rows[jax.lax.axis_index(plan.axis_names)],
        jnp.all(end_rows == stack.rows_per_shard),
        capacity,
        stack,
    )


def route_all(dedup: Dedup, capacity: int, stack: StackPlan) -> Round:
    """Fills the exchange buffer where everything fits: no all-reduce. Per shard."""
    return _fill(
        dedup,
        dedup.first_ranks[:-1],
        dedup.first_ranks[1:],
        jnp.int32(stack.rows_per_shard),
        jnp.ones((), bool),
        capacity,
        stack,
    )


def _fill(
    dedup: Dedup,
    first_ranks: Int[Array, " shards"],
    next_ranks: Int[Array, " shards"],
    end_row: Int[Array, ""],
    is_last: Bool[Array, ""],
    capacity: int,
    stack: StackPlan,
) -> Round:
    size = part_size(capacity)
    buffer_size = stack.num_shards * size
    ranks_in_round = dedup.ranks - for_each_id(first_ranks, dedup)
    is_in_round = (
        (dedup.sorted_keys != PADDING_ROW_ID)
        & (ranks_in_round >= 0)
        & (dedup.ranks < for_each_id(next_ranks, dedup))
    )
    owners = dedup.sorted_keys // stack.rows_per_shard
    sorted_places = jnp.where(is_in_round, owners * size + ranks_in_round, buffer_size)
    row_ids = jnp.full((buffer_size,), PADDING_ROW_ID, jnp.int32)
    row_ids = row_ids.at[sorted_places].set(
        dedup.sorted_keys % stack.rows_per_shard,
        mode="drop",
        wrap_negative_indices=False,
    )
    return Round(
        places=unsort(sorted_places, dedup.order),
        row_ids=row_ids,
        next_ranks=next_ranks,
        end_row=end_row,
        is_last=is_last,
    )
