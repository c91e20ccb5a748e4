"""Deals one device's samples to its SparseCores, and collects the results.

Each SparseCore gets an equal part of every feature's samples, ordered by feature.
"""

import itertools
from collections.abc import Sequence
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from tpu_embedding.lookup._backward import gain_of_each_id
from tpu_embedding.lookup._forward import (
    PoolingSpec,
    samples_of,
    scale_samples,
    split_by_feature,
)
from tpu_embedding.plan.plan import StackPlan
from tpu_embedding.rows.packed_rows import RowLayout, round_up
from tpu_embedding.sparse_core.limits import OperationSizes, choose_limits
from tpu_embedding.sparse_core.partitioned_ids import (
    SampleAt,
    SparseCoreIds,
    partition_ids,
)
from tpu_embedding.types import PADDING_ROW_ID
from tpu_embedding.xla import computed_apart, value_of_range

_SAMPLE_ALIGNMENT: Final = 8
"""A SparseCore's samples are padded to a multiple of this number."""

_RAGGED_HEADROOM: Final = 2
"""Room for a ragged feature's ids, in multiples of the mean count per SparseCore."""

_EMULATED_BYTES: Final = 512 * 1024
"""Memory of an emulated SparseCore's subcore."""


@jax.named_scope("partition")
def ids_by_core(
    keys: Int[Array, " ids"],
    poolings: Sequence[PoolingSpec],
    stack: StackPlan,
    *,
    cores: int,
    max_ids: int | None,
    are_joined: bool,
) -> SparseCoreIds:
    """Sorts ids by SparseCore, and checks whether they fit on all devices."""
    layout, keys = stack.layout, _by_sample(keys, poolings)
    # A key combines the owner, the bank and the row in the bank. A bank is a
    # SparseCore.
    owner, row = jnp.divmod(keys, stack.rows_per_shard)
    core, row = jnp.divmod(row, layout.rows_per_bank)
    partitions = jnp.where(keys == PADDING_ROW_ID, keys, owner * cores + core)
    gains = gain_of_each_id(poolings)
    sizes = OperationSizes(
        num_samples=cores * _samples_per_core(poolings, cores),
        limits=choose_limits(
            sum(_max_ids_of_core(pooling, cores) for pooling in poolings),
            device_ids=sum(pooling.num_ids for pooling in poolings),
            cores=cores,
            num_samples=_samples_per_core(poolings, cores),
            num_partitions=cores * stack.num_shards,
            memory_bytes=stack.hardware.subcore_memory_bytes or _EMULATED_BYTES,
            sends_rows_once=stack.hardware.sends_rows_once,
            max_ids=max_ids,
        ),
        cores=cores,
        axes=stack.shard_axes,
    )
    ids, fits = partition_ids(
        partitions,
        row,
        _sample_at(poolings, cores),
        None if gains is None else _by_sample(gains, poolings),
        sizes,
        rows_per_partition=layout.rows_per_bank,
        devices=stack.num_shards,
        # If every sample has one id, no sample repeats a row. This saves a sort and a
        # loop.
        may_repeat=any(x.sample_ids is not None or x.valence > 1 for x in poolings),
    )
    return SparseCoreIds(ids=ids, fits=fits[None], sizes=sizes, are_joined=are_joined)


