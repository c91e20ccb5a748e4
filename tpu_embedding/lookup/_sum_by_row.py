"""Stages 6 and 7, spread and merge: sum the gradients of equal rows.

`spread` runs at the source. It is the transpose of `combine`: each id adds its sample's
cotangent, times gain and scale, to the gradient of its row in the exchange buffer.
`merge` runs at the owner, which gets gradients of one row from several devices.

`merge` sorts many rows, which brings the occurrences of a row together: the first one,
then its *repeats*. The sum of a row starts as the value of its first occurrence, so no
buffer of zeros is needed. A loop then adds the repeats, one chunk of them per
iteration. It ends when no repeat is left.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tpu_embedding.lookup._dedup import rank_unique, unsort
from tpu_embedding.lookup._flatten_to_owners import PoolingSpec
from tpu_embedding.lookup._forward import scale_samples
from tpu_embedding.plan.capacity import LANES
from tpu_embedding.rows.access import gather_lines
from tpu_embedding.rows.packed_rows import gather_in_bounds, round_up
from tpu_embedding.rows.row_gradients import RowGradients
from tpu_embedding.types import PADDING_ROW_ID
from tpu_embedding.xla import forward_fill

_MAX_CHUNKS: Final = 8
"""Maximum iterations of the loop, reached if almost all occurrences are repeats."""

_MIN_CHUNK_SIZE: Final = 8 * LANES
"""Minimum repeats per iteration, so that few ids take one iteration only."""

ReadCotangents = Callable[[Int[Array, " n"]], Float[Array, "n dim"]]
"""Returns the cotangent of each id, times its gain."""


@jax.named_scope("spread")
def spread(
    cotangents_of: ReadCotangents,
    order: Int[Array, " ids"],
    positions: Int[Array, " ids"],
    buffer_size: int,
) -> Float[Array, "buffer dim"]:
    """Sums the cotangents of all samples that used a row. Per shard; no communication.

    The cotangent of each row's first id is gathered; those of its repeats are added.

    Args:
      cotangents_of: reads the cotangents of ids, from `cotangent_reader`.
      order: position of each id before sorting by row.
      positions: position of the row of each sorted id in the exchange buffer;
        `buffer_size` if the id is not part of the round.
      buffer_size: rows of the exchange buffer.

    Returns:
      The gradient of each row of the exchange buffer. Unused positions hold anything.
    """
    is_first = jnp.diff(positions, prepend=-1) != 0
    first_ids = jnp.zeros((buffer_size,), jnp.int32)
    first_ids = first_ids.at[jnp.where(is_first, positions, buffer_size)].set(
        order, mode="drop", wrap_negative_indices=False
    )
    return _add_repeats(
        cotangents_of(first_ids),
        ~is_first & (positions < buffer_size),
        positions=positions,
        value_ids=order,
        read_values=lambda _, ids: cotangents_of(ids),
    )


def cotangent_reader(
    cotangents: Sequence[Float[Array, "_ dim"]],
    poolings: Sequence[PoolingSpec],
) -> ReadCotangents:
    """Returns a function that gathers the cotangents of ids, times gain and scale.

    Args:
      cotangents: per feature of the stack.
      poolings: the features of the stack.
    """
    samples = jnp.concatenate(scale_samples(cotangents, poolings))
    sample_ids, gains = _sample_of_each_id(poolings), gain_of_each_id(poolings)

    def cotangents_of(ids: Int[Array, " n"]) -> Float[Array, "n dim"]:
        sample = ids if sample_ids is None else gather_in_bounds(sample_ids, ids)
        rows = gather_lines(samples, sample)
        return rows if gains is None else rows * gather_in_bounds(gains, ids)[:, None]

    return cotangents_of


def _sample_of_each_id(
    poolings: Sequence[PoolingSpec],
) -> Int[Array, " all_ids"] | None:
    """Numbers the samples of all features; None if each has one id, in order."""
    if all(p.sample_ids is None and p.valence == 1 for p in poolings):
        return None
    sizes = [pooling.num_samples for pooling in poolings]
    firsts = itertools.accumulate(sizes[:-1], initial=0)
    return jnp.concatenate(
        [
            pooling.samples_of_ids(functools.partial(jnp.add, first))
            for pooling, first in zip(poolings, firsts, strict=True)
        ]
    )


def gain_of_each_id(
    poolings: Sequence[PoolingSpec],
) -> Float[Array, " all_ids"] | None:
    """Returns the gains of all features; None if every id has gain 1."""
    if all(pooling.gains is None for pooling in poolings):
        return None
    return jnp.concatenate(
        [
            jnp.ones((p.num_ids,), jnp.float32) if p.gains is None else p.gains
            for p in poolings
        ]
    )


@jax.named_scope("merge")
def merge(
    row_ids: Int[Array, " buffer"],
    gradients: Float[Array, "buffer dim"],
    num_rows: int,
) -> RowGradients:
    """Sums the gradients of equal rows. Per shard; no communication.

    Args:
      row_ids: int32 `[buffer]`, local rows as received; `PADDING_ROW_ID` where unused.
      gradients: their gradients, in the same positions.
      num_rows: upper bound on the number of distinct rows.

    Returns:
      The sums. Each row appears once, in any order; other positions hold padding.
    """
    if 2 * num_rows <= row_ids.shape[0]:
        return _merge_few_rows(row_ids, gradients, num_rows)
    (sorted_ids,), order, ranks = rank_unique(row_ids)
    is_first = jnp.diff(ranks, prepend=-1) > 0
    is_repeat = ~is_first & (sorted_ids != PADDING_ROW_ID)
    sums = _add_repeats(
        gradients,
        is_repeat,
        positions=forward_fill(jnp.where(is_first, order, -1)),
        value_ids=order,
        # Only the sums of first occurrences change. The positions of repeats still hold
        # the gradients that were received.
        read_values=gather_lines,
    )
    unique_ids = unsort(jnp.where(is_repeat, PADDING_ROW_ID, sorted_ids), order)
    return RowGradients(row_ids=unique_ids, values=sums)


def _merge_few_rows(
    row_ids: Int[Array, " buffer"],
    gradients: Float[Array, "buffer dim"],
    num_rows: int,
) -> RowGradients:
    """Sums in a buffer of `num_rows`, which is shorter than the received buffer."""
    (sorted_ids,), order, ranks = rank_unique(row_ids)
    ranks = jnp.where(sorted_ids == PADDING_ROW_ID, num_rows, ranks)
    unique_ids = jnp.full((num_rows,), PADDING_ROW_ID, jnp.int32)
    sums = jnp.zeros((num_rows, gradients.shape[1]), gradients.dtype)
    sums = sums.at[unsort(ranks, order)].add(
        gradients, mode="drop", wrap_negative_indices=False
    )
    return RowGradients(
        row_ids=unique_ids.at[ranks].set(
            sorted_ids, mode="drop", wrap_negative_indices=False
        ),
        values=sums,
    )


def _add_repeats(
    sums: Float[Array, "rows dim"],
    is_repeat: Bool[Array, " n"],
    positions: Int[Array, " n"],
    value_ids: Int[Array, " n"],
    read_values: Callable[[Array, Int[Array, " chunk"]], Float[Array, "chunk dim"]],
) -> Float[Array, "rows dim"]:
    """Adds the values of repeats to the sums of their rows. Per shard; in place.

    Args:
      sums: values of the first occurrences, each at the position of its row.
      is_repeat: bool `[n]`, True for repeats. Occurrences may be in any order.
      positions: int32 `[n]`, position of each occurrence's row in `sums`.
      value_ids: int32 `[n]`, the argument of `read_values` for each occurrence.
      read_values: called as `read_values(sums, value_ids)` with the sums so far and
        the ids of a chunk; returns the values of that chunk.
    """
    num_positions = sums.shape[0]
    num_occurrences = is_repeat.shape[0]
    num_repeats = jnp.sum(is_repeat, dtype=jnp.int32)
    chunk_size = round_up(-(-num_occurrences // _MAX_CHUNKS), LANES)
    chunk_size = min(max(chunk_size, _MIN_CHUNK_SIZE), num_occurrences)
    # A sort moves repeats to the front: a TPU scatters single integers slowly.
    positions, value_ids = jax.lax.sort(
        (jnp.where(is_repeat, positions, num_positions), value_ids),
        num_keys=1,
        is_stable=False,
    )
    positions = jnp.pad(positions, (0, chunk_size), constant_values=num_positions)
    value_ids = jnp.pad(value_ids, (0, chunk_size))

    def add_chunk(carry):
        start, sums = carry
        chunk_ids = jax.lax.dynamic_slice_in_dim(value_ids, start, chunk_size)
        rows = jax.lax.dynamic_slice_in_dim(positions, start, chunk_size)
        values = read_values(sums, chunk_ids)
        sums = sums.at[rows].add(
            values, mode="drop", indices_are_sorted=True, wrap_negative_indices=False
        )
        return start + chunk_size, sums

    _, sums = jax.lax.while_loop(
        lambda carry: carry[0] < num_repeats, add_chunk, (jnp.int32(0), sums)
    )
    return sums
