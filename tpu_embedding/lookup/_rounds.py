"""Rounds after the first: the ids that did not fit travel in a `while_loop`.

All shards agree on when to stop. Forward and backward pass run the same rounds.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from tpu_embedding.lookup._dedup import Dedup
from tpu_embedding.lookup._route import Round, route, route_all
from tpu_embedding.plan.capacity import RoundSize
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.stack_plan import StackPlan

Carry = TypeVar("Carry")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingRounds:
    """The ids that travel after the first round. Per shard.

    Attributes:
      dedup: the unique ids of the shard.
      next_ranks: int32 `[num_shards]`, the first pending rank per destination.
      end_row: int32 `[1]`, the first of this shard's own rows that is pending.
      is_pending: bool `[1]`, True if some shard has a pending id.
      size: buffer sizes of each round.
    """

    dedup: Dedup
    next_ranks: Int[Array, " shards"]
    end_row: Int[Array, "_"]
    is_pending: Bool[Array, "_"]
    size: RoundSize = dataclasses.field(metadata={"static": True})


def first_round(
    unique: Dedup, size: RoundSize, stack: StackPlan, plan: EmbeddingPlan
) -> tuple[Round, PendingRounds | None]:
    """Routes the first round. Per shard.

    Returns:
      The round, and the rounds that may follow; None if no batch of this shape can
      need a second round.
    """
    if size.holds_all:
        return route_all(unique, size, stack), None
    first = route(unique, unique.first_ranks[:-1], size, stack, plan)
    pending = PendingRounds(
        dedup=unique,
        next_ranks=first.next_ranks,
        end_row=first.end_row[None],
        is_pending=~first.is_last[None],
        size=size,
    )
    return first, pending


def for_each_round(
    pending: PendingRounds,
    body: Callable[[Carry, Round], Carry],
    carry: Carry,
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> tuple[Carry, Int[Array, ""]]:
    """Runs `carry = body(carry, round)` for each pending round. Per shard.

    Returns:
      The last carry, and the number of rounds.
    """

    def run(state):
        carry, next_ranks, _, rounds = state
        current = route(pending.dedup, next_ranks, pending.size, stack, plan)
        carry = body(carry, current)
        return carry, current.next_ranks, current.is_last, rounds + 1

    carry, _, _, rounds = jax.lax.while_loop(
        lambda state: ~state[2],
        run,
        (carry, pending.next_ranks, ~pending.is_pending[0], jnp.int32(0)),
    )
    return carry, rounds
