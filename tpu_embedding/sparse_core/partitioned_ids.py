"""Sorts raw ids into the buffers that the SparseCore operations read.

A SparseCore looks up the samples of its own part of the device's batch. It sends each
partition of the table, which is the rows of one SparseCore of the slice, the ids that
it needs of it. So the ids of a device are sorted by core, partition, row and sample.
They lie in one region of places per core, and the ids of each partition begin at a
multiple of 8.

TensorFlow and jax-tpu-embedding make the same buffers on the host. Like them, ids that
are equal in row and sample are merged into one, whose gain is the sum of theirs.
"""

import dataclasses
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from tpu_embedding.types import PADDING_ROW_ID

ALIGNMENT: Final = 8
"""The ids of a partition begin at a multiple of this, and so does a region.

A core has at least as many pointers, too."""

_WORD: Final = 2**32
"""Number of values of one sort key."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionedIds:
    """The ids of one device, as the SparseCore operations read them. Per shard.

    Attributes:
      pointers: int32 `[cores * max(8, partitions)]`, for each core and partition the
        place after the last id, counted from the beginning of the core's region. If
        there are fewer than 8 partitions, the last pointers repeat the end.
      rows: int32 `[cores * room]`, row of each id within its partition. Unused places
        hold `PADDING_ROW_ID`.
      samples: int32 `[cores * room]`, sample of each id within the samples of its core.
        Unused places hold `PADDING_ROW_ID`.
      gains: float32 `[cores * room]`, factor of the row. Unused places hold NaN.
    """

    pointers: Int[Array, " pointers"]
    rows: Int[Array, " places"]
    samples: Int[Array, " places"]
    gains: Float[Array, " places"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LargestCounts:
    """The largest counts of a device's cores and partitions, int32 scalars. Per shard.

    Attributes:
      ids: ids that one core sends to one partition, equal ids of a sample once.
      unique_rows: distinct rows among them.
      places: places that one core's region needs.
    """

    ids: Int[Array, ""]
    unique_rows: Int[Array, ""]
    places: Int[Array, ""]


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
      room: places of one core's region, a multiple of 8.

    Returns:
      The buffers, and the counts to compare with the limits. Where a count exceeds its
      limit, the buffers lack ids and must not be used.

    Example:
      >>> ids, largest = partition_ids(
      ...     jnp.array([1, 0, 1, 1]), jnp.array([5, 2, 5, 3]), jnp.array([0, 0, 8, 0]),
      ...     jnp.ones(4), num_samples=16, rows_per_partition=8, cores=2, devices=1,
      ...     room=16)
      >>> ids.pointers.reshape(2, 8)[:, :2].tolist()  # a partition begins at a multiple of 8
      [[1, 10], [0, 1]]
      >>> ids.rows[:11].tolist()[:1], ids.rows[8:10].tolist(), int(largest.ids)
      ([2], [3, 5], 2)
    """
    num_partitions = cores * devices
    samples_per_core = num_samples // cores
    is_used = (partitions >= 0) & (partitions < num_partitions)
    core, sample = jnp.divmod(samples, samples_per_core)
    group = jnp.where(is_used, core * num_partitions + partitions, 0)
    num_groups = cores * num_partitions
    order = _stable_order(
        (jnp.where(is_used, sample, 0), samples_per_core),
        (jnp.where(is_used, rows, 0), rows_per_partition),
        (jnp.where(is_used, group, num_groups), num_groups + 1),
    )
    raise NotImplementedError(order)


def _stable_order(*digits: tuple[Int[Array, " ids"], int]) -> Int[Array, " ids"]:
    """Returns the order that sorts ids by several digits, the last of them first.

    Args:
      *digits: values, and how many there are: 0 to that number - 1.
    """
    raise NotImplementedError
