"""Chooses how many ids travel in a round, and names the forms of gathers and updates.

Ids and rows travel in static buffers, with a bucket of equal size per destination. Ids
that don't fit travel in a later round, so sizes affect only speed; see
docs/concepts/skew.md. All forms compute the same numbers, up to rounding.
"""

import dataclasses
import math
from typing import Final, Literal

from tpu_embedding.rows.packed_rows import round_up

# Rows are dealt round-robin, so the number of unique ids that a shard sends to one
# destination is nearly Poisson, with a standard deviation of sqrt(mean). With Zipf ids,
# the fullest bucket over all pairs of shards stayed within this headroom (1.07 times
# the mean at 8 shards, 1.5 to 2 at 64, 3.5 to 6 at 256).
_HEADROOM_STDDEVS: Final = 4
"""Bucket headroom above the mean id count, in standard deviations."""

_SUBLANES: Final = 8
"""Rows of a TPU tile. XLA pads buffers to a multiple of this in any case."""

# A bucket whose size is a multiple of this is sent straight from memory. Any other
# bucket is copied first, by code that takes XLA seconds to compile.
LANES: Final = 128
"""32-bit values in one row of a TPU vector register."""

# From this capacity on, rounding up to a multiple of `LANES` adds at most 0.8 %.
_LANE_ALIGNMENT_MIN_IDS: Final = 128 * LANES
"""Minimum capacity at which bucket sizes are rounded up to a multiple of `LANES`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundSize:
    """The static buffer sizes of one exchange round, equal on all shards.

    Attributes:
      capacity: maximum ids that a shard sends to one destination.
      bucket_size: entries per destination. At least one is unused, to mean "no id".
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
    """Sizes the buffers for a step with at most `max_unique_ids` unique ids per shard.

    The user's `capacity` defaults to the mean plus four standard deviations.

    Example:
      >>> round_size(1000, 8, 10**6).buffer_size
      1408
    """
    # A device can't request more unique ids from an owner than the owner has rows.
    bound = max(1, min(max_unique_ids, rows_per_shard))
    if capacity is None:
        mean = max(1, max_unique_ids) / num_shards
        capacity = math.ceil(mean + _HEADROOM_STDDEVS * math.sqrt(mean))
        # The padding that a bucket needs anyway can carry ids at no cost.
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
    is_small = capacity < _LANE_ALIGNMENT_MIN_IDS
    return round_up(capacity + 1, _SUBLANES if is_small else LANES)


Gathers = Literal["whole", "fused", "by_feature"]
"""Form of the gathers that bring rows to samples:

* `"whole"`: one gather for all ids, whose result is written to memory.
* `"fused"`: one gather per id of a sample, which XLA fuses with the sum. Features
  without sums share one gather.
* `"by_feature"`: like `"fused"`, but each feature without a sum has its own gather.
"""

Updates = Literal["whole", "blocks"]
"""Form in which gradients are summed and applied on the device that has their rows:

* `"whole"`: all at once.
* `"blocks"`: in a loop over blocks of ids, whose rows stay in a CPU's cache.
"""
