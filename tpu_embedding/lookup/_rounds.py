"""Stage 3, rounds: which ids travel when, and the requests that reach the owners.

A round carries at most `capacity` ids from each shard to each owner. Rounds are exact
because an owner's rows are split into *ranges* that are equal for all source shards.
All requests for a row then travel in one round. So an owner can sum the gradients of a
row within its round, and an optimizer can finish a round before the next begins.

The range of a round ends before the first row that does not fit for some source. The
shards find it by one all-reduce (minimum) of an int32 per owner.

`send_ids` sends the first round, and its callers run it as straight-line code. Later
rounds exist only under skew. `fold_later_rounds` is the only loop: the forward pass
folds "fetch, combine" over it, an update "spread, send, merge, apply the rule". All
shards agree on when to stop.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from tpu_embedding.lookup._dedup import (
    Dedup,
    broadcast_to_ids,
    count_below,
    dedup,
    key_at_rank,
    unsort,
)
from tpu_embedding.lookup._exchange import exchange
from tpu_embedding.plan.capacity import RoundSize
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.stack_plan import StackPlan
from tpu_embedding.types import PADDING_ROW_ID

Carry = TypeVar("Carry")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """The requests of one round, at the shard that asks and at the owner. Per shard.

    Attributes:
      sorted_places: int32 `[ids]`, place of the row of each sorted id in the buffer of
        fetched rows; beyond its end if the id is not part of this round.
      row_ids: int32 `[buffer_size]`, the rows that all shards ask of this
        one, as local rows, in one bucket per shard. Unused places hold
        `PADDING_ROW_ID`, and so does the last place.
      next_ranks: int32 `[num_shards]`, first rank per destination that is still
        pending after this round.
      end_row: int32 `[1]`, end of the range of this shard's own rows that this round
        covers. The range begins where that of the previous round ends.
      is_pending: bool `[1]`, True if some shard has pending ids after this round. In a
        gradient of zeros it is False: no further round runs.
    """

    sorted_places: Int[Array, " ids"]
    row_ids: Int[Array, " buffer"]
    next_ranks: Int[Array, " shards"]
    end_row: Int[Array, "_"]
    is_pending: Bool[Array, "_"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SentIds:
    """The ids of a batch, of which the first round is at the owners. Per shard.

    Attributes:
      unique: the unique ids of the shard.
      first: the first round.
      size: buffer sizes of each round.
    """

    unique: Dedup
    first: Round
    size: RoundSize = dataclasses.field(metadata={"static": True})

    def places(self, current: Round) -> Int[Array, " ids"]:
        """Returns the place of each id's row in the buffer of a round."""
        return unsort(current.sorted_places, self.unique.order)


def send_ids(
    keys: Int[Array, " ids"], max_unique_ids: int, stack: StackPlan, plan: EmbeddingPlan
) -> SentIds:
    """Sends the unique ids of the first round to the owners of their rows. Per shard.

    Args:
      keys: keys of all features; see `_flatten_to_owners.py`.
      max_unique_ids: upper bound on the unique ids of a shard.
      stack: plan of the stack.
      plan: gives the mesh.
    """
    size = stack.round_size(max_unique_ids)
    unique = dedup(keys, stack)
    first_ranks, end_ranks = unique.first_ranks[:-1], unique.first_ranks[1:]
    if not size.holds_all:
        return SentIds(
            unique=unique,
            first=_next_round(unique, first_ranks, size, stack, plan),
            size=size,
        )
    # No batch of this shape needs a second round, so there is no range to agree on.
    sorted_places, row_ids = _fill(unique, first_ranks, end_ranks, size, stack)
    first = Round(
        sorted_places=sorted_places,
        row_ids=row_ids,
        next_ranks=end_ranks,
        end_row=jnp.full((1,), stack.rows_per_shard, jnp.int32),
        is_pending=jnp.zeros((1,), bool),
    )
    return SentIds(unique=unique, first=first, size=size)


def fold_later_rounds(
    body: Callable[[Carry, Round], Carry],
    carry: Carry,
    ids: SentIds,
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> tuple[Carry, Int[Array, ""]]:
    """Folds `carry = body(carry, round)` over the rounds after the first. Per shard.

    Args:
      body: what is done in a round.
      carry: first value, which the caller made of the first round, `ids.first`.
      ids: from `send_ids`.
      stack: plan of the stack.
      plan: gives the mesh.

    Returns:
      The last carry, and the number of rounds, the first one included.
    """
    if ids.size.holds_all:
        return carry, jnp.int32(1)

    def run(state):
        carry, next_ranks, _, rounds = state
        current = _next_round(ids.unique, next_ranks, ids.size, stack, plan)
        carry = body(carry, current)
        return carry, current.next_ranks, current.is_pending, rounds + 1

    carry, _, _, rounds = jax.lax.while_loop(
        lambda state: state[2][0],
        run,
        (carry, ids.first.next_ranks, ids.first.is_pending, jnp.int32(1)),
    )
    return carry, rounds


@jax.named_scope("route")
def _next_round(
    unique: Dedup,
    first_ranks: Int[Array, " shards"],
    size: RoundSize,
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> Round:
    """Sends the requests of a round that may not be the last. Per shard.

    Args:
      unique: the shard's unique ids.
      first_ranks: the first pending rank of each destination.
      size: buffer sizes of the round.
      stack: the stack's plan.
      plan: gives the mesh axes of the all-reduce.
    """
    end_ranks = unique.first_ranks[1:]
    shards = jnp.arange(stack.num_shards, dtype=jnp.int32)
    cut = first_ranks + size.capacity
    first_pending_row = jnp.where(
        cut < end_ranks,
        key_at_rank(cut, unique) - shards * stack.rows_per_shard,
        stack.rows_per_shard,
    )
    # Over all axes: replicas of a shard take the same rows in a round.
    end_rows = jax.lax.pmin(first_pending_row, plan.sample_axes)
    next_ranks = count_below(shards * stack.rows_per_shard + end_rows, unique)
    sorted_places, row_ids = _fill(unique, first_ranks, next_ranks, size, stack)
    return Round(
        sorted_places=sorted_places,
        row_ids=row_ids,
        next_ranks=next_ranks,
        end_row=end_rows[jax.lax.axis_index(stack.shard_axes)][None],
        is_pending=jnp.any(end_rows != stack.rows_per_shard)[None],
    )


@jax.named_scope("route")
def _fill(
    unique: Dedup,
    first_ranks: Int[Array, " shards"],
    next_ranks: Int[Array, " shards"],
    size: RoundSize,
    stack: StackPlan,
) -> tuple[Int[Array, " ids"], Int[Array, " buffer"]]:
    """Fills the buffer of requests with a range of ranks, and exchanges it. Per shard.

    Returns:
      `Round.sorted_places` and `Round.row_ids`.
    """
    rank_in_round = unique.ranks - broadcast_to_ids(first_ranks, unique)
    is_in_round = (
        (unique.sorted_keys != PADDING_ROW_ID)
        & (rank_in_round >= 0)
        & (unique.ranks < broadcast_to_ids(next_ranks, unique))
    )
    destination = jax.lax.div(unique.sorted_keys, jnp.int32(stack.rows_per_shard))
    row = unique.sorted_keys - stack.rows_per_shard * destination
    places = jnp.where(
        is_in_round, size.bucket_size * destination + rank_in_round, size.buffer_size
    )
    requests = jnp.full((size.buffer_size,), PADDING_ROW_ID, jnp.int32)
    requests = requests.at[places].set(row, mode="drop", wrap_negative_indices=False)
    return places, exchange(requests, stack)
