"""Stage 3: which unique ids travel in which round, and to which place.

A round carries at most `capacity` ids from each shard to each other. What makes rounds
exact is how they are cut: an owner's rows are split into *ranges*, the same for every
source, so that all requests for a row travel in one round. Then the rows of different
rounds are different, duplicates can be summed within a round, and an optimizer may
finish one round before the next. The range of a round ends before the first row that
does not fit for some source: one all-reduce (minimum) of an int32 per destination.

In a ragged exchange an owner also has room for no more rows than `received_rows`, from
all shards together. Where it is asked for more, all of them send it no more than an
equal share in this round: another all-reduce (sum) of an int32 per destination.
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
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.types import PADDING_ROW_ID


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class IdsByRow:
    """Which ids of a shard use each row that it fetches in a round. Per shard.

    Attributes:
      order: int32 `[ids]`, the ids sorted by row.
      places: int32 `[ids]`, the place of the row of each of these in the buffer of
        rows; `sent_rows` where the id is not part of the round.
    """

    order: Int[Array, " ids"]
    places: Int[Array, " ids"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """What one shard sends in one round. Per shard.

    Attributes:
      places: int32 `[ids]`, for each id of the shard the place of its row in the
        buffer of the rows it fetches; `sent_rows` where the id is not part of this
        round.
      ids_by_row: the inverse, for the backward pass.
      row_ids: int32 `[num_shards * bucket_size]`, rows asked for, as local
        rows of their owner, one bucket for each; padding where unused, and always in
        the last place.
      num_ids: int32 `[num_shards]`, how many go to each destination.
      next_ranks: int32 `[num_shards]`, the first rank of each destination that
        remains.
      end_row: the first of this shard's own rows that no shard asks for yet; the
        round is about the rows from the previous round's on.
      is_last: whether no shard has anything left, equal on all shards.
    """

    places: Int[Array, " ids"]
    ids_by_row: IdsByRow
    row_ids: Int[Array, " padded"]
    num_ids: Int[Array, " shards"]
    next_ranks: Int[Array, " shards"]
    end_row: Int[Array, ""]
    is_last: Bool[Array, ""]


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
      first_ranks: the first rank of each destination that has not travelled yet.
      size: of the round.
      stack: the stack's plan.
      plan: for the mesh axes of the all-reduce.
    """
    end_ranks = dedup.first_ranks[1:]
    capacity = _capacities(end_ranks - first_ranks, size, stack, plan)
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
        size,
        stack,
    )


def route_all(dedup: Dedup, size: RoundSize, stack: StackPlan) -> Round:
    """Fills the exchange buffer where everything fits: no all-reduce. Per shard."""
    return _fill(
        dedup,
        dedup.first_ranks[:-1],
        dedup.first_ranks[1:],
        jnp.int32(stack.rows_per_shard),
        jnp.ones((), bool),
        size,
        stack,
    )


def lines_of(num_rows: Int[Array, " shards"], size: RoundSize) -> Int[Array, " shards"]:
    """Returns the lines that so many rows take in a ragged exchange."""
    return (num_rows + size.rows_per_line - 1) // size.rows_per_line


def starts_of(sizes: Int[Array, " shards"]) -> Int[Array, " shards"]:
    """Returns where parts of these sizes begin, one after the other."""
    return jnp.cumsum(sizes, dtype=jnp.int32) - sizes


def _capacities(
    num_left: Int[Array, " shards"],
    size: RoundSize,
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> int | Int[Array, " shards"]:
    """Returns how many ids may go to each destination in this round."""
    if size.kind == "padded":
        return size.capacity
    asked = jax.lax.psum(lines_of(num_left, size), plan.axis_names)
    room = (size.received_rows - 1) // size.rows_per_line
    # The quotient is at least 1, for there is room for a line of each shard.
    share = min(size.capacity, room // stack.num_shards * size.rows_per_line)
    return jnp.where(asked <= room, size.capacity, share)


def _fill(
    dedup: Dedup,
    first_ranks: Int[Array, " shards"],
    next_ranks: Int[Array, " shards"],
    end_row: Int[Array, ""],
    is_last: Bool[Array, ""],
    size: RoundSize,
    stack: StackPlan,
) -> Round:
    num_places = stack.num_shards * size.bucket_size
    num_ids = next_ranks - first_ranks
    rank_in_round = dedup.ranks - broadcast_to_ids(first_ranks, dedup)
    is_in_round = (
        (dedup.sorted_keys != PADDING_ROW_ID)
        & (rank_in_round >= 0)
        & (dedup.ranks < broadcast_to_ids(next_ranks, dedup))
    )
    destination = jax.lax.div(dedup.sorted_keys, jnp.int32(stack.rows_per_shard))
    row = dedup.sorted_keys - stack.rows_per_shard * destination
    id_places = jnp.where(
        is_in_round, size.bucket_size * destination + rank_in_round, num_places
    )
    row_places = id_places
    if size.kind == "ragged":
        starts = size.rows_per_line * starts_of(lines_of(num_ids, size))
        row_places = rank_in_round + broadcast_to_ids(starts, dedup)
        row_places = jnp.where(is_in_round, row_places, size.sent_rows)
    row_ids = jnp.full((num_places,), PADDING_ROW_ID, jnp.int32)
    row_ids = row_ids.at[id_places].set(row, mode="drop", wrap_negative_indices=False)
    return Round(
        places=unsort(row_places, dedup.order),
        ids_by_row=IdsByRow(order=dedup.order, places=row_places),
        row_ids=row_ids,
        num_ids=num_ids,
        next_ranks=next_ranks,
        end_row=end_row,
        is_last=is_last,
    )
