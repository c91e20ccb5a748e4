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

from tpu_embedding.layout.plan import EmbeddingPlan, StackPlan
from tpu_embedding.lookup._dedup import Dedup, count_below, key_at_rank, unsort
from tpu_embedding.types import PADDING_ROW_ID


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """What one shard sends in one round. Per shard.

    Attributes:
      places: int32 `[ids]`, for each id of the shard the place of its row in the
        exchange buffer, `destination * capacity + place`; the buffer's size where
        the id is not part of this round.
      row_ids: int32 `[num_shards * capacity]`, the exchange buffer: rows asked for,
        as local rows of their owner; padding where unused.
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
    buffer_size = stack.num_shards * capacity
    owners = dedup.sorted_keys // stack.rows_per_shard
    ranks_in_round = dedup.ranks - _of_owner(first_ranks, owners)
    is_in_round = (
        (dedup.sorted_keys != PADDING_ROW_ID)
        & (ranks_in_round >= 0)
        & (dedup.ranks < _of_owner(next_ranks, owners))
    )
    sorted_places = jnp.where(
        is_in_round, owners * capacity + ranks_in_round, buffer_size
    )
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


def _of_owner(
    values: Int[Array, " shards"], owners: Int[Array, " ids"]
) -> Int[Array, " ids"]:
    """Looks up a value per owner; padding, whose owner is no shard, reads any."""
    return values.at[owners].get(mode="clip", wrap_negative_indices=False)
