"""The forward pass of one stack: ids to activations. Per shard.

It reads as the diagram of the package's design: flatten, dedup, route, exchange,
gather, exchange, combine. `route_stack` runs the stages up to the first exchange, which
need no table; `read_stack` runs the others. The first round is straight-line code.
Where a batch of this shape can need more, a loop runs them (`_rounds.py`).

A device that owns all rows of a stack skips dedup, route and both exchanges: it pools
rows straight from its table. Only a gradient then needs these stages, and runs them.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpu_embedding.lookup._combine import combine, read_and_combine
from tpu_embedding.lookup._custom_combiner import (
    PooledSequence,
    apply_custom_combiners,
)
from tpu_embedding.lookup._exchange import exchange, fetch_rows, read_local_rows
from tpu_embedding.lookup._flatten_to_owners import (
    FeatureInput,
    PoolingSpec,
    flatten,
    max_unique_ids,
)
from tpu_embedding.lookup._rounds import for_each_round
from tpu_embedding.lookup._send import SentIds, send_ids
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.stack_plan import StackPlan
from tpu_embedding.rows.packed_rows import PackedRows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StackRouting:
    """Facts that the forward pass hands to the backward pass. Per shard.

    Attributes:
      keys: int32 `[ids]`, of all features; see `_flatten_to_owners.py`.
      sent: the ids at the owners of their rows; None if this device read its own rows.
      poolings: per feature of the stack.
      sequences: per feature of the stack; None without a custom combiner.
      max_unique_ids: upper bound on the unique ids of a shard.
    """

    keys: Int[Array, " ids"]
    sent: SentIds | None
    poolings: list[PoolingSpec]
    sequences: list[PooledSequence | None]
    max_unique_ids: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutedStack:
    """The ids of a stack at the owners of their rows, not yet read. Per shard.

    Attributes:
      routing: facts for the backward pass.
      places: int32 `[ids]`, place of each id's row in the first round's buffer, or in
        the table if this device reads its own rows.
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
      routing: facts for the backward pass.
      rounds: int32 `[1]`.
      out_of_range: int32 `[1]` per feature of the stack.
    """

    activations: list[Float[Array, "_ dim"]]
    routing: StackRouting
    rounds: Int[Array, "_"]
    out_of_range: list[Int[Array, "_"]]


def route_stack(
    inputs: Sequence[FeatureInput], stack: StackPlan, plan: EmbeddingPlan
) -> RoutedStack:
    """Sends the ids of one stack to the owners of their rows. Per shard.

    It reads no table, so it may run before an update of the table.

    Args:
      inputs: per feature of the stack.
      stack: plan of the stack.
      plan: gives the mesh.
    """
    features = [plan.features[i] for i in plan.features_of(stack)]
    keys, poolings, out_of_range = flatten(inputs, features, stack)
    max_unique = max_unique_ids(inputs, features, stack)
    sent, places = None, keys
    if stack.sends_ids:
        sent, places = send_ids(keys, max_unique, stack, plan)
    routing = StackRouting(
        keys=keys,
        sent=sent,
        poolings=poolings,
        sequences=[None] * len(poolings),  # known when the rows are
        max_unique_ids=max_unique,
    )
    return RoutedStack(
        routing=routing,
        places=places,
        out_of_range=[count[None] for count in out_of_range],
    )


def read_stack(
    table: PackedRows, routed: RoutedStack, stack: StackPlan, plan: EmbeddingPlan
) -> StackLookup:
    """Reads the rows of routed ids, and combines them. Per shard.

    Args:
      table: this shard's rows.
      routed: routed ids of the stack.
      stack: plan of the stack.
      plan: gives the mesh.
    """
    routing = routed.routing
    rounds = jnp.int32(1)
    if routing.sent is None:
        activations = read_and_combine(
            lambda row_ids: read_local_rows(table, row_ids, stack),
            routed.places,
            routing.poolings,
            stack.gathers,
        )
    else:
        activations, further_rounds = _read_rounds(
            table, routing, routing.sent, routed.places, stack, plan
        )
        rounds += further_rounds
    activations, routing = _order(activations, routing)
    activations, sequences = apply_custom_combiners(activations, routing.poolings)
    return StackLookup(
        activations=[x.astype(plan.activation_dtype) for x in activations],
        routing=dataclasses.replace(routing, sequences=sequences),
        rounds=rounds[None],
        out_of_range=routed.out_of_range,
    )


def _read_rounds(
    table: PackedRows,
    routing: StackRouting,
    sent: SentIds,
    places: Int[Array, " ids"],
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> tuple[list[Float[Array, "_ dim"]], Int[Array, ""]]:
    """Fetches the rows of all rounds from their owners, and combines them. Per shard.

    Returns:
      The activations before custom combiners, and the number of rounds after the first.
    """

    def read(row_ids: Int[Array, " buffer"], places: Int[Array, " ids"]) -> list[Array]:
        rows = fetch_rows(table, row_ids, stack, plan)
        return combine(rows, places, routing.poolings, stack.gathers)

    activations = read(sent.row_ids, places)
    if sent.pending is None:
        return activations, jnp.int32(0)

    def add_round(sums, current):
        row_ids = exchange(current.row_ids, stack)
        return jax.tree.map(jnp.add, sums, read(row_ids, current.places))

    return for_each_round(sent.pending, add_round, activations, stack, plan)


def _order(
    activations: list[Float[Array, "_ dim"]], routing: StackRouting
) -> tuple[list[Float[Array, "_ dim"]], StackRouting]:
    """Makes the inputs of the update wait for the last read of the table.

    Without this order, XLA may write rows before it reads them, into a copy of the
    whole table: a loss whose derivative needs no activations allows that.
    """
    sent = routing.sent
    if sent is None:
        activations, keys = jax.lax.optimization_barrier((activations, routing.keys))
        return activations, dataclasses.replace(routing, keys=keys)
    activations, ids_by_row, row_ids = jax.lax.optimization_barrier(
        (activations, sent.ids_by_row, sent.row_ids)
    )
    sent = dataclasses.replace(sent, ids_by_row=ids_by_row, row_ids=row_ids)
    return activations, dataclasses.replace(routing, sent=sent)
