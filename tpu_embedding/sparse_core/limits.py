"""Chooses how many ids a SparseCore may send to a partition in one minibatch.

The operations have static limits, and are undefined beyond them. A step cuts its ids
into as many minibatches as the limits need, and takes another path if 64 are too few:
limits change the speed, never the result.
"""

import dataclasses
import math
from typing import Final, NamedTuple

from tpu_embedding.rows.packed_rows import round_up

ALIGNMENT: Final = 8
"""The ids of a group begin at a multiple of this position."""

MAX_PARTITIONS: Final = 4096
"""SparseCores of one program that libtpu 0.0.50 takes; 8,192 exceed their memory."""

MAX_MINIBATCHES: Final = 64
"""Minibatches that an operation takes, as in jax-tpu-embedding."""

_HEADROOM_STDDEVS: Final = 6
"""Headroom above the mean count of a partition, in standard deviations.

Rows are dealt round-robin, so the number of distinct rows that a core asks a partition
for is nearly Poisson, with a standard deviation of sqrt(mean)."""

_SKEW: Final = 4
"""Ids per distinct row that fit, where XLA keeps buffers for every id."""

_BYTES_PER_UNIQUE: Final = 36
"""Memory of a distinct row: 8 columns of its gradient, and a word.

XLA takes rows in pieces of as many columns as fit, at least 8. So the width of a row
does not bound the limits."""

_IDS_PER_BYTE: Final = 8
"""Ids that share one byte: each has 12, and at most 1/128 of the ids are there at once.
"""

_RESERVED_BYTES: Final = 32 * 1024
"""Memory that the operations need besides."""

_BYTES_PER_PARTITION: Final = 64
"""Memory that the operations need for each partition."""

_MIN_SPARE_ROOM: Final = 4096
"""Positions for further minibatches, if they can use as many: few beside a batch."""

_MIN_BYTES_PER_ID: Final = 12
"""Memory of an id where a lookup of wide rows reads a whole partition at once: row,
sample and gain."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Static sizes of the operations.

    Attributes:
      max_ids: ids that one core may send to one partition in one minibatch, a multiple
        of 8.
      max_unique: distinct rows among them, a multiple of 8. XLA keeps buffers for so
        many rows of each core and partition; for `max_ids`, if it sends every id's.
      room: positions of a device's buffers of ids, a multiple of 8.
    """

    max_ids: int
    max_unique: int
    room: int


class OperationSizes(NamedTuple):
    """Sizes of an operation that are fixed before a step.

    Attributes:
      num_samples: samples of this device, a multiple of `8 * cores`.
      limits: those that the counts of the ids were compared with.
      cores: SparseCores per device.
      axes: mesh axes whose devices share the table; on TPUs, all of the program.
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
    """Returns limits that hold the skew of most batches.

    Distinct rows may exceed their mean per partition by six standard deviations. Ids
    may exceed it by as many, and by one row per partition that every sample asks for.
    Where XLA keeps buffers for every id, ids may be four times as many as distinct
    rows. `limit / mean` is the skew that a limit holds.

    The bounds by memory follow the compiler's error E3001, "No viable logical replica
    count", whose numbers are 36 bytes for each distinct row and 12 for each id. They
    stay up to 14 % below what libtpu 0.0.50 compiles, at widths of 8 to 1,024.

    Args:
      num_ids: most ids of one core in one step, padding ids left out.
      device_ids: most ids of one device in one step.
      num_samples: samples of one core.
      num_partitions: SparseCores of all devices that share the table.
      cores: SparseCores per device.
      memory_bytes: memory of a SparseCore's vector subcore.
      sends_rows_once: see `HardwareInfo`. False: XLA keeps buffers for every id.
      max_ids: limit that the user gives, for ids and for distinct rows; the memory
        bounds both.

    Example:
      >>> choose_limits(
      ...     20_480, device_ids=81_920, num_samples=1024, num_partitions=16, cores=4,
      ...     memory_bytes=512 * 1024)
      Limits(max_ids=2520, max_unique=1496, room=92608)
    """
    mean = num_ids / num_partitions
    count = math.ceil(mean + _HEADROOM_STDDEVS * math.sqrt(mean))
    memory = memory_bytes - _RESERVED_BYTES - _BYTES_PER_PARTITION * num_partitions
    if max_ids is not None:
        count = max_ids
    else:
        max_ids = num_samples + count if sends_rows_once else _SKEW * count
    most_ids = (memory_bytes - _RESERVED_BYTES) // _MIN_BYTES_PER_ID
    max_ids = min(num_ids, max_ids, most_ids)
    max_unique = (memory - max_ids // _IDS_PER_BYTE) // _BYTES_PER_UNIQUE
    max_ids = round_up(max(1, max_ids), ALIGNMENT)
    # A group of a minibatch ends with up to 7 unused positions.
    unused = (ALIGNMENT - 1) * cores * num_partitions
    # On average they are half as many: room for 8 more minibatches on large slices.
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
