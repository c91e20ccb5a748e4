"""The backward pass of one stack: cotangents to gradients at the owners. Per shard.

It reads as the second half of the design's diagram: spread, exchange, merge. The first
round runs when the gradient is computed. Cotangents of later rounds stay on their shard
until an update folds over the rounds (`gradient_rounds`), because room for all of them
would cost every step what only skewed batches need.

A gradient keeps its keys and cotangents, so several gradients can be joined exactly:
their samples become one batch, which is routed anew.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpu_embedding.lookup._custom_combiner import row_cotangents
from tpu_embedding.lookup._exchange import exchange
from tpu_embedding.lookup._flatten_to_owners import PoolingSpec
from tpu_embedding.lookup._forward import StackRouting
from tpu_embedding.lookup._gradient_blocks import (
    IdBlocks,
    ReadCotangents,
    choose_ids_per_block,
    first_block,
    fold_blocks,
)
from tpu_embedding.lookup._merge import merge
from tpu_embedding.lookup._replicas import add_dense_gradients, gather_from_replicas
from tpu_embedding.lookup._rounds import PendingRounds, for_each_round
from tpu_embedding.lookup._route import IdsByRow, Round
from tpu_embedding.lookup._send import SentIds, send_ids
from tpu_embedding.lookup._spread_cotangents import cotangent_reader, spread
from tpu_embedding.plan.capacity import RoundSize
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.replicas import choose_reduction
from tpu_embedding.plan.stack_plan import TrainedStackPlan
from tpu_embedding.rows.opaque_row_ids import Sealed, seal
from tpu_embedding.rows.row_gradients import (
    GradientRounds,
    RowGradients,
)
from tpu_embedding.types import RowRange

Carry = TypeVar("Carry")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleGradients:
    """The cotangents of a stack on the shards of their samples. Per shard.

    Attributes:
      keys: int32 `[ids]`, of all features; see `_flatten_to_owners.py`.
      cotangents: per feature, `[samples, dim]`.
      poolings: per feature.
      max_unique_ids: upper bound on the unique ids of a shard.
    """

    keys: Int[Array, " ids"]
    cotangents: list[Float[Array, "_ dim"]]
    poolings: list[PoolingSpec]
    max_unique_ids: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StackGradient:
    """The gradient of a stacked table, to be applied by `apply_gradients`. Per shard.

    Attributes:
      first_round: gradients at the owners of the rows of the first round.
      pending: ids of later rounds, whose gradients are still in `samples`; None if no
        batch of this shape can have a second round.
      samples: the whole gradient, before it was sent to the owners.
    """

    first_round: RowGradients
    pending: PendingRounds | IdBlocks | None
    samples: SampleGradients


def seal_gradient(gradient: StackGradient) -> Sealed:
    """Seals all of a gradient but the values that scale with it."""
    return seal(gradient, linear_fields=("values", "cotangents"))


def stack_gradient(
    routing: StackRouting,
    cotangents: Sequence[Float[Array, "_ dim"]],
    stack: TrainedStackPlan,
    plan: EmbeddingPlan,
) -> StackGradient:
    """Returns the gradient of a stacked table. Per shard.

    Args:
      routing: facts that the lookup handed on.
      cotangents: derivatives of the loss by the activations, per feature.
      stack: plan of the stack.
      plan: gives the mesh.
    """
    samples = SampleGradients(
        keys=routing.keys,
        cotangents=row_cotangents(cotangents, routing.sequences),
        poolings=routing.poolings,
        max_unique_ids=routing.max_unique_ids,
    )
    return _gradient_of(samples, routing.sent, stack, plan)


def join_gradients(
    gradients: Sequence[StackGradient], stack: TrainedStackPlan, plan: EmbeddingPlan
) -> StackGradient:
    """Returns the sum of several gradients of a stacked table. Per shard.

    The samples of all gradients are treated as one batch. So the sum has each touched
    row once, and equals the gradient of one lookup of all ids. The ids cross the
    network a second time.
    """
    parts = [gradient.samples for gradient in gradients]
    max_unique_ids = sum(part.max_unique_ids for part in parts)
    if not stack.keeps_duplicates:
        max_unique_ids = min(max_unique_ids, stack.num_rows)
    samples = SampleGradients(
        keys=jnp.concatenate([part.keys for part in parts]),
        cotangents=[cotangent for part in parts for cotangent in part.cotangents],
        poolings=[pooling for part in parts for pooling in part.poolings],
        max_unique_ids=max_unique_ids,
    )
    return _gradient_of(samples, None, stack, plan)


def gradient_rounds(
    gradient: StackGradient, stack: TrainedStackPlan, plan: EmbeddingPlan
) -> GradientRounds:
    """Returns all rounds of a gradient, for an update to fold over. Per shard."""
    pending = gradient.pending
    if pending is None:
        return GradientRounds(first=gradient.first_round)

    def fold_later(
        body: Callable[[Carry, RowGradients, RowRange], Carry], carry: Carry
    ) -> Carry:
        if isinstance(pending, PendingRounds):
            return _fold_pending(pending, gradient.samples, body, carry, stack, plan)
        reader = _cotangent_reader(gradient.samples)
        return fold_blocks(
            pending, gradient.first_round, reader, stack.layout, body, carry
        )

    return GradientRounds(
        first=gradient.first_round,
        first_rows=RowRange(jnp.int32(0), pending.end_row[0]),
        fold_later=fold_later,
    )


def _gradient_of(
    samples: SampleGradients,
    sent: SentIds | None,
    stack: TrainedStackPlan,
    plan: EmbeddingPlan,
) -> StackGradient:
    """Sends the gradients of samples to the owners of their rows. Per shard.

    Args:
      samples: the gradients.
      sent: their ids; None: they are sent now.
      stack: plan of the stack.
      plan: gives the mesh.
    """
    if stack.updates == "blocks":
        reader = _cotangent_reader(samples)
        size = choose_ids_per_block(samples.keys.shape[0], stack.dim)
        first, blocks = first_block(samples.keys, size, reader, stack.layout)
        return StackGradient(first_round=first, pending=blocks, samples=samples)
    if sent is None:
        sent, _ = send_ids(samples.keys, samples.max_unique_ids, stack, plan)
    first = _spread_and_send(
        samples, sent.ids_by_row, sent.row_ids, sent.size, stack, plan
    )
    return StackGradient(first_round=first, pending=sent.pending, samples=samples)


def _fold_pending(
    pending: PendingRounds,
    samples: SampleGradients,
    body: Callable[[Carry, RowGradients, RowRange], Carry],
    carry: Carry,
    stack: TrainedStackPlan,
    plan: EmbeddingPlan,
) -> Carry:
    """Folds over the later rounds. Per shard.

    The ids of these rounds cross the network a second time. Keeping them would cost
    room in every step.
    """

    def run_round(state: tuple[Carry, Array], current: Round) -> tuple[Carry, Array]:
        carry, first_row = state
        row_ids = exchange(current.row_ids, stack)
        received = _spread_and_send(
            samples, current.ids_by_row, row_ids, pending.size, stack, plan
        )
        carry = body(carry, received, RowRange(first_row, current.end_row))
        return carry, current.end_row

    state = (carry, pending.end_row[0])
    (carry, _), _ = for_each_round(pending, run_round, state, stack, plan)
    return carry


def _cotangent_reader(samples: SampleGradients) -> ReadCotangents:
    return cotangent_reader(samples.cotangents, samples.poolings)


def _spread_and_send(
    samples: SampleGradients,
    ids_by_row: IdsByRow,
    row_ids: Int[Array, " buffer"],
    size: RoundSize,
    stack: TrainedStackPlan,
    plan: EmbeddingPlan,
) -> RowGradients:
    """Sums the cotangents of one round by row, and sends them to the owners."""
    gradients = spread(
        samples.cotangents, ids_by_row, samples.poolings, size.buffer_size
    )
    return _send_to_owners(gradients, row_ids, size, stack, plan)


def _send_to_owners(
    gradients: Float[Array, "buffer dim"],
    row_ids: Int[Array, " buffer"],
    size: RoundSize,
    stack: TrainedStackPlan,
    plan: EmbeddingPlan,
) -> RowGradients:
    """Sends gradients to the owners of their rows, which sum those of equal rows."""
    received = RowGradients(row_ids=row_ids, values=exchange(gradients, stack))
    if choose_reduction(stack, row_ids.shape[0]) == "table":
        return add_dense_gradients(received, stack)
    received = gather_from_replicas(received, stack, plan)
    row_ids = received.row_ids
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
    if plan.num_shards == 1:
        return received
    max_rows = min(stack.num_replicas * size.unique_rows, stack.rows_per_shard)
    return merge(row_ids, received.values, max_rows)
