"""Bounds of the number of ids per destination and round."""

import math

import pytest

from tpu_embedding.layout.capacity import capacity_for

SIZES = [1, 7, 8, 100, 1000, 2**20, 2**31 - 1]
SHARDS = [1, 2, 3, 8, 512]


@pytest.mark.parametrize("num_shards", SHARDS)
@pytest.mark.parametrize("rows_per_shard", SIZES)
@pytest.mark.parametrize("max_unique_ids", SIZES)
def test_bounds(max_unique_ids, num_shards, rows_per_shard):
    capacity = capacity_for(max_unique_ids, num_shards, rows_per_shard, None)
    bound = min(max_unique_ids, rows_per_shard)
    mean = max_unique_ids / num_shards
    room = mean + 4 * math.sqrt(mean)
    assert isinstance(capacity, int)
    assert 1 <= capacity <= bound
    assert capacity >= min(room, bound)
    # Not much more than the rule says: a step's buffers are num_shards times as long.
    assert capacity < room + 9


@pytest.mark.parametrize(
    ("max_unique_ids", "num_shards", "rows_per_shard", "requested", "expected"),
    [
        (1024, 8, 10**6, None, 175),  # 128 + 4 * 11.3 = 173.3, to 8 n - 1
        (800, 8, 10**6, None, 143),  # 100 + 40 = 140
        (16, 4, 10**6, None, 15),  # 4 + 8 = 12
        (16, 4, 13, None, 13),
        (16, 4, 3, None, 3),
        (1024, 1, 10**6, None, 1024),  # one shard: all of them
        (0, 8, 10, None, 1),
        (0, 8, 10, 5, 1),
        (1024, 8, 10**6, 1, 1),
        (1024, 8, 10**6, 13, 13),  # as asked, not rounded
        (1024, 8, 10**6, 5000, 1024),
        (1024, 8, 100, 5000, 100),
        (1024, 8, 1, 7, 1),
    ],
)
def test_known_values(max_unique_ids, num_shards, rows_per_shard, requested, expected):
    assert (
        capacity_for(max_unique_ids, num_shards, rows_per_shard, requested) == expected
    )


@pytest.mark.parametrize("num_shards", SHARDS)
def test_more_ids_never_get_less_room(num_shards):
    capacities = [capacity_for(n, num_shards, 10**9, None) for n in range(1, 3000, 7)]
    assert capacities == sorted(capacities)


@pytest.mark.parametrize("max_unique_ids", [100, 10_000, 10**6])
def test_more_shards_need_less_room_per_destination(max_unique_ids):
    capacities = [capacity_for(max_unique_ids, n, 10**9, None) for n in SHARDS]
    assert capacities == sorted(capacities, reverse=True)


def test_buffers_grow_with_ids_not_with_shards():
    # The mean times the shards is the number of ids; the rest is the margin.
    num_ids = 2**17
    for num_shards in SHARDS[1:]:
        capacity = capacity_for(num_ids, num_shards, 10**9, None)
        assert num_ids < num_shards * capacity < 1.3 * num_ids
