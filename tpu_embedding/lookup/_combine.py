"""Stage 5, combine: rows are summed into the samples that use them.

The rows are multiplied by a sparse matrix `[samples, positions]`: the gains of the ids,
scaled per sample by the combiner. `pool_buffer` applies the gains, round by round, and
`samples_of` the scales, once. `_sum_by_row.py` multiplies by the transpose.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpu_embedding.lookup._flatten_to_owners import PoolingSpec, split_by_feature
from tpu_embedding.plan.forms import Gathers
from tpu_embedding.rows.access import gather_lines

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
        beyond the end, and reads the last row of the buffer, which is no id's.
      poolings: the features of the stack.
      gathers: form of the gathers.

    Returns:
      Sums of float32 for `samples_of`; those of several rounds are added. Samples
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
