"""The backward pass of one stack: cotangents to gradients at the owners. Per shard.

A gradient stays on the devices of the samples: it is a routing and the cotangents. So
several gradients are added exactly by joining their samples to one batch. The owners
of rows see it in `gradient_rounds`, which an update folds over: spread, exchange,
merge, round by round. What the owners receive in round 1 is part of the gradient, so
that a norm and the update after it share one exchange.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tpu_embedding.lookup._forward import StackRouting, sent_ids
from tpu_embedding.lookup._gradient_blocks import (
    IdBlocks,
    gradient_blocks,
    sorted_blocks,
)
from tpu_embedding.lookup._rounds import (
    Round,
    SentIds,
    exchange,
    fold_later_rounds,
    gather_from_replicas,
)
from tpu_embedding.lookup._sum_by_row import (
    ReadCotangents,
    cotangent_reader,
    merge,
    spread,
)
from tpu_embedding.optimizers.row_optimizer import InSequence, Touched
from tpu_embedding.plan.plan import TrainedStackPlan
from tpu_embedding.rows.row_gradients import GradientRounds, RowGradients, Sealed, seal
from tpu_embedding.types import RowRange

Carry = TypeVar("Carry")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StackGradient:
    """The gradient of a stacked table, on the shards of its samples. Per shard.

    The gradient of a row is the sum over its ids of gain times cotangent.

    Attributes:
      routing: the ids of the samples.
      cotangents: `[samples, dim]` per feature of the stack.
      blocks: the ids in blocks, where one CPU device owns all rows; else None.
      first: the first round at the owners; None for blocks, and for backends that
        replace the update.
    """

    routing: StackRouting
    cotangents: list[Float[Array, "_ dim"]]
    blocks: IdBlocks | None
    first: RowGradients | None

    def seal(self) -> Sealed:
        """Seals all of a gradient but the values that scale with it."""
        return seal(self, linear_fields=("cotangents", "values"))


def stack_gradient(
    routing: StackRouting,
    cotangents: Sequence[Float[Array, "_ dim"]],
    stack: TrainedStackPlan,
) -> Sealed:
    """Returns the gradient of a stacked table, a sealed `StackGradient`. Per shard.

    Args:
      routing: facts that the lookup handed on.
      cotangents: derivatives of the loss by the activations, per feature.
      stack: plan of the stack.
    """
    blocks, first = None, None
    if stack.updates == "blocks":
        blocks = sorted_blocks(routing.keys, stack.dim)
    elif not stack.backend.replaces_update:
        sent = sent_ids(routing, stack)
        reader = cotangent_reader(cotangents, routing.poolings)
        first = _receive(sent.first, sent, reader, stack)
        routing = dataclasses.replace(routing, sent=sent)
    gradient = StackGradient(
        routing=routing, cotangents=list(cotangents), blocks=blocks, first=first
    )
    return gradient.seal()


def scale_gradient(gradient: Sealed, factor: Any) -> Sealed:
    """Returns a gradient of `stack_gradient` times a factor."""
    old, factor = gradient.open(), jnp.asarray(factor, jnp.float32)
    new = dataclasses.replace(
        old,
        cotangents=[cotangent * factor for cotangent in old.cotangents],
        first=None if old.first is None else old.first.scaled(factor),
    )
    return new.seal()


def join_gradients(gradients: Sequence[Sealed], stack: TrainedStackPlan) -> Sealed:
    """Returns the sum of several gradients of a stacked table. Per shard.

    The samples of all gradients are treated as one batch. So the sum has each touched
    row once, and equals the gradient of one lookup of all ids. The ids cross the
    network a second time.
    """
    opened = [gradient.open() for gradient in gradients]
    parts = [gradient.routing for gradient in opened]
    max_unique_ids = sum(part.max_unique_ids for part in parts)
    if not stack.keeps_duplicates:
        max_unique_ids = min(max_unique_ids, stack.num_rows)
    keys = jnp.concatenate([part.keys for part in parts])
    poolings = [pooling for part in parts for pooling in part.poolings]
    backend_ids = None
    if stack.backend.replaces_update:
        backend_ids = stack.backend.prepare_ids(keys, poolings, stack)
    routing = StackRouting(
        keys=keys,
        sent=None,
        backend_ids=backend_ids,
        poolings=poolings,
        out_of_range=[count for part in parts for count in part.out_of_range],
        max_unique_ids=max_unique_ids,
    )
    cotangents = [x for gradient in opened for x in gradient.cotangents]
    return stack_gradient(routing, cotangents, stack)


def gradient_rounds(gradient: Sealed, stack: TrainedStackPlan) -> GradientRounds:
    """Brings a gradient to the owners of its rows, round by round. Per shard.

    The first round is straight-line code. The ids of later rounds cross the network a
    second time: keeping them would cost room in every step.

    Args:
      gradient: from `stack_gradient`, or a sum.
      stack: plan of the stack.
    """
    opened = gradient.open()
    reader = cotangent_reader(opened.cotangents, opened.routing.poolings)
    if opened.blocks is not None:
        return gradient_blocks(opened.blocks, reader, stack.layout)
    sent, first = sent_ids(opened.routing, stack), opened.first
    if first is None:
        first = _receive(sent.first, sent, reader, stack)
    if sent.size.holds_all:
        return GradientRounds(first=first)

    def fold_later(
        body: Callable[[Carry, RowGradients, RowRange], Carry], carry: Carry
    ) -> Carry:
        def run(state: tuple[Carry, Array], current: Round) -> tuple[Carry, Array]:
            carry, first_row = state
            received = _receive(current, sent, reader, stack)
            rows = RowRange(first_row, current.end_row[0])
            return body(carry, received, rows), current.end_row[0]

        state = (carry, sent.first.end_row[0])
        (carry, _), _ = fold_later_rounds(run, state, sent, stack)
        return carry

    return GradientRounds(
        first=first,
        first_rows=RowRange(jnp.int32(0), sent.first.end_row[0]),
        fold_later=fold_later,
    )


def _receive(
    current: Round,
    sent: SentIds,
    cotangents_of: ReadCotangents,
    stack: TrainedStackPlan,
) -> RowGradients:
    """Sums the cotangents of a round by row, and sends them to the owners."""
    order, positions = sent.unique.order, current.buffer_positions
    by_row = spread(cotangents_of, order, positions, sent.size.buffer_size)
    received = RowGradients(row_ids=current.requests, values=exchange(by_row, stack))
    return _at_owner(received, sent, stack)


def _at_owner(
    received: RowGradients, sent: SentIds, stack: TrainedStackPlan
) -> RowGradients:
    """Sums the gradients that an owner received for one row."""
    received = gather_from_replicas(received, stack)
    row_ids = received.row_ids
    match stack.optimizer.driver:
        case InSequence():
            return received
        case Touched(occurrence_norm=True):
            # Each occurrence arrived separately.
            max_rows = min(row_ids.shape[0], stack.rows_per_shard)
            return dataclasses.replace(
                merge(row_ids, received.values, max_rows),
                occurrences=received.as_row_updates(),
            )
    if stack.num_devices == 1:
        return received
    max_rows = min(stack.num_replicas * sent.size.unique_rows, stack.rows_per_shard)
    return merge(row_ids, received.values, max_rows)
