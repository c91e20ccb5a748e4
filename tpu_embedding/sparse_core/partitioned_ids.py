"""Sorts raw ids into the buffers that the SparseCore operations read.

A SparseCore looks up the samples of its own part of the device's batch. It sends each
partition of the table, which is the rows of one SparseCore of the slice, the ids that
it needs of it. So the ids of a device are sorted by core, partition, row and sample.
They are in one region of positions per core, and the ids of each partition begin at a
multiple of 8.

TensorFlow and jax-tpu-embedding make the same buffers on the host. Like them, ids that
are equal in row and sample are merged into one, whose gain is the sum of theirs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compute_on import compute_on
from jaxtyping import Array, Bool, Float, Int, UInt32

from tpu_embedding.types import PADDING_ROW_ID
from tpu_embedding.xla import computed_apart, running_sum

ALIGNMENT: Final = 8
"""The ids of a partition begin at a multiple of this position."""

MIN_POINTERS: Final = 8
"""A core has at least as many row pointers, even with fewer partitions."""

_WORD: Final = 2**32
"""Number of values of one sort key."""

_LAST_WORD: Final = np.uint32(_WORD - 1)

_MIN_IDS_ON_SPARSE_CORES: Final = 2**14
"""Ids from which they are sorted on SparseCores. The TensorCore's sort of fewer
compiles fast, and libtpu aborts on one of 512 on the SparseCores of tpu7x."""

_SORTED_TILE: Final = 4096
"""Ids that are sorted on SparseCores are padded to a multiple of this."""

_RISING: Final[dict[str, Any]] = dict(indices_are_sorted=True, mode="promise_in_bounds")
"""Options of scatters at positions that rise: XLA:TPU need not sort them."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionedIds:
    """The ids of one device, as the SparseCore operations read them. Per shard.

    Attributes:
      pointers: int32 `[cores * max(8, partitions)]`, for each core and partition the
        position after the last id, counted from the beginning of the core's region. If
        there are fewer than 8 partitions, the spare pointers are the end of all
        positions that are taken, a multiple of 8.
      rows: int32 `[cores * room]`, row of each id within its partition. Unused
        positions hold `PADDING_ROW_ID`.
      samples: int32 `[cores * room]`, sample of each id within the samples of its core.
        Unused positions hold `PADDING_ROW_ID`.
      gains: float32 `[cores * room]`, factor of the row. Unused positions hold NaN.
    """

    pointers: Int[Array, " pointers"]
    rows: Int[Array, " positions"]
    samples: Int[Array, " positions"]
    gains: Float[Array, " positions"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LargestCounts:
    """The largest counts of a device's cores and partitions, int32 scalars. Per shard.

    Attributes:
      ids: ids that one core sends to one partition, equal ids of a sample once.
      unique: distinct rows among them.
      positions: positions that one core's region needs.
    """

    ids: Int[Array, ""]
    unique: Int[Array, ""]
    positions: Int[Array, ""]


@jax.named_scope("partition_ids")
def partition_ids(
    partitions: Int[Array, " ids"],
    rows: Int[Array, " ids"],
    samples: Int[Array, " ids"],
    gains: Float[Array, " ids"],
    *,
    num_samples: int,
    rows_per_partition: int,
    cores: int,
    devices: int,
    room: int,
) -> tuple[PartitionedIds, LargestCounts]:
    """Sorts ids into the buffers of the SparseCore operations. Per shard.

    Args:
      partitions: partition of each id's row, `device * cores + core`. Padding ids have
        any other number, such as `PADDING_ROW_ID`, and vanish.
      rows: row within the partition.
      samples: 0 to `num_samples - 1`. Sample `s` belongs to the core
        `s // (num_samples // cores)` of this device.
      gains: factor of each id's row.
      num_samples: samples of this device, a multiple of `8 * cores`.
      rows_per_partition: rows of each partition.
      cores: SparseCores per device.
      devices: devices that share the table.
      room: positions of one core's region, a multiple of 8.

    Returns:
      The buffers, and the counts to compare with the limits. Where a count exceeds its
      limit, the buffers lack ids and must not be used.

    Example:
      >>> ids, largest = partition_ids(
      ...     jnp.array([1, 0, 1, 1]), jnp.array([5, 2, 5, 3]), jnp.array([0, 0, 8, 0]),
      ...     jnp.ones(4), num_samples=16, rows_per_partition=8, cores=2, devices=1,
      ...     room=16)
      >>> ids.pointers.reshape(2, 8)[:, :2].tolist()
      [[1, 10], [0, 1]]
      >>> ids.rows[jnp.array([0, 8, 9, 16])].tolist(), int(largest.ids)
      ([2, 3, 5, 5], 2)
    """
    num_partitions = cores * devices
    num_groups = cores * num_partitions
    is_used = (partitions >= 0) & (partitions < num_partitions)
    core, sample = jnp.divmod(samples, jnp.int32(num_samples // cores))
    # A group is what one core of this device asks one partition for.
    group = jnp.where(is_used, core * num_partitions + partitions, num_groups)
    order = _order_by(
        (jnp.where(is_used, sample, 0), num_samples // cores),
        (jnp.where(is_used, rows, 0), rows_per_partition),
        (group, num_groups + 1),
    )
    # A gather on SparseCores takes no padding into its fusion: libtpu aborts on tpu7x.
    unsorted = computed_apart((group, rows, sample, gains))
    group, row, sample, gain = (x[order] for x in unsorted)

    counts = _count_groups(group, row, sample, num_groups)
    taken = (-(-counts.ids // ALIGNMENT) * ALIGNMENT).reshape(cores, num_partitions)
    end = jnp.cumsum(taken, axis=1)
    start = end - taken
    position = _positions(group, counts, start, room)

    rows, samples, gains = _in_regions(position, (row, sample, gain), cores, room)
    pointers = start + counts.ids.reshape(cores, num_partitions)
    spare = jnp.repeat(end[:, -1:], max(0, MIN_POINTERS - num_partitions), axis=1)
    ids = PartitionedIds(
        pointers=jnp.concatenate([pointers, spare], axis=1).reshape(-1),
        rows=rows,
        samples=samples,
        gains=gains,
    )
    largest = LargestCounts(
        ids=jnp.max(counts.ids),
        unique=jnp.max(counts.unique),
        positions=jnp.max(end[:, -1]),
    )
    return ids, largest


class _Counts(NamedTuple):
    """Counts of sorted ids; equal ids of a sample are one.

    Attributes:
      before: int32 `[ids + 1]`, ids before each position, and all.
      before_group: int32 `[groups + 1]`, ids before each group, and all.
      ids: int32 `[groups]`, ids of each group.
      unique: int32 `[groups]`, distinct rows among them.
    """

    before: Array
    before_group: Array
    ids: Array
    unique: Array


def _count_groups(
    group: Int[Array, " ids"],
    row: Int[Array, " ids"],
    sample: Int[Array, " ids"],
    num_groups: int,
) -> _Counts:
    """Counts ids and distinct rows of each group; ids are sorted by group and row."""
    is_new_row = _differs(group) | _differs(row)
    is_new_id = is_new_row | _differs(sample)
    bounds = jnp.searchsorted(group, jnp.arange(num_groups + 1, dtype=jnp.int32))
    sums = [jnp.pad(running_sum(x), (1, 0)) for x in (is_new_id, is_new_row)]
    num_ids, num_rows = computed_apart(sums)
    return _Counts(
        before=num_ids,
        before_group=num_ids[bounds],
        ids=jnp.diff(num_ids[bounds]),
        unique=jnp.diff(num_rows[bounds]),
    )


def _positions(
    group: Int[Array, " ids"],
    counts: _Counts,
    start: Int[Array, "cores partitions"],
    room: int,
) -> Int[Array, " ids"]:
    """Returns the position of each sorted id in regions of `room + 1` per core.

    The last position of a region takes ids that do not fit, and padding. So no id is
    placed outside of its region, and the positions rise.

    Args:
      group: group of each id; the number of groups for padding.
      counts: counts of the groups.
      start: position within its region where each group begins.
      room: positions of a region that are used.
    """
    cores, num_partitions = start.shape
    moved_by = start.reshape(-1) - counts.before_group[:-1]
    position = counts.before[1:] - 1 + moved_by.at[group].get(mode="clip")
    core = jnp.minimum(group // num_partitions, cores - 1)
    position = jnp.where(group < start.size, position, room)
    return core * (room + 1) + jnp.minimum(position, room)


def _in_regions(
    position: Int[Array, " ids"], ids: tuple[Array, Array, Array], cores: int, room: int
) -> tuple[Array, Array, Array]:
    """Returns rows, samples and gains in regions of `room` positions per core.

    Args:
      position: position of each id in regions of `room + 1`, see `_positions`.
      ids: row, sample and gain of each id. Gains of equal positions are summed.
      cores: number of regions.
      room: positions of a region.
    """

    def cut(values: Array) -> Array:
        return values.reshape(cores, room + 1)[:, :room].reshape(-1)

    row, sample, gain = ids
    unused = jnp.full((cores * (room + 1),), PADDING_ROW_ID, jnp.int32)
    rows = cut(unused.at[position].set(row, **_RISING))
    samples = cut(unused.at[position].set(sample, **_RISING))
    sums = jnp.zeros(unused.shape, jnp.float32).at[position].add(gain, **_RISING)
    return rows, samples, jnp.where(rows == PADDING_ROW_ID, jnp.nan, cut(sums))


def _order_by(*digits: tuple[Int[Array, " ids"], int]) -> Int[Array, " ids"]:
    """Returns an order that sorts ids by digits, of which the last one counts most.

    The digits are joined to as few words as they fit in. Each word takes a sort of two
    operands; XLA:TPU takes half a minute to compile a sort of four.

    Args:
      *digits: values, and their number: they are 0 to that number - 1.
    """
    words, num_values = [], _WORD + 1
    for digit, size in digits:
        if num_values * size > _WORD:
            words.append(jnp.zeros_like(digit, dtype=jnp.uint32))
            num_values = 1
        words[-1] += digit.astype(jnp.uint32) * np.uint32(num_values)
        num_values *= size
    num_ids = words[0].shape[0]
    if num_ids < _MIN_IDS_ON_SPARSE_CORES:
        return _sort(*words)
    padding = (0, -num_ids % _SORTED_TILE)
    words = [jnp.pad(x, padding, constant_values=_LAST_WORD) for x in words]
    order = jax.lax.platform_dependent(
        *computed_apart(words), tpu=_on_sparse_cores(_sort), default=_sort
    )
    return order[:num_ids]


def _sort(*words: UInt32[Array, " ids"]) -> Int[Array, " ids"]:
    """Returns an order that sorts ids by words, of which the last one counts most."""
    positions = jnp.arange(words[0].shape[0], dtype=jnp.int32)
    # SparseCores sort stably where an operand is the positions themselves.
    _, order = jax.lax.sort((words[0], positions), num_keys=1)
    for word in words[1:]:
        _, then = jax.lax.sort((word[order], positions), num_keys=1)
        order = order[then]
    return order


def _on_sparse_cores(function: Callable[..., Array]) -> Any:
    """Returns a function whose operations XLA:TPU places on the SparseCores.

    Two sorts of 82,000 ids compile in 1.5 s there, and in 24 s on the TensorCore. On
    other devices, and with a jax before 0.12, this is the function itself.
    """
    if jax.__version_info__ < (0, 12):
        return function
    return compute_on(
        function,
        compute_type="tpu_sparsecore",
        out_memory_spaces=jax.memory.Space.Device,
    )


def _differs(values: Int[Array, " ids"]) -> Bool[Array, " ids"]:
    """Returns True where a value differs from the one before it, and at the first."""
    return jnp.concatenate([jnp.ones(1, bool), values[1:] != values[:-1]])
