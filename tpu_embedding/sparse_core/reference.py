"""The SparseCore operations in plain JAX, for devices without SparseCores.

If a SparseCore's result would be undefined, all results are NaN. Tests on CPUs
therefore catch malformed buffers, and ids that exceed a limit.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tpu_embedding.sparse_core.limits import ALIGNMENT, OperationSizes
from tpu_embedding.sparse_core.partitioned_ids import (
    MIN_POINTERS,
    PartitionedIds,
    partition_ids,
)
from tpu_embedding.sparse_core.row_rule import RowRule
from tpu_embedding.types import PADDING_ROW_ID
from tpu_embedding.xla import read_before_write, run_if


def lookup(
    ids: PartitionedIds, table: Float[Array, "rows width"], sizes: OperationSizes
) -> Float[Array, "num_samples width"]:
    """Emulates `operations.lookup`. Owners add rows to the samples on all devices."""
    num_rows, width = table.shape
    asked = _asked_rows(ids, num_rows, sizes)
    # For requests to other devices, the row number is past the end, so they read zeros.
    rows = table.at[asked.rows].get(mode="fill", fill_value=0)
    rows = asked.gains[:, None] * rows
    num_devices = asked.rows.size // ids.rows.size
    sums = jax.ops.segment_sum(rows, asked.samples, num_devices * sizes.num_samples)
    sums = sums.reshape(num_devices, sizes.num_samples, width)
    sums = jax.lax.psum_scatter(sums, sizes.axes)
    return jnp.where(asked.is_defined, sums, jnp.nan)


def update(
    ids: PartitionedIds,
    gradients: Float[Array, "num_samples width"],
    arrays: Sequence[Float[Array, "rows width"]],
    hyperparameters: Sequence[Float[Array, ""]],
    rule: RowRule,
    sizes: OperationSizes,
) -> tuple[Float[Array, "rows width"], ...]:
    """Emulates `operations.update`. Owners sum gradients by row."""
    num_rows, width = arrays[0].shape
    asked = _asked_rows(ids, num_rows, sizes)
    gradients = jnp.where(asked.is_defined, gradients, jnp.nan)
    gradients = jax.lax.all_gather(gradients, sizes.axes, tiled=True)
    gradients = asked.gains[:, None] * gradients[asked.samples]

    # One gradient per row, because the operation applies the rule once to each row.
    rows, order = jax.lax.sort((asked.rows, jnp.arange(asked.rows.size)), num_keys=1)
    is_new = jnp.concatenate([jnp.ones(1, bool), rows[1:] != rows[:-1]])
    rank = jnp.cumsum(is_new) - 1
    sums = jax.ops.segment_sum(gradients[order], rank, rows.size)
    unique = jnp.full(rows.shape, num_rows, jnp.int32).at[rank].set(rows)

    old = [x.at[unique].get(mode="fill", fill_value=0) for x in arrays]
    # If writes could come first, XLA might copy the arrays to preserve the old rows.
    old, arrays = read_before_write((old, tuple(arrays)))
    new = rule.rows(sums, *old, *hyperparameters)
    results = tuple(
        array.at[unique].set(values, mode="drop")
        for array, values in zip(arrays, new, strict=True)
    )
    # `run_if` works in place, but `jax.lax.cond` would copy whole tables.
    return run_if(
        ~asked.is_defined,
        lambda results: tuple(jnp.full_like(x, jnp.nan) for x in results),
        results,
    )


class _AskedRows(NamedTuple):
    """The rows that all devices request from this device.

    Attributes:
      rows: local rows. Unused positions and requests to other devices hold the row
        count.
      samples: sample numbers, counted over all devices.
      gains: gain of each request, or 0 in unused positions.
      is_defined: False if a SparseCore's result would be undefined on any device.
    """

    rows: Int[Array, " n"]
    samples: Int[Array, " n"]
    gains: Float[Array, " n"]
    is_defined: Bool[Array, ""]


def _asked_rows(
    ids: PartitionedIds, num_rows: int, sizes: OperationSizes
) -> _AskedRows:
    cores, axes = sizes.cores, sizes.axes
    device, rows_per_core = jax.lax.axis_index(axes), num_rows // cores
    core, partitions = _groups_of_positions(ids, sizes)
    is_used = partitions != PADDING_ROW_ID
    first_sample = core * (sizes.num_samples // cores)
    samples = jnp.where(is_used, first_sample + ids.samples, 0)
    is_defined = _is_defined(ids, partitions, samples, rows_per_core, sizes)
    # Makes the collectives below wait for the earlier ones. Otherwise, XLA:CPU may
    # deadlock.
    is_used &= is_defined
    partitions = jnp.where(is_defined, partitions, PADDING_ROW_ID)
    samples = jnp.where(is_defined, samples, 0)
    partitions, rows, samples, gains = (
        jax.lax.all_gather(x, axes, tiled=True)
        for x in (
            partitions,
            partitions % cores * rows_per_core + ids.rows,
            samples + device * sizes.num_samples,
            jnp.where(is_used, ids.gains, 0),
        )
    )
    rows = jnp.where(partitions // cores == device, rows, num_rows)
    return _AskedRows(rows, samples, gains, is_defined)


def _groups_of_positions(
    ids: PartitionedIds, sizes: OperationSizes
) -> tuple[Int[Array, " positions"], Int[Array, " positions"]]:
    """Finds each position's core and partition.

    The partition of an unused position is `PADDING_ROW_ID`.
    """
    cores, room = sizes.cores, ids.rows.size
    num_partitions = cores * jax.lax.psum(1, sizes.axes)
    size = max(MIN_POINTERS, num_partitions)
    positions = jnp.arange(room, dtype=jnp.int32)
    aligned = -(-ids.pointers // ALIGNMENT) * ALIGNMENT
    pointer = jnp.searchsorted(aligned, positions, side="right").astype(jnp.int32)
    end = ids.pointers.at[pointer].get(mode="fill", fill_value=0)
    minibatch, partition = pointer // size, pointer % size
    core = minibatch // ids.num_minibatches[0]
    is_used = (positions < end) & (partition < num_partitions) & (core < cores)
    return core, jnp.where(is_used, partition, PADDING_ROW_ID)


def _is_defined(
    ids: PartitionedIds,
    partitions: Int[Array, " positions"],
    samples: Int[Array, " positions"],
    rows_per_core: int,
    sizes: OperationSizes,
) -> Bool[Array, ""]:
    """Tells every device whether results are defined on all devices."""
    # Buffers are well formed if partitioning their ids again gives the same buffers.
    again, fits = partition_ids(
        partitions,
        ids.rows,
        lambda positions: samples[positions],
        ids.gains,
        sizes,
        rows_per_partition=rows_per_core,
        devices=jax.lax.psum(1, sizes.axes),
    )
    has_row = (ids.rows >= 0) & (ids.rows < rows_per_core)
    has_sample = (ids.samples >= 0) & (ids.samples < sizes.num_samples // sizes.cores)
    is_sound = has_row & has_sample & ~jnp.isnan(ids.gains)
    is_same = [
        jnp.array_equal(x, y, equal_nan=x.dtype == jnp.float32)
        for x, y in zip(jax.tree.leaves(ids), jax.tree.leaves(again), strict=True)
    ]
    is_defined = jnp.all(is_sound | (partitions == PADDING_ROW_ID))
    is_defined &= jnp.all(jnp.stack(is_same)) & fits
    return jax.lax.pmin(is_defined.astype(jnp.int32), sizes.axes) > 0
