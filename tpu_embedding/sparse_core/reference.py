"""The SparseCore operations in plain JAX, for devices without SparseCores.

It is strict: where a SparseCore's result is undefined, all results are NaN. So a test
on a CPU sees ids beyond a limit, and buffers that are not as the operations read them.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tpu_embedding.rows.packed_rows import round_up
from tpu_embedding.sparse_core.limits import Limits
from tpu_embedding.sparse_core.partitioned_ids import (
    ALIGNMENT,
    MIN_POINTERS,
    PartitionedIds,
)
from tpu_embedding.sparse_core.row_rule import RowRule
from tpu_embedding.types import PADDING_ROW_ID
from tpu_embedding.xla import read_before_write, run_if


def lookup(
    ids: PartitionedIds,
    table: Float[Array, "rows width"],
    *,
    num_samples: int,
    limits: Limits,
    cores: int,
    axes: tuple[str, ...],
) -> Float[Array, "num_samples width"]:
    """Computes `operations.lookup`: each owner adds its rows to samples of all."""
    asked = _asked_rows(ids, table.shape[0], num_samples, limits, cores, axes)
    rows = table.at[asked.rows].get(mode="fill", fill_value=0)
    sums = jax.ops.segment_sum(
        _times(asked.gains, rows), asked.samples, asked.num_devices * num_samples
    )
    sums = _reduce_scatter(sums.reshape(-1, num_samples, table.shape[1]), axes)
    return jnp.where(asked.is_defined, sums, jnp.nan)


def update(
    ids: PartitionedIds,
    gradients: Float[Array, "num_samples width"],
    arrays: Sequence[Float[Array, "rows width"]],
    hyperparameters: Sequence[Float[Array, ""]],
    *,
    rule: RowRule,
    limits: Limits,
    cores: int,
    axes: tuple[str, ...],
) -> tuple[Float[Array, "rows width"], ...]:
    """Computes `operations.update`: each owner sums the gradients of its rows."""
    num_rows, width = arrays[0].shape
    asked = _asked_rows(ids, num_rows, gradients.shape[0], limits, cores, axes)
    gradients = _all_gather(gradients, axes).reshape(-1, width)
    gradients = _times(asked.gains, gradients[asked.samples])

    rows, order = jax.lax.sort((asked.rows, jnp.arange(asked.rows.size)), num_keys=1)
    is_new = jnp.concatenate([jnp.ones(1, bool), rows[1:] != rows[:-1]])
    rank = jnp.cumsum(is_new) - 1
    sums = jax.ops.segment_sum(gradients[order], rank, rows.size)
    unique = jnp.full(rows.shape, num_rows, jnp.int32).at[rank].set(rows)

    old = [x.at[unique].get(mode="fill", fill_value=0) for x in arrays]
    old, arrays = read_before_write((old, tuple(arrays)))
    new = rule.rows(sums, *old, *hyperparameters)
    results = tuple(
        array.at[unique].set(values, mode="drop")
        for array, values in zip(arrays, new, strict=True)
    )
    return run_if(
        ~asked.is_defined,
        lambda results: tuple(jnp.full_like(x, jnp.nan) for x in results),
        results,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _AskedRows:
    """The rows that all devices ask for, as one device sees them.

    Attributes:
      rows: row of this device; the number of its rows, if another device owns the row
        or the place is unused.
      samples: sample among those of all devices.
      gains: factor of the row; 0 in unused places.
      is_defined: False if a SparseCore's result is undefined on some device.
      num_devices: devices that share the table.
    """

    rows: Int[Array, " n"]
    samples: Int[Array, " n"]
    gains: Float[Array, " n"]
    is_defined: Bool[Array, ""]
    num_devices: int


def _asked_rows(
    ids: PartitionedIds,
    num_rows: int,
    num_samples: int,
    limits: Limits,
    cores: int,
    axes: tuple[str, ...],
) -> _AskedRows:
    """Gathers the ids of all devices, and finds those of this device's rows."""
    num_devices = jax.lax.psum(1, axes) if axes else 1
    device = jax.lax.axis_index(axes) if axes else 0
    places = _read_places(ids, cores, cores * num_devices)
    is_defined = _is_defined(places, num_rows // cores, num_samples // cores, limits)
    if axes:
        is_defined = jax.lax.pmin(is_defined.astype(jnp.int32), axes) > 0
    first_sample = jnp.arange(cores, dtype=jnp.int32) * (num_samples // cores)
    samples = first_sample[:, None] + places.samples + device * num_samples
    owner, core = jnp.divmod(places.partitions, cores)
    rows, owner, samples, gains, is_used = (
        _all_gather(x, axes).reshape(-1)
        for x in (
            core * (num_rows // cores) + places.rows,
            owner,
            samples,
            places.gains,
            places.is_used,
        )
    )
    return _AskedRows(
        rows=jnp.where(is_used & (owner == device), rows, num_rows),
        samples=jnp.where(is_used, samples, 0),
        gains=jnp.where(is_used, gains, 0),
        is_defined=is_defined,
        num_devices=num_devices,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Places:
    """The places of the buffers of one device, `[cores, room]`, and its pointers.

    Attributes:
      partitions: partition that a place belongs to.
      is_used: False in places behind the ids of their partition.
      is_first: True in the first place of a partition.
      rows: see `PartitionedIds`.
      samples: see `PartitionedIds`.
      gains: see `PartitionedIds`.
      starts: first place of each partition, `[cores, partitions]`.
      ends: place after the last id of each partition, `[cores, partitions]`.
      spare_pointers: those after the pointers of all partitions.
    """

    partitions: Int[Array, "cores room"]
    is_used: Bool[Array, "cores room"]
    is_first: Bool[Array, "cores room"]
    rows: Int[Array, "cores room"]
    samples: Int[Array, "cores room"]
    gains: Float[Array, "cores room"]
    starts: Int[Array, "cores partitions"]
    ends: Int[Array, "cores partitions"]
    spare_pointers: Int[Array, "cores _"]


def _read_places(ids: PartitionedIds, cores: int, num_partitions: int) -> _Places:
    num_pointers = max(MIN_POINTERS, num_partitions)
    pointers = ids.pointers.reshape(cores, num_pointers)
    ends = pointers[:, :num_partitions]
    next_starts = round_up(ends, ALIGNMENT)
    starts = jnp.pad(next_starts[:, :-1], ((0, 0), (1, 0)))
    places = jnp.arange(ids.rows.size // cores, dtype=jnp.int32)[None]

    def partitions_of(next_starts: Array) -> Array:
        return jnp.searchsorted(next_starts, places[0], side="right")

    partitions = jax.vmap(partitions_of)(next_starts)
    is_known = partitions < num_partitions
    partitions = jnp.minimum(partitions, num_partitions - 1)
    rows, samples, gains = (
        x.reshape(cores, -1) for x in (ids.rows, ids.samples, ids.gains)
    )
    return _Places(
        partitions=partitions,
        is_used=is_known & (places < jnp.take_along_axis(ends, partitions, axis=1)),
        is_first=places == jnp.take_along_axis(starts, partitions, axis=1),
        rows=rows,
        samples=samples,
        gains=gains,
        starts=starts,
        ends=ends,
        spare_pointers=pointers[:, num_partitions:],
    )


def _is_defined(
    places: _Places, rows_per_core: int, samples_per_core: int, limits: Limits
) -> Bool[Array, ""]:
    """Returns True if a SparseCore's result with such buffers is defined."""
    rows, samples, is_used = places.rows, places.samples, places.is_used
    row_before, sample_before = jnp.roll(rows, 1, axis=1), jnp.roll(samples, 1, axis=1)
    is_new_row = is_used & (places.is_first | (rows != row_before))
    cores = jnp.arange(rows.shape[0])[:, None]
    unique = jnp.zeros_like(places.ends).at[cores, places.partitions].add(
        is_new_row.astype(jnp.int32)
    )
    is_rising = (rows > row_before) | ((rows == row_before) & (samples > sample_before))
    is_id = (
        (places.is_first | is_rising)
        & ((rows >= 0) & (rows < rows_per_core))
        & ((samples >= 0) & (samples < samples_per_core))
        & ~jnp.isnan(places.gains)
    )
    is_padding = (
        (rows == PADDING_ROW_ID) & (samples == PADDING_ROW_ID) & jnp.isnan(places.gains)
    )
    end = places.ends[:, -1:]
    conditions = [
        jnp.where(is_used, is_id, is_padding),
        places.starts <= places.ends,
        places.ends - places.starts <= limits.max_ids,
        unique <= limits.max_unique,
        end <= rows.shape[1],
        places.spare_pointers == round_up(end, ALIGNMENT),
    ]
    return jnp.all(jnp.stack([jnp.all(x) for x in conditions]))


def _times(
    gains: Float[Array, " n"], rows: Float[Array, "n width"]
) -> Float[Array, "n width"]:
    """Returns rows times their gains; zeros where a gain is 0, whatever the row is."""
    return jnp.where(gains[:, None] == 0, 0.0, gains[:, None] * rows)


def _all_gather(values: Array, axes: tuple[str, ...]) -> Array:
    return jax.lax.all_gather(values, axes) if axes else values[None]


def _reduce_scatter(values: Array, axes: tuple[str, ...]) -> Array:
    """Sums the values of all devices; each device gets its entry of the first axis."""
    if not axes:
        return values[0]
    return jax.lax.psum_scatter(values, axes, scatter_dimension=0)
