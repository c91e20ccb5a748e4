"""Sizes of the buffers of a round."""

import math

import pytest

from tpu_embedding.plan.capacity import round_size

SIZES = [0, 1, 8, 1000, 2**20, 2**31 - 1]
SHARDS = [1, 2, 3, 8, 512]


@pytest.mark.parametrize("num_shards", SHARDS)
@pytest.mark.parametrize("rows_per_shard", SIZES[1:])
@pytest.mark.parametrize("max_unique_ids", SIZES)
def test_bounds(max_unique_ids, num_shards, rows_per_shard):
    size = round_size(max_unique_ids, num_shards, rows_per_shard)
    bound = max(1, min(max_unique_ids, rows_per_shard))
    mean = max_unique_ids / num_shards
    room = mean + 4 * math.sqrt(mean)
    assert 1 <= size.capacity <= bound
    assert size.capacity >= min(room, bound)
    # Not much more than the rule says: a step's buffers are num_shards times as long.
    multiple = 8 if size.capacity < 16_384 else 128
    assert size.capacity < max(room, 5) + multiple + 1
    # The last place is no id's, and each shard may send something in each round.
    assert size.buffer_size > num_shards * size.capacity
    assert size.unique_rows <= min(size.buffer_size, rows_per_shard)
    if size.holds_all:
        assert size.capacity == bound


def test_known_capacities():
    # 128 + 4 * 11.3 = 173.3, to 8 n - 1
    assert round_size(1024, 8, 10**6).capacity == 175
    # A capacity that the user set is not rounded, but is bounded by the rows.
    assert round_size(1024, 8, 10**6, capacity=13).capacity == 13
    assert round_size(1024, 8, 100, capacity=5000).capacity == 100
