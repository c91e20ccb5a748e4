"""Stages 2 to 4 for ids: dedup, route, and the exchange that brings ids to owners.

The forward pass runs them where rows cross the network. Where each device reads its own
copy of the rows, only a gradient needs them, and the backward pass runs them.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from tpu_embedding.lookup._dedup import dedup
from tpu_embedding.lookup._exchange import exchange
from tpu_embedding.lookup._rounds import PendingRounds, first_round
from tpu_embedding.lookup._route import IdsByRow
from tpu_embedding.plan.capacity import RoundSize
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.stack_plan import StackPlan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SentIds:
    """The ids of a batch at the owners of their rows. Per shard.

    Attributes:
      ids_by_row: the ids of each row of the first round's buffer.
      row_ids: int32 `[buffer_size]`, local rows that the shards requested from this one
        in the first round; `PADDING_ROW_ID` in unused places.
      pending: None if no batch of this shape can need a second round.
      num_ids: int32 `[1]`, ids of the shard without padding.
      requested_rows: int32 `[1, num_shards]`, rows that the shard requests from each
        owner, in all rounds together.
      size: buffer sizes of the first round.
    """

    ids_by_row: IdsByRow
    row_ids: Int[Array, " buffer"]
    pending: PendingRounds | None
    num_ids: Int[Array, "_"]
    requested_rows: Int[Array, "_ shards"]
    size: RoundSize = dataclasses.field(metadata={"static": True})


def send_ids(
    keys: Int[Array, " ids"], max_unique_ids: int, stack: StackPlan, plan: EmbeddingPlan
) -> tuple[SentIds, Int[Array, " ids"]]:
    """Sends the unique ids of a stack to the owners of their rows. Per shard.

    Args:
      keys: keys of all features; see `_flatten_to_owners.py`.
      max_unique_ids: upper bound on the unique ids of a shard.
      stack: plan of the stack.
      plan: gives the mesh.

    Returns:
      The ids, and the place of each id's row in the first round's buffer.
    """
    size = stack.round_size(max_unique_ids)
    unique = dedup(keys, stack)
    first, pending = first_round(unique, size, stack, plan)
    sent = SentIds(
        ids_by_row=first.ids_by_row,
        row_ids=exchange(first.row_ids, stack),
        pending=pending,
        num_ids=unique.first_places[-1:],
        requested_rows=jnp.diff(unique.first_ranks)[None],
        size=size,
    )
    return sent, first.places
