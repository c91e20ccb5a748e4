"""Chooses how many ids a SparseCore may send to a partition in one minibatch.

Limits are static. If ids exceed them, an operation's results are undefined. So a step's
ids are cut into minibatches that fit, and limits change speed, never results.
"""

import dataclasses
import math
from typing import Final, NamedTuple

from tpu_embedding.rows.packed_rows import round_up

# Each group's ids start at a position that is a multiple of this.
ALIGNMENT: Final = 8

# Maximum number of SparseCores that a program may use with libtpu 0.0.50. A program for
# 8,192 SparseCores needs more memory than each of them has.
MAX_PARTITIONS: Final = 4096

# Maximum number of minibatches in an operation, as in jax-tpu-embedding.
MAX_MINIBATCHES: Final = 64

# Headroom above a partition's mean count, in standard deviations. Rows are dealt
# round-robin, so the number of distinct rows that a core requests from a partition is
# nearly Poisson, with a standard deviation of sqrt(mean).
_HEADROOM_STDDEVS: Final = 6

# If XLA keeps buffers for every id, they have room for this many ids per distinct row.
_SKEW: Final = 4

# Memory per distinct row: 8 columns of its gradient, and one word. XLA processes as
# many columns of the rows at once as fit in memory, but at least 8. The limits
# therefore don't depend on the rows' width.
_BYTES_PER_UNIQUE: Final = 36

# Number of ids per byte of memory. At most 1/128 of the 12-byte ids are in memory at
# once.
_IDS_PER_BYTE: Final = 8

# Memory that the operations need besides their ids, rows and partitions.
_RESERVED_BYTES: Final = 32 * 1024

# Memory that the operations need per partition.
_BYTES_PER_PARTITION: Final = 64

# Minimum number of spare positions for later minibatches, unless fewer are enough.
_MIN_SPARE_ROOM: Final = 4096

# Memory per id (row, sample and gain) if a lookup of wide rows reads a whole partition
# at once.
_MIN_BYTES_PER_ID: Final = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Static sizes for the operations, all multiples of 8.

    Attributes:
      max_ids: ids that one core may send to one partition in a minibatch.
      max_unique: distinct rows among one core's ids for one partition. XLA keeps
        buffers for this many rows, or for `max_ids` rows if it sends a row for every
        id.
      room: id positions in a device's buffers.
    """

    max_ids: int
    max_unique: int
    room: int


class OperationSizes(NamedTuple):
    """Everything static about an operation.

    Attributes:
      num_samples: samples on this device, a multiple of `8 * cores`.
      axes: mesh axes that shard the table. On TPUs, these are all axes in the program.
    """

    num_samples: int
    limits: Limits
    cores: int
    axes: tuple[str, ...]


def choose_limits(
    num_ids: int,
    *,
    device_ids: int,
    num_samples: int,
    num_partitions: int,
    cores: int,
    memory_bytes: int,
    sends_rows_once: bool = True,
    max_ids: int | None = None,
) -> Limits:
    """Chooses limits with enough room for the skew in most batches.

    `num_ids` and `device_ids` are the maximum numbers of ids on one core and on one
    device, without padding. `num_samples` counts the samples on one core.
    `num_partitions` counts the cores of all devices that share the table.
    `memory_bytes`, the memory of a vector subcore, also bounds a `max_ids` set by the
    user.

    Example:
      >>> choose_limits(
      ...     20_480, device_ids=81_920, num_samples=1024, num_partitions=16, cores=4,
      ...     memory_bytes=512 * 1024)
      Limits(max_ids=2520, max_unique=1496, room=92608)
    """
    mean = num_ids / num_partitions
    count = math.ceil(mean + _HEADROOM_STDDEVS * math.sqrt(mean))
    # These bounds follow compiler error E3001, "No viable logical replica count", which
    # counts 36 bytes per distinct row and 12 per id. The bounds are up to 14 % below
    # the largest limits that libtpu 0.0.50 compiles, at widths from 8 to 1,024.
    memory = memory_bytes - _RESERVED_BYTES - _BYTES_PER_PARTITION * num_partitions
    if max_ids is not None:
        count = max_ids
    else:
        # Adds one id per sample, so that every sample may look up the same row. If XLA
        # keeps buffers for every id, `max_ids` is `_SKEW` times `count` instead.
        max_ids = num_samples + count if sends_rows_once else _SKEW * count
    most_ids = (memory_bytes - _RESERVED_BYTES) // _MIN_BYTES_PER_ID
    max_ids = min(num_ids, max_ids, most_ids)
    max_unique = (memory - max_ids // _IDS_PER_BYTE) // _BYTES_PER_UNIQUE
    max_ids = round_up(max(1, max_ids), ALIGNMENT)
    # Each group in a minibatch ends with up to 7 unused positions.
    unused = (ALIGNMENT - 1) * cores * num_partitions
    # On average, a minibatch leaves half of `unused` positions empty, so `4 * unused`
    # is room for 8 more minibatches.
    spare = max(
        device_ids // 8,
        min(4 * unused, device_ids),
        min((MAX_MINIBATCHES - 1) * unused, _MIN_SPARE_ROOM),
    )
    return Limits(
        max_ids=max_ids,
        max_unique=min(max_ids, round_up(max(1, min(count, max_unique)), ALIGNMENT)),
        room=round_up(device_ids + unused + spare, ALIGNMENT),
    )
