"""The whole lookup of one stack, and the way back to its gradient. Per shard.

Both read as the diagram of the package's design: flatten, dedup, route, exchange,
gather, exchange, combine; then spread, exchange, merge. The first round is
straight-line code. Where more can be needed, a `while_loop` runs them; all shards
agree on when to stop.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tpu_embedding.lookup._combine import combine, spread
from tpu_embedding.lookup._dedup import Dedup, dedup
from tpu_embedding.lookup._exchange import (
    Requests,
    fetch_rows,
    send_gradients,
    send_requests,
)
from tpu_embedding.lookup._flatten import (
    FeatureInput,
    PoolingSpec,
    flatten,
    max_unique_ids,
)
from tpu_embedding.lookup._merge import PackedRowGradients, merge
from tpu_embedding.lookup._route import IdsByRow, Round, route, route_all
from tpu_embedding.plan.capacity import RoundSize
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.types import RowRange, RowUpdates

Carry = TypeVar("Carry")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingRounds:
    """What has to travel after the first round. Per shard.

    Attributes:
      dedup: the unique ids of the shard.
      next_ranks: int32 `[num_shards]`, the first rank per destination that is left.
      end_row: int32 `[1]`, the first of this shard's own rows that is left.
      is_done: bool `[1]`, True where nothing is left on any shard.
      size: of each round.
    """

    dedup: Dedup
    next_ranks: Int[Array, " shards"]
    end_row: Int[Array, "_"]
    is_done: Bool[Array, "_"]
    size: RoundSize = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StackRouting:
    """What the forward pass hands to the backward pass. Per shard.

    Attributes:
      uses: the ids of each row of the first round's buffer.
      requests: what the shards asked this one for in the first round.
      bags: per feature of the stack.
      remaining: None where no batch of this shape can need a second round.
      size: of the first round.
    """

    uses: IdsByRow
    requests: Requests
    bags: list[PoolingSpec]
    remaining: PendingRounds | None
    size: RoundSize = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DeferredGradient:
    """Gradients that travel in further rounds, still on the shard they arose on.

    Attributes:
      remaining: the ids.
      cotangents: per feature of the stack, `[samples, dim]`.
      bags: per feature of the stack.
    """

    remaining: PendingRounds
    cotangents: list[Float[Array, "_ dim"]]
    bags: list[PoolingSpec]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StackGradient:
    """The gradient of a stacked table: each touched row once, at its owner.

    Attributes:
      first: rows of the first round; under no skew, all of them.
      later: the rest; None where no batch of this shape can have one.
    """

    first: PackedRowGradients
    later: DeferredGradient | None

    @property
    def updates(self) -> RowUpdates:
        """The rows of the first round."""
        return self.first.updates


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
    keys, bags, out_of_range = flatten(inputs, features, stack)
    unique = dedup(keys, stack)
    max_unique = max_unique_ids(inputs, features, stack)
    size = stack.round_size(max_unique)
    if size.holds_all:
        first = route_all(unique, size, stack)
        remaining = None
    else:
        first = route(unique, unique.first_ranks[:-1], size, stack, plan)
        remaining = PendingRounds(
            dedup=unique,
            next_ranks=first.next_ranks,
            end_row=first.end_row[None],
            is_done=first.is_last[None],
            size=size,
        )

    def look_up_round(current: Round) -> tuple[list[Array], Requests]:
        requests = send_requests(current, size, plan)
        rows = fetch_rows(table, requests, stack, plan)
        return combine(rows, current.places, bags), requests

    activations, requests = look_up_round(first)
    rounds = jnp.int32(1)
    if remaining is not None:

        def add_round(sums, current):
            return jax.tree.map(jnp.add, sums, look_up_round(current)[0])

        activations, further_rounds = for_each_round(
            remaining, add_round, activations, stack, plan
        )
        rounds += further_rounds
    # What the update needs waits for the last read of the table. Otherwise a loss
    # whose derivative needs no activations lets XLA write rows before they are read,
    # into a copy of the whole table.
    activations, uses, requests = jax.lax.optimization_barrier(
        (activations, first.uses, requests)
    )
    return StackLookup(
        activations=activations,
        routing=StackRouting(
            uses=uses,
            requests=requests,
            bags=bags,
            remaining=remaining,
            size=size,
        ),
        rounds=rounds[None],
        out_of_range=[count[None] for count in out_of_range],
    )


def stack_gradient(
    routing: StackRouting,
    cotangents: Sequence[Float[Array, "_ dim"]],
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> StackGradient:
    """Returns the gradient of a stacked table at the owners of its rows. Per shard.

    Args:
      routing: of the lookup.
      cotangents: derivatives of the loss by the activations, per feature.
      stack: its plan.
      plan: for the mesh.
    """
    later = None
    if routing.remaining is not None:
        later = DeferredGradient(
            remaining=routing.remaining,
            cotangents=list(cotangents),
            bags=routing.bags,
        )
    size = routing.size
    layout = stack.layout.buffer_layout(size.sent_rows)
    gradients = spread(cotangents, routing.uses, routing.bags, layout)
    return StackGradient(
        first=_to_owners(gradients, routing.requests, size, stack, plan), later=later
    )


def for_each_later_update(
    later: DeferredGradient,
    apply: Callable[[Carry, PackedRowGradients, RowRange], Carry],
    carry: Carry,
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> Carry:
    """Applies a function to the gradients of each further round, with its rows.

    Per shard.

    The rows of different rounds are different, so rounds may be applied one by one.
    The ids of these rounds cross the network a second time; that is cheaper than
    keeping room for them in every step.
    """

    def apply_round(state, current: Round):
        carry, first_row = state
        size = later.remaining.size
        layout = stack.layout.buffer_layout(size.sent_rows)
        gradients = spread(later.cotangents, current.uses, later.bags, layout)
        requests = send_requests(current, size, plan)
        sums = _to_owners(gradients, requests, size, stack, plan)
        carry = apply(carry, sums, RowRange(first_row, current.end_row))
        return carry, current.end_row

    state = (carry, later.remaining.end_row[0])
    (carry, _), _ = for_each_round(later.remaining, apply_round, state, stack, plan)
    return carry


def for_each_round(
    remaining: PendingRounds,
    body: Callable[[Carry, Round], Carry],
    carry: Carry,
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> tuple[Carry, Int[Array, ""]]:
    """Runs `body` for each further round; returns also how many there were."""

    def run(state):
        carry, next_ranks, _, rounds = state
        current = route(remaining.dedup, next_ranks, remaining.size, stack, plan)
        carry = body(carry, current)
        return carry, current.next_ranks, current.is_last, rounds + 1

    carry, _, _, rounds = jax.lax.while_loop(
        lambda state: ~state[2],
        run,
        (carry, remaining.next_ranks, remaining.is_done[0], jnp.int32(0)),
    )
    return carry, rounds


def _to_owners(
    gradients: PackedRows,
    requests: Requests,
    size: RoundSize,
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> PackedRowGradients:
    """Sends gradients to the owners of their rows, and sums those of a row there."""
    received = send_gradients(gradients, requests, plan)
    if stack.num_shards == 1 or stack.keeps_duplicates:
        return PackedRowGradients(row_ids=requests.row_ids, values=received)
    return merge(requests.row_ids, received, size.unique_rows)
