"""The samples of a stack, dealt to SparseCores and back. Per shard.

XLA's embedding operations take ids sorted by the SparseCore of the sample and the one
of the row, and at most some ids of each pair. `SparseCoreIds.fits` says, equally on all
devices, whether this batch keeps within that limit.

The samples of each feature are dealt to the SparseCores of their device in equal parts,
so each looks up its share of every feature.
"""

from collections.abc import Sequence
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tpu_embedding.lookup._backward import gain_of_each_id
from tpu_embedding.lookup._forward import PoolingSpec, samples_of, scale_samples
from tpu_embedding.plan.plan import StackPlan
from tpu_embedding.rows.packed_rows import RowLayout, round_up
from tpu_embedding.sparse_core.limits import (
    Limits,
    OperationSizes,
    SparseCoreIds,
    are_within,
    choose_limits,
)
from tpu_embedding.sparse_core.partitioned_ids import partition_ids
from tpu_embedding.types import PADDING_ROW_ID

_SAMPLE_ALIGNMENT: Final = 8
"""The samples of a SparseCore are a multiple of it."""

_RAGGED_HEADROOM: Final = 2
"""Room for the ids of a ragged feature, in multiples of the mean of a SparseCore."""

_EMULATED_BYTES: Final = 512 * 1024
"""Memory of a SparseCore's subcore, on devices without."""


@jax.named_scope("partition")
def ids_by_core(
    keys: Int[Array, " ids"],
    poolings: Sequence[PoolingSpec],
    stack: StackPlan,
    *,
    cores: int,
    max_ids: int | None,
) -> SparseCoreIds:
    """Sorts ids by SparseCore, and checks the limits on all devices. Per shard.

    Args:
      keys: keys of all features; see `_forward.py`.
      poolings: the features of the stack.
      stack: plan of the stack.
      cores: SparseCores per device.
      max_ids: the user's limit. None takes as many as the batch needs.
    """
    layout = stack.layout
    owner, row = jnp.divmod(keys, stack.rows_per_shard)
    core, row = jnp.divmod(row, layout.rows_per_bank)
    partitions = jnp.where(keys == PADDING_ROW_ID, keys, owner * cores + core)
    gains = gain_of_each_id(poolings)
    sizes = OperationSizes(
        num_samples=cores * _samples_per_core(poolings, cores),
        limits=_limits_of(poolings, stack, cores, max_ids),
        cores=cores,
        axes=stack.shard_axes,
    )
    ids, largest = partition_ids(
        partitions,
        row,
        _samples_of_ids(poolings, cores),
        jnp.ones(keys.shape, jnp.float32) if gains is None else gains,
        num_samples=sizes.num_samples,
        cores=cores,
        rows_per_partition=layout.rows_per_bank,
        devices=stack.num_shards,
        room=sizes.limits.room,
    )
    # Gains of equal ids of a sample are summed, and may overflow.
    is_finite = jnp.all(jnp.isfinite(ids.gains) | (ids.rows == PADDING_ROW_ID))
    fits = are_within(largest, sizes.limits, stack.sample_axes, is_finite)
    return SparseCoreIds(ids=ids, fits=fits[None], sizes=sizes)


def by_feature(
    sums: Float[Array, "samples width"],
    cores: int,
    poolings: Sequence[PoolingSpec],
    dim: int,
) -> list[Float[Array, "_ dim"]]:
    """Returns the activations of each feature, given the sums of all samples."""
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
    """Returns the cotangents of features in the order of SparseCores' samples."""
    cores, dealt = sizes.cores, []
    for cotangent in scale_samples(cotangents, poolings):
        missing = -cotangent.shape[0] % cores
        cotangent = jnp.pad(cotangent, ((0, missing), (0, 0)))
        dealt.append(cotangent.reshape(cores, -1, layout.dim))
    gradients = jnp.concatenate(dealt, axis=1)
    missing = sizes.num_samples // cores - gradients.shape[1]
    unused = layout.lanes_per_row - layout.dim
    gradients = jnp.pad(gradients, ((0, 0), (0, missing), (0, unused)))
    return gradients.reshape(sizes.num_samples, -1)


def _limits_of(
    poolings: Sequence[PoolingSpec], stack: StackPlan, cores: int, max_ids: int | None
) -> Limits:
    """Returns the limits of the operations, or those that the user gives."""
    return choose_limits(
        sum(_max_ids_of_core(pooling, cores) for pooling in poolings),
        num_samples=_samples_per_core(poolings, cores),
        num_partitions=cores * stack.num_shards,
        memory_bytes=stack.hardware.subcore_memory_bytes or _EMULATED_BYTES,
        sends_rows_once=stack.hardware.sends_rows_once,
        max_ids=max_ids,
    )


def _max_ids_of_core(pooling: PoolingSpec, cores: int) -> int:
    """Returns the ids of a feature that one SparseCore has room for.

    Samples of different lengths may be spread unevenly. A batch that needs more room
    does not fit.
    """
    if pooling.sample_ids is None:
        return -(-pooling.num_samples // cores) * pooling.valence
    return min(pooling.num_ids, _RAGGED_HEADROOM * -(-pooling.num_ids // cores))


def _samples_per_core(poolings: Sequence[PoolingSpec], cores: int) -> int:
    sizes = [-(-pooling.num_samples // cores) for pooling in poolings]
    return round_up(sum(sizes), _SAMPLE_ALIGNMENT)


def _samples_of_ids(poolings: Sequence[PoolingSpec], cores: int) -> Int[Array, " ids"]:
    """Returns the sample of each id, in the order in which they are dealt."""
    per_core = _samples_per_core(poolings, cores)
    samples, first = [], 0
    for pooling in poolings:
        size = -(-pooling.num_samples // cores)

        def deal(sample, first=first, size=size):
            return sample // size * per_core + first + sample % size

        samples.append(pooling.samples_of_ids(deal))
        first += size
    return jnp.concatenate(samples)
