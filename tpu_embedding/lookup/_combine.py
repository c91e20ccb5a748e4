"""Stage 5, combine: rows are summed into the samples that use them.

`combine` multiplies the rows by a sparse matrix `[samples, places]`: the gains of the
ids, scaled per sample by the combiner. `_spread.py` multiplies by its transpose.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpu_embedding.lookup._flatten import PoolingSpec
from tpu_embedding.lookup._sample_lines import sample_lines
from tpu_embedding.plan.backends import BatchBackends
from tpu_embedding.rows.access import gather_rows, gather_sums
from tpu_embedding.rows.packed_rows import PackedRows, clear_last_row

_MAX_UNROLLED_VALENCE: Final = 128
"""Valence up to which each id of a sample is an addition of its own in the program."""


def combine(
    rows: PackedRows,
    places: Int[Array, " all_ids"],
    poolings: Sequence[PoolingSpec],
    backends: BatchBackends,
) -> list[Float[Array, "_ dim"]]:
    """Sums gain-weighted rows into their samples. Per shard; no communication.

    Args:
      rows: rows in the exchange buffer.
      places: place of each id's row in it. An id without a row has a place beyond the
        end, and reads the last place of the buffer, which is no id's.
      poolings: the features of the stack.
      backends: the choice for this batch.

    Returns:
      Float32 activations per feature. Samples without ids are zero.
    """
    # A row of zeros in the last place makes a mask on the gathered rows unnecessary.
    rows = clear_last_row(rows)
    if backends.pool.backend == "xla":
        # One gather for all features: a TPU starts and compiles it faster than many.
        gathered = _split(gather_rows(rows, places), [p.num_ids for p in poolings])
        pooled = [
            _pool(pooling, x, _column(pooling.gains))
            for pooling, x in zip(poolings, gathered, strict=True)
        ]
        return scale_samples(pooled, poolings)
    return scale_samples(_pool_by_kernel(rows, places, poolings, backends), poolings)


def scale_samples(
    samples: Sequence[Float[Array, "_ dim"]], poolings: Sequence[PoolingSpec]
) -> list[Float[Array, "_ dim"]]:
    """Multiplies each feature's samples by the scales of its combiner."""
    return [
        x if pooling.scales is None else x * pooling.scales[:, None]
        for x, pooling in zip(samples, poolings, strict=True)
    ]


def _pool_by_kernel(
    rows: PackedRows,
    places: Int[Array, " all_ids"],
    poolings: Sequence[PoolingSpec],
    backends: BatchBackends,
) -> list[Float[Array, "_ dim"]]:
    """Sums rows within the kernel that reads them; XLA pools features with gains."""
    valences = [pooling.batch_facts.kernel_valence for pooling in poolings]
    remaining = [
        dataclasses.replace(pooling, valence=pooling.valence // valence)
        for pooling, valence in zip(poolings, valences, strict=True)
    ]
    sizes = [pooling.num_ids for pooling in remaining]
    lines = sample_lines(backends, rows.layout)
    if lines is None:
        sums = gather_sums(rows, places, sizes, valences)
        return [
            _pool(pooling, x, _column(pooling.gains))
            for pooling, x in zip(remaining, sums, strict=True)
        ]
    sums = lines.gather(rows, places, sizes, valences)
    return [
        lines.unpack(
            _pool(
                pooling,
                x,
                None if pooling.gains is None else lines.gains(pooling.gains),
            )
        )
        for pooling, x in zip(remaining, sums, strict=True)
    ]


def _pool(
    pooling: PoolingSpec,
    rows: Float[Array, "ids _"],
    gains: Float[Array, "ids _"] | None,
) -> Float[Array, "samples _"]:
    """Sums the rows of each sample, times their gains. Works on lines of rows too."""
    if gains is not None:
        rows = rows * gains
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


def _column(gains: Float[Array, " ids"] | None) -> Float[Array, "ids 1"] | None:
    return None if gains is None else gains[:, None]


def _split(rows: Float[Array, "_ _"], sizes: list[int]) -> list[Float[Array, "_ _"]]:
    return jnp.split(rows, list(itertools.accumulate(sizes))[:-1])
