"""The forward pass of one stack: ids to activations. Per shard.

It reads as the diagram of the package's design: flatten, dedup, rounds, exchange,
gather, exchange, combine. `route_stack` runs the stages up to the first exchange, which
need no table; `read_stack` folds the rest over the rounds.

A device that owns all rows of a stack skips dedup, rounds and both exchanges: it pools
rows straight from its table. Only a gradient then needs these stages, and runs them.

The stack's backend may replace all stages after flatten, see `plan/backend.py`. The
stages then run for batches that it cannot look up.

Stage 5, combine, sums rows into the samples that use them. The rows are multiplied by a
sparse matrix `[samples, positions]`: the gains of the ids, scaled per sample by the
combiner. `pool_buffer` applies the gains, round by round, and `samples_of` the scales,
once. `_sum_by_row.py` multiplies by the transpose.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpu_embedding.lookup._flatten_to_owners import (
    FeatureInput,
    PoolingSpec,
    flatten,
    max_unique_ids,
    split_by_feature,
)
from tpu_embedding.lookup._rounds import (
    Round,
    SentIds,
    fetch_rows,
    fold_later_rounds,
    read_local_rows,
    send_ids,
)
from tpu_embedding.plan.backend import Activations
from tpu_embedding.plan.capacity import Gathers
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.plan.plan import StackPlan
from tpu_embedding.rows.access import gather_lines
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.xla import read_before_write

_MAX_UNROLLED_VALENCE: Final = 128
"""Valence up to which each id of a sample is an addition of its own in the program."""

ReadRows = Callable[[Int[Array, " n"]], Float[Array, "n dim"]]
"""Reads the rows at some positions; zeros for an id without a row."""


@jax.named_scope("combine")
def pool_buffer(
    rows: Float[Array, "buffer dim"],
    positions: Int[Array, " all_ids"],
    poolings: Sequence[PoolingSpec],
    gathers: Gathers,
) -> list[Float[Array, "_ dim"]]:
    """Sums gain-weighted rows into their samples. Per shard; no communication.

    Args:
      rows: rows in the exchange buffer.
      positions: position of each id's row in the buffer. An id without a row has one
        beyond the end, and reads the last row of the buffer, which no id uses.
      poolings: the features of the stack.
      gathers: form of the gathers.

    Returns:
      Sums of float32 for `samples_of`; several rounds are added up. Samples
      without ids are zero.
    """
    # Zeros as the last row make a mask on the gathered rows unnecessary.
    last = rows.shape[0] - 1
    zeros = jnp.zeros((1, rows.shape[1]), rows.dtype)
    rows = jax.lax.dynamic_update_slice(rows, zeros, (last, 0))

    def rows_at(positions):
        return gather_lines(rows, jnp.minimum(positions, last))

    return pool(rows_at, positions, poolings, gathers)


@jax.named_scope("combine")
def pool(
    rows_at: ReadRows,
    positions: Int[Array, " all_ids"],
    poolings: Sequence[PoolingSpec],
    gathers: Gathers,
) -> list[Float[Array, "_ dim"]]:
    """Sums gain-weighted rows into their samples, as `pool_buffer` does.

    Args:
      rows_at: reads the rows of some positions.
      positions: the argument of `rows_at` for each id.
      poolings: the features of the stack.
      gathers: form of the gathers.
    """
    if all(pooling.is_copy for pooling in poolings):
        # One array for all features: compile time grows with the number of arrays.
        return [rows_at(positions)]
    sizes = [pooling.num_ids for pooling in poolings]
    if gathers == "fused":
        return [
            gather_and_pool(pooling, rows_at, of_feature)
            for pooling, of_feature in zip(
                poolings, split_by_feature(positions, sizes), strict=True
            )
        ]
    gathered = split_by_feature(rows_at(positions), sizes)
    return [_pool(pooling, x) for pooling, x in zip(poolings, gathered, strict=True)]


def samples_of(
    sums: Sequence[Float[Array, "_ dim"]], poolings: Sequence[PoolingSpec]
) -> list[Float[Array, "_ dim"]]:
    """Returns the activations of each feature, from the sums of all rounds."""
    if len(sums) < len(poolings):
        sums = split_by_feature(sums[0], [pooling.num_samples for pooling in poolings])
    return scale_samples(sums, poolings)


def scale_samples(
    samples: Sequence[Float[Array, "_ dim"]], poolings: Sequence[PoolingSpec]
) -> list[Float[Array, "_ dim"]]:
    """Multiplies each feature's samples by the scales of its combiner."""
    return [
        x if pooling.scales is None else x * pooling.scales[:, None]
        for x, pooling in zip(samples, poolings, strict=True)
    ]


