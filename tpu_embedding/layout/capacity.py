"""How many ids a shard may send to each other shard in one round.

Exchange buffers have static shapes. Their size is a question of speed only: what does
not fit travels in further rounds.
"""

import math
from typing import Final

from tpu_embedding.layout.packed_rows import round_up

_DEVIATIONS: Final = 4
"""Room above the mean, in square roots of the mean.

Rows are dealt round-robin, so the unique ids that a shard sends to one destination are
nearly a Poisson count. Over zipf-distributed ids the fullest of all pairs stayed within
this (1.07 times the mean at 8 shards, 1.5 to 2 at 64, 3.5 to 6 at 256)."""

_MULTIPLE: Final = 8
"""Sublanes of a TPU tile; a buffer of another size is padded to it anyway."""


def capacity_for(
    max_unique_ids: int, num_shards: int, rows_per_shard: int, requested: int | None
) -> int:
    """Returns the ids per destination and round.

    Args:
      max_unique_ids: bound on the unique ids that one shard can have in a step.
      num_shards: shards of the table.
      rows_per_shard: rows of the table that one shard owns; no source can ask it for
        more unique ids than that.
      requested: the user's choice, or None for mean + 4 * sqrt(mean).
    """
    bound = max(1, min(max_unique_ids, rows_per_shard))
    if requested is not None:
        return min(requested, bound)
    mean = max(1, max_unique_ids) / num_shards
    capacity = math.ceil(mean + _DEVIATIONS * math.sqrt(mean))
    return min(part_size(capacity) - 1, bound)


def part_size(capacity: int) -> int:
    """Returns the places for one destination in an exchange buffer.

    One more than the ids at least: a place that no id ever takes stands for none.
    """
    return round_up(capacity + 1, _MULTIPLE)
