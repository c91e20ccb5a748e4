"""The backward pass of one stack: cotangents to gradients at the owners. Per shard.

It reads as the second half of the design's diagram: spread, exchange, merge. The first
round runs when the gradient is computed. Cotangents of later rounds stay on their shard
until an update folds over the rounds (`gradient_rounds`), because room for all of them
would cost every step what only skewed batches need.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tpu_embedding.lookup._exchange import Requests, send_gradients, send_requests
from tpu_embedding.lookup._flatten import PoolingSpec
from tpu_embedding.lookup._forward import StackRouting
from tpu_embedding.lookup._merge import merge
from tpu_embedding.lookup._rounds import PendingRounds, for_each_round
from tpu_embedding.lookup._route import Round
from tpu_embedding.lookup._spread import spread
from tpu_embedding.plan.backends import BatchBackends
from tpu_embedding.plan.capacity import RoundSize
from tpu_embedding.plan.plan import EmbeddingPlan, TrainedStackPlan
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.rows.row_gradients import (
    GradientRounds,
    PackedRowGradients,
)
from tpu_embedding.types import RowRange

Carry = TypeVar("Carry")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DeferredGradient:
    """Cotangents of later rounds, still on the shard of their samples.

    Attributes:
      pending: the ids of these rounds.
      cotangents: per feature of the stack, `[samples, dim]`.
      poolings: per feature of the stack.
      backends: that spread this batch.
    """

    pending: PendingRounds
    cotangents: list[Float[Array, "_ dim"]]
    poolings: list[PoolingSpec]
    backends: BatchBackends = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StackGradient:
    """The gradient of a stacked table, to be applied by `apply_gradients`.

    Attributes:
      first_round: gradients at the owners of the rows of the first round.
      deferred: the rest; None if no batch of this shape can have a second round.
    """

    first_round: PackedRowGradients
    deferred: DeferredGradient | None


def stack_gradient(
    routing: StackRouting,
    cotangents: Sequence[Float[Array, "_ dim"]],
    stack: TrainedStackPlan,
    plan: EmbeddingPlan,
) -> StackGradient:
    """Returns the gradient of a stacked table. Per shard.

    Args:
      routing: of the lookup.
      cotangents: derivatives of the loss by the activations, per feature.
      stack: its plan.
      plan: for the mesh.
    """
    size = routing.size
    gradients = spread(
        cotangents,
        routing.ids_by_row,
        routing.poolings,
        stack.layout.buffer_layout(size.sent_rows),
        routing.backends,
    )
    deferred = None
    if routing.pending is not None:
        deferred = DeferredGradient(
            pending=routing.pending,
            cotangents=list(cotangents),
            poolings=routing.poolings,
            backends=routing.backends,
        )
    first_round = _send_to_owners(gradients, routing.requests, size, stack, plan)
    return StackGradient(first_round=first_round, deferred=deferred)


def gradient_rounds(
    gradient: StackGradient, stack: TrainedStackPlan, plan: EmbeddingPlan
) -> GradientRounds:
    """Returns all rounds of a gradient, for an update to fold over. Per shard."""
    deferred = gradient.deferred
    if deferred is None:
        return GradientRounds(first=gradient.first_round)

    def fold_later(
        body: Callable[[Carry, PackedRowGradients, RowRange], Carry], carry: Carry
    ) -> Carry:
        return _fold_deferred(deferred, body, carry, stack, plan)

    return GradientRounds(
        first=gradient.first_round,
        first_rows=RowRange(jnp.int32(0), deferred.pending.end_row[0]),
        fold_later=fold_later,
    )


def _fold_deferred(
    deferred: DeferredGradient,
    body: Callable[[Carry, PackedRowGradients, RowRange], Carry],
    carry: Carry,
    stack: TrainedStackPlan,
    plan: EmbeddingPlan,
) -> Carry:
    """Folds over the later rounds. Per shard.

    The ids of these rounds cross the network a second time. Keeping them would cost
    room in every step.
    """
    size = deferred.pending.size

    def run_round(state: tuple[Carry, Array], current: Round) -> tuple[Carry, Array]:
        carry, first_row = state
        gradients = spread(
            deferred.cotangents,
            current.ids_by_row,
            deferred.poolings,
            stack.layout.buffer_layout(size.sent_rows),
            deferred.backends,
        )
        requests = send_requests(current, size, plan)
        received = _send_to_owners(gradients, requests, size, stack, plan)
        carry = body(carry, received, RowRange(first_row, current.end_row))
        return carry, current.end_row

    state = (carry, deferred.pending.end_row[0])
    (carry, _), _ = for_each_round(deferred.pending, run_round, state, stack, plan)
    return carry


def _send_to_owners(
    gradients: PackedRows,
    requests: Requests,
    size: RoundSize,
    stack: TrainedStackPlan,
    plan: EmbeddingPlan,
) -> PackedRowGradients:
    """Sends gradients to the owners of their rows, which sum those of equal rows."""
    row_ids = requests.row_ids
    received = PackedRowGradients(
        row_ids=row_ids, values=send_gradients(gradients, requests, plan)
    )
    match stack.optimizer.duplicates:
        case "sequence":
            return received
        case "norm":
            # Each occurrence arrived separately.
            max_rows = min(row_ids.shape[0], stack.rows_per_shard)
            return dataclasses.replace(
                merge(row_ids, received.values, max_rows),
                occurrences=received.as_row_updates(),
            )
    if stack.num_shards == 1:
        return received
    return merge(row_ids, received.values, size.unique_rows)