def gather_and_pool(
    pooling: PoolingSpec, rows_at: ReadRows, positions: Int[Array, " ids"]
) -> Float[Array, "samples dim"]:
    """Adds rows up as they come, so that no row is written before it is summed.

    Args:
      pooling: the feature.
      rows_at: reads the rows of some positions.
      positions: the argument of `rows_at` for each id of the feature.
    """
    is_ragged, valence = pooling.sample_ids is not None, pooling.valence
    if is_ragged or not 1 < valence <= _MAX_UNROLLED_VALENCE:
        return _pool(pooling, rows_at(positions))
    terms = [rows_at(of_samples) for of_samples in jnp.split(positions, valence)]
    if pooling.gains is not None:
        gains = jnp.split(pooling.gains, valence)
        terms = [rows * g[:, None] for rows, g in zip(terms, gains, strict=True)]
    return functools.reduce(jnp.add, terms)


def _pool(
    pooling: PoolingSpec, rows: Float[Array, "ids dim"]
) -> Float[Array, "samples dim"]:
    """Sums the rows of each sample, times their gains."""
    if pooling.gains is not None:
        rows = rows * pooling.gains[:, None]
    if pooling.sample_ids is not None:
        return jax.ops.segment_sum(
            rows, pooling.sample_ids, pooling.num_samples, indices_are_sorted=True
        )
    if pooling.valence == 1:
        return rows
    if pooling.valence > _MAX_UNROLLED_VALENCE:
        return rows.reshape(pooling.valence, -1, rows.shape[1]).sum(axis=0)
    # Additions of slices read the rows in place; a reduction copies them first.
    return functools.reduce(jnp.add, jnp.split(rows, pooling.valence))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StackRouting:
    """The ids of a stack on their way to their rows, for both passes. Per shard.

    Attributes:
      keys: int32 `[ids]`, of all features; see `_flatten_to_owners.py`.
      sent: the ids at the owners of their rows; None if this device reads its own rows.
        If the backend replaces the lookup, the gradient adds it.
      backend_ids: what the backend needs of the ids, from `Backend.prepare_ids`.
      poolings: per feature of the stack.
      out_of_range: int32 `[1]` per feature of the stack.
      max_unique_ids: upper bound on the unique ids of a shard.
    """

    keys: Int[Array, " ids"]
    sent: SentIds | None
    backend_ids: Any
    poolings: list[PoolingSpec]
    out_of_range: list[Int[Array, "_"]]
    max_unique_ids: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StackLookup:
    """Result of the lookup of one stack. Per shard.

    Attributes:
      activations: float32 `[samples, dim]` per feature of the stack.
      routing: facts for the backward pass.
      rounds: int32 `[1]`; 0 if the backend looked the rows up without an exchange.
      num_ids: int32 `[1]`, ids of the shard without padding; None if this device reads
        its own rows, which are then not counted.
      requested_rows: int32 `[1, num_shards]`, rows that the shard asks of each owner,
        in all rounds together; or None.
    """

    activations: list[Float[Array, "_ dim"]]
    routing: StackRouting
    rounds: Int[Array, "_"]
    num_ids: Int[Array, "_"] | None = None
    requested_rows: Int[Array, "_ shards"] | None = None


