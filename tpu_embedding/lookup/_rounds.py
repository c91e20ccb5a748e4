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
from tpu_embedding.lookup._route import Round, route
from tpu_embedding.plan.capacity import RoundSize
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan

Carry = TypeVar("Carry")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingRounds:
    """The ids that travel after the first round. Per shard.

    Attributes:
      dedup: the unique ids of the shard.
      next_ranks: int32 `[num_shards]`, the first pending rank per destination.
      end_row: int32 `[1]`, the first of this shard's own rows that is pending.
      is_done: bool `[1]`, True if no shard has a pending id.
      size: of each round.
    """

    dedup: Dedup
    next_ranks: Int[Array, " shards"]
    end_row: Int[Array, "_"]
    is_done: Bool[Array, "_"]
    size: RoundSize = dataclasses.field(metadata={"static": True})


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
        (carry, pending.next_ranks, pending.is_done[0], jnp.int32(0)),
    )
    return carry, rounds
