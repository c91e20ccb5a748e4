"""The forward pass of one stack: ids to activations. Per shard.

It reads as the diagram of the package's design: flatten, dedup, route, exchange,
gather, exchange, combine. `route_stack` runs the stages up to the first exchange, which
need no table; `read_stack` runs the others. The first round is straight-line code.
Where a batch of this shape can need more, a loop runs them (`_rounds.py`).
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpu_embedding.lookup._combine import combine
from tpu_embedding.lookup._custom_combiner import (
    PooledSequence,
    apply_custom_combiners,
)
from tpu_embedding.lookup._dedup import dedup
from tpu_embedding.lookup._exchange import Requests, fetch_rows, send_requests
from tpu_embedding.lookup._flatten import (
    FeatureInput,
    PoolingSpec,
    flatten,
    max_unique_ids,
)
from tpu_embedding.lookup._rounds import PendingRounds, first_round, for_each_round
from tpu_embedding.lookup._route import IdsByRow
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
      sequences: per feature of the stack; None without a custom combiner.
      pending: None if no batch of this shape can need a second round.
      max_unique_ids: upper bound on the unique ids of a shard.
      size: of the first round.
      backends: that pool and spread this batch.
    """

    keys: Int[Array, " ids"]
    ids_by_row: IdsByRow
    requests: Requests
    poolings: list[PoolingSpec]
    sequences: list[PooledSequence | None]
    pending: PendingRounds | None
    max_unique_ids: int = dataclasses.field(metadata={"static": True})
    size: RoundSize = dataclasses.field(metadata={"static": True})
    backends: BatchBackends = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutedStack:
    """The ids of a stack at the owners of their rows, not yet read. Per shard.

    Attributes:
      routing: for the backward pass.
      places: int32 `[ids]`, place of each id's row in the first round's buffer.
      out_of_range: int32 `[1]` per feature of the stack.
    """

    routing: StackRouting
    places: Int[Array, " ids"]
    out_of_range: list[Int[Array, "_"]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StackLookup:
    """Result of the lookup of one stack. Per shard.

    Attributes:
      activations: `[samples, dim]` per feature of the stack, in the plan's
        `activation_dtype`.
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
    return read_stack(table, route_stack(inputs, stack, plan), stack, plan)


def route_stack(
    inputs: Sequence[FeatureInput], stack: StackPlan, plan: EmbeddingPlan
) -> RoutedStack:
    """Sends the ids of one stack to the owners of their rows. Per shard.

    It reads no table, so it may run before an update of the table.

    Args:
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
    routing = StackRouting(
        keys=keys,
        ids_by_row=first.ids_by_row,
        requests=send_requests(first, size, stack),
        poolings=poolings,
        sequences=[None] * len(poolings),  # known when the rows are
        pending=pending,
        max_unique_ids=max_unique,
        size=size,
        backends=backends,
    )
    return RoutedStack(
        routing=routing,
        places=first.places,
        out_of_range=[count[None] for count in out_of_range],
    )


def read_stack(
    table: PackedRows, routed: RoutedStack, stack: StackPlan, plan: EmbeddingPlan
) -> StackLookup:
    """Reads the rows of routed ids, and combines them. Per shard.

    Args:
      table: this shard's rows.
      routed: of the same stack.
      stack: its plan.
      plan: for the mesh.
    """
    routing = routed.routing

    def read(requests: Requests, places: Int[Array, " ids"]) -> list[Array]:
        rows = fetch_rows(table, requests, stack, plan)
        return combine(rows, places, routing.poolings, routing.backends)

    activations = read(routing.requests, routed.places)
    rounds = jnp.int32(1)
    if routing.pending is not None:

        def add_round(sums, current):
            requests = send_requests(current, routing.size, stack)
            return jax.tree.map(jnp.add, sums, read(requests, current.places))

        activations, further_rounds = for_each_round(
            routing.pending, add_round, activations, stack, plan
        )
        rounds += further_rounds
    # The update's inputs wait for the last read of the table. Without this order, XLA
    # may write rows before it reads them, into a copy of the whole table: a loss whose
    # derivative needs no activations allows that.
    activations, ids_by_row, requests = jax.lax.optimization_barrier(
        (activations, routing.ids_by_row, routing.requests)
    )
    activations, sequences = apply_custom_combiners(activations, routing.poolings)
    return StackLookup(
        activations=[x.astype(plan.activation_dtype) for x in activations],
        routing=dataclasses.replace(
            routing, ids_by_row=ids_by_row, requests=requests, sequences=sequences
        ),
        rounds=rounds[None],
        out_of_range=routed.out_of_range,
    )