def by_feature(
    sums: Float[Array, "samples width"],
    cores: int,
    poolings: Sequence[PoolingSpec],
    dim: int,
) -> list[Float[Array, "_ dim"]]:
    sums = sums.reshape(cores, -1, sums.shape[1])[:, :, :dim]
    result, first = [], 0
    for pooling in poolings:
        size = -(-pooling.num_samples // cores)
        of_feature = sums[:, first : first + size].reshape(-1, dim)
        result.append(of_feature[: pooling.num_samples])
        first += size
    return samples_of(result, poolings)


def by_core(
    cotangents: Sequence[Float[Array, "_ dim"]],
    sizes: OperationSizes,
    poolings: Sequence[PoolingSpec],
    layout: RowLayout,
) -> Float[Array, "samples width"]:
    """Arranges cotangents in the order in which SparseCores hold samples."""
    cores, dealt = sizes.cores, []
    for cotangent in scale_samples(cotangents, poolings):
        missing = -cotangent.shape[0] % cores
        cotangent = jnp.pad(cotangent, ((0, missing), (0, 0)))
        dealt.append(cotangent.reshape(cores, -1, layout.dim))
    gradients = jnp.concatenate(dealt, axis=1)
    missing = sizes.num_samples // cores - gradients.shape[1]
    unused = layout.lanes_per_row - layout.dim
    # Samples are padded to a multiple of 8 per core, and rows to their stored width.
    gradients = jnp.pad(gradients, ((0, 0), (0, missing), (0, unused)))
    return gradients.reshape(sizes.num_samples, -1)


def _max_ids_of_core(pooling: PoolingSpec, cores: int) -> int:
    if pooling.sample_ids is None:
        return -(-pooling.num_samples // cores) * pooling.valence
    # Ragged ids may be spread unevenly over SparseCores. A batch that needs more than
    # this room doesn't fit.
    return min(pooling.num_ids, _RAGGED_HEADROOM * -(-pooling.num_ids // cores))


def _samples_per_core(poolings: Sequence[PoolingSpec], cores: int) -> int:
    sizes = [-(-pooling.num_samples // cores) for pooling in poolings]
    return round_up(sum(sizes), _SAMPLE_ALIGNMENT)


def _by_sample(
    values: Shaped[Array, " ids"], poolings: Sequence[PoolingSpec]
) -> Shaped[Array, " ids"]:
    """Makes the values of each sample contiguous, as `partition_ids` expects."""
    if all(x.sample_ids is not None or x.valence == 1 for x in poolings):
        return values
    by_feature = split_by_feature(values, [pooling.num_ids for pooling in poolings])
    return jnp.concatenate(
        [
            x
            if pooling.sample_ids is not None
            else x.reshape(pooling.valence, -1).T.ravel()
            for x, pooling in zip(by_feature, poolings, strict=True)
        ]
    )


def _sample_at(poolings: Sequence[PoolingSpec], cores: int) -> SampleAt:
    """Builds a function that maps id positions to samples on the SparseCores.

    The ids in a sample must be contiguous.
    """
    shares = [-(-pooling.num_samples // cores) for pooling in poolings]
    first_of_share = list(itertools.accumulate(shares, initial=0))[:-1]
    num_ids = [pooling.num_ids for pooling in poolings]
    first_id = list(itertools.accumulate(num_ids, initial=0))[:-1]
    per_core = _samples_per_core(poolings, cores)

    def by_feature(positions: Array, values: Sequence[int]) -> Array | int:
        # Features often have equal values, for example the same valence. A constant
        # then costs nothing per id.
        is_same = len(set(values)) == 1
        return values[0] if is_same else value_of_range(positions, first_id, values)

    def sample_at(positions: Array) -> Array:
        # Arithmetic instead of a lookup table, because TPUs gather single numbers
        # slowly.
        of_feature = positions - by_feature(positions, first_id)
        of_feature = of_feature // by_feature(
            positions, [pooling.valence for pooling in poolings]
        )
        share = by_feature(positions, shares)
        # `of_feature // share` without a division.
        core = sum((of_feature >= k * share).astype(jnp.int32) for k in range(1, cores))
        sample = by_feature(positions, first_of_share) + of_feature - core * share
        return core * per_core + sample

    if all(pooling.sample_ids is None for pooling in poolings):
        return sample_at
    samples = []
    for pooling, first, share in zip(poolings, first_of_share, shares, strict=True):
        if pooling.sample_ids is None:
            sample = jnp.arange(pooling.num_ids, dtype=jnp.int32) // pooling.valence
        else:
            sample = jnp.minimum(pooling.sample_ids, pooling.num_samples - 1)
        samples.append(sample // share * per_core + first + sample % share)
    table = computed_apart(jnp.concatenate(samples))
    return lambda positions: table.at[positions].get(mode="clip")