def route_stack(
    inputs: Sequence[FeatureInput],
    features: Sequence[FeaturePlan],
    stack: StackPlan,
) -> StackRouting:
    """Sends the ids of one stack to the owners of their rows. Per shard.

    It reads no table, so it may run before an update of the table.

    Args:
      inputs: ids of each feature of the stack.
      features: their plans.
      stack: plan of the stack.
    """
    keys, poolings, out_of_range = flatten(inputs, features, stack)
    max_unique = max_unique_ids(inputs, features, stack)
    sent = send_ids(keys, max_unique, stack) if stack.sends_ids else None
    return StackRouting(
        keys=keys,
        sent=sent,
        backend_ids=stack.backend.prepare_ids(keys, poolings, stack),
        poolings=poolings,
        out_of_range=[count[None] for count in out_of_range],
        max_unique_ids=max_unique,
    )


def read_stack(
    table: PackedRows, routing: StackRouting, stack: StackPlan
) -> StackLookup:
    """Reads the rows of routed ids, and combines them. Per shard.

    Args:
      table: this shard's rows.
      routing: routed ids of the stack.
      stack: plan of the stack.
    """

    def exchange(table: PackedRows) -> Activations:
        if routing.sent is None and stack.num_shards == 1:
            return _read_own_rows(table, routing, stack), jnp.int32(1)
        return _read_rounds(table, sent_ids(routing, stack), routing.poolings, stack)

    activations, rounds = stack.backend.look_up(
        table, routing.backend_ids, routing.poolings, exchange, stack
    )
    activations, routing = _order(activations, routing)
    sent, counts = routing.sent, {}
    if sent is not None:
        counts["num_ids"] = sent.unique.first_positions[-1:]
        counts["requested_rows"] = jnp.diff(sent.unique.first_ranks)[None]
    return StackLookup(
        activations=activations, routing=routing, rounds=rounds[None], **counts
    )


def sent_ids(routing: StackRouting, stack: StackPlan) -> SentIds:
    """Returns the ids at the owners of their rows, and sends them if need be."""
    if routing.sent is not None:
        return routing.sent
    return send_ids(routing.keys, routing.max_unique_ids, stack)


def _read_own_rows(
    table: PackedRows, routing: StackRouting, stack: StackPlan
) -> list[Float[Array, "_ dim"]]:
    """Pools the rows of a device that owns all of them."""
    sums = pool(
        lambda row_ids: read_local_rows(table, row_ids, stack),
        routing.keys,
        routing.poolings,
        stack.gathers,
    )
    return samples_of(sums, routing.poolings)


def _read_rounds(
    table: PackedRows,
    sent: SentIds,
    poolings: list[PoolingSpec],
    stack: StackPlan,
) -> Activations:
    """Fetches and pools rows, round by round; also returns the number of rounds."""

    def read_round(current: Round) -> list[Array]:
        rows = fetch_rows(table, current.requests, stack)
        return pool_buffer(rows, sent.positions(current), poolings, stack.gathers)

    def add_round(sums: list[Array], current: Round) -> list[Array]:
        return jax.tree.map(jnp.add, sums, read_round(current))

    sums, rounds = fold_later_rounds(add_round, read_round(sent.first), sent, stack)
    return samples_of(sums, poolings), rounds


def _order(
    activations: list[Float[Array, "_ dim"]], routing: StackRouting
) -> tuple[list[Float[Array, "_ dim"]], StackRouting]:
    """Makes the inputs of the update wait for the last read of the table.

    A loss whose derivative needs no activations gives no such order.
    """
    sent = routing.sent
    of_sent = None if sent is None else (sent.unique.order, sent.first)
    needed: Any = routing.keys, routing.backend_ids, of_sent
    activations, (keys, backend_ids, of_sent) = read_before_write((activations, needed))
    if sent is not None:
        order, first = of_sent
        unique = dataclasses.replace(sent.unique, order=order)
        sent = dataclasses.replace(sent, unique=unique, first=first)
    return activations, dataclasses.replace(
        routing, keys=keys, backend_ids=backend_ids, sent=sent
    )
