"""Chooses how many ids travel in a round, and names the forms of gathers and updates.

Ids and rows travel in buckets of equal size, one per destination. These buffers have
static shapes. Their size affects only speed: ids that don't fit spill to a later round.

Rows are pooled and gradients applied in the form that suits the hardware. All forms
give the same numbers up to rounding. The stack's plan chooses them.
"""

import dataclasses
import math
from typing import Final, Literal

from tpu_embedding.rows.packed_rows import round_up

_HEADROOM_STDDEVS: Final = 4
"""Headroom of a bucket above the mean number of ids, in standard deviations.

Rows are dealt round-robin, so the number of unique ids that a shard sends to one
destination is nearly Poisson, with a standard deviation of sqrt(mean). With Zipf
ids, the fullest bucket over all pairs of shards stayed within this headroom
(1.07 times the mean at 8 shards, 1.5 to 2 at 64, 3.5 to 6 at 256)."""

_SUBLANES: Final = 8
"""Rows of a TPU tile. XLA pads buffers to a multiple of this in any case."""

LANES: Final = 128
"""32-bit values in one row of a TPU vector register.

A bucket whose size is a multiple of this is sent straight from memory. Any other
bucket is copied first, by code that takes XLA seconds to compile."""

_LANE_ALIGNMENT_MIN_IDS: Final = 128 * LANES
"""Minimum capacity at which bucket sizes are rounded up to a multiple of `LANES`.

The rounding then adds at most 0.8 %."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundSize:
    """The static buffer sizes of one round of the exchange, equal on all shards.

    Attributes:
      capacity: maximum number of ids that a shard sends to one destination.
      bucket_size: entries per destination. At least one is unused: it means "no id".
      buffer_size: entries of all buckets together.
      unique_rows: upper bound on the distinct rows requested from a shard.
      holds_all: True if no batch can need a second round.
    """

    capacity: int
    bucket_size: int
    buffer_size: int
    unique_rows: int
    holds_all: bool


def round_size(
    max_unique_ids: int,
    num_shards: int,
    rows_per_shard: int,
    *,
    capacity: int | None = None,
) -> RoundSize:
    """Returns the buffer sizes of one round.

    Args:
      max_unique_ids: upper bound on the unique ids of one shard in one step.
      num_shards: number of shards of the table.
      rows_per_shard: rows of the table that one shard owns. A device can't request more
        unique ids than that from one owner.
      capacity: ids per destination and round, as set by the user. Defaults to the mean
        plus four standard deviations, increased to fill the padding of the bucket.

    Example:
      >>> round_size(1000, 8, 10**6).buffer_size
      1408
    """
    bound = max(1, min(max_unique_ids, rows_per_shard))
    if capacity is None:
        mean = max(1, max_unique_ids) / num_shards
        capacity = math.ceil(mean + _HEADROOM_STDDEVS * math.sqrt(mean))
        capacity = _bucket_size(capacity) - 1
    capacity = min(capacity, bound)
    bucket_size = _bucket_size(capacity)
    return RoundSize(
        capacity=capacity,
        bucket_size=bucket_size,
        buffer_size=num_shards * bucket_size,
        unique_rows=min(num_shards * capacity, rows_per_shard),
        holds_all=capacity >= bound,
    )


def _bucket_size(capacity: int) -> int:
    """Returns the entries per destination of an exchange buffer.

    The result exceeds `capacity` by at least 1, because an unused entry stands for "no
    id".
    """
    is_small = capacity < _LANE_ALIGNMENT_MIN_IDS
    return round_up(capacity + 1, _SUBLANES if is_small else LANES)


Gathers = Literal["whole", "fused", "by_feature"]
"""Form of the gathers that bring rows to samples:

* `"whole"`: one gather for all ids, whose result is written to memory. XLA:TPU compiles
  and starts one large gather faster than many small ones, and doesn't fuse any of them
  with the sum.
* `"fused"`: one gather per id of a sample, which XLA fuses with the sum. Features
  without sums share one gather.
* `"by_feature"`: like `"fused"`, but each feature without a sum has its own gather.
  XLA:CPU would write the rows of a shared gather to memory, and copy them to the
  features. (Gathers from an exchange buffer gain nothing by this form, since the rows
  of the buffer are in the cache.)
"""

Updates = Literal["whole", "blocks"]
"""Form in which gradients are summed and applied on the device of their rows:

* `"whole"`: all at once.
* `"blocks"`: in a loop over blocks of ids, whose rows stay in the cache of a CPU.
"""
