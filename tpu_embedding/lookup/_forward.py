"""The forward pass of one stack: ids to activations. Per shard.

It reads as the diagram of the package's design: flatten, dedup, route, exchange,
gather, exchange, combine. The first round is straight-line code. Where a batch of this
shape can need more, a loop runs them (`_rounds.py`).
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpu_embedding.lookup._combine import combine
from tpu_embedding.lookup._dedup import dedup
from tpu_embedding.lookup._exchange import Requests, fetch_rows, send_requests
from tpu_embedding.lookup._flatten import (
    FeatureInput,
    PoolingSpec,
    flatten,
    max_unique_ids,
)
from tpu_embedding.lookup._rounds import PendingRounds, first_round, for_each_round
from tpu_embedding.lookup._route import IdsByRow, Round
from tpu_embedding.plan.backends import BatchBackends, choose_for_batch
from tpu_embedding.plan.capacity import RoundSize
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.rows.packed_rows import PackedRows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StackRouting:
    """Facts that the forward pass hands to the backward pass. Per shard.

    Attributes:
      keys: int32 `[ids]`, of all features; see `_flatten.py`.
      ids_by_row: the ids of each row of the first round's buffer.
      requests: rows that the shards requested from this one in the first round.
      poolings: per feature of the stack.
      pending: None if no batch of this shape can need a second round.
      max_unique_ids: upper bound on the unique ids of a shard.
      size: of the first round.
      backends: that pool and spread this batch.
    """

    keys: Int[Array, " ids"]
    ids_by_row: IdsByRow
    requests: Requests
    poolings: list[PoolingSpec]
    pending: PendingRounds | None
    max_unique_ids: int = dataclasses.field(metadata={"static": True})
    size: RoundSize = dataclasses.field(metadata={"static": True})
    backends: BatchBackends = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StackLookup:
    """Result of the lookup of one stack. Per shard.

    Attributes:
      activations: float32 `[samples, dim]` per feature of the stack.
      routing: for the backward pass.
      rounds: int32 `[1]`.
      out_of_range: int32 `[1]` per feature of the stack.
    """

    activations: list[Float[Array, "_ dim"]]
    routing: StackRouting
    rounds: Int[Array, "_"]
    out_of_range: list[Int[Array, "_"]]


def lookup_stack(
    table: PackedRows,
    inputs: Sequence[FeatureInput],
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> StackLookup:
    """Looks up all features of one stack. Per shard.

    Args:
      table: this shard's rows.
      inputs: per feature of the stack.
      stack: its plan.
      plan: for the mesh.
    """
    features = [plan.features[i] for i in plan.features_of(stack)]
    keys, poolings, out_of_range = flatten(inputs, features, stack)
    backends = choose_for_batch(
        stack.layout, stack.backends, [pooling.batch_facts for pooling in poolings]
    )
    unique = dedup(keys, stack)
    max_unique = max_unique_ids(inputs, features, stack)
    size = stack.round_size(max_unique)
    first, pending = first_round(unique, size, stack, plan)

    def look_up_round(current: Round) -> tuple[list[Array], Requests]:
        requests = send_requests(current, size, plan)
        rows = fetch_rows(table, requests, stack, plan)
        return combine(rows, current.places, poolings, backends), requests

    activations, requests = look_up_round(first)
    rounds = jnp.int32(1)
    if pending is not None:

        def add_round(sums, current):
            return jax.tree.map(jnp.add, sums, look_up_round(current)[0])

        activations, further_rounds = for_each_round(
            pending, add_round, activations, stack, plan
        )
        rounds += further_rounds
    # The update's inputs wait for the last read of the table. Without this order, XLA
    # may write rows before it reads them, into a copy of the whole table: a loss whose
    # derivative needs no activations allows that.
    activations, ids_by_row, requests = jax.lax.optimization_barrier(
        (activations, first.ids_by_row, requests)
    )
    return StackLookup(
        activations=activations,
        routing=StackRouting(
            keys=keys,
            ids_by_row=ids_by_row,
            requests=requests,
            poolings=poolings,
            pending=pending,
            max_unique_ids=max_unique,
            size=size,
            backends=backends,
        ),
        rounds=rounds[None],
        out_of_range=[count[None] for count in out_of_range],
    )
