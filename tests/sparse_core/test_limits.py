"""The limits hold the expected skew, and stay within the memory of a SparseCore."""

import jax.numpy as jnp
import pytest

from tests.sparse_core.cases import on_devices
from tpu_embedding.hardware import hardware_by_name
from tpu_embedding.sparse_core.limits import Limits, are_within, choose_limits
from tpu_embedding.sparse_core.partitioned_ids import LargestCounts

MEMORY = 512 * 1024


@pytest.mark.parametrize("num_ids", [1, 8, 1000, 10**6])
@pytest.mark.parametrize("num_partitions", [2, 16, 256])
def test_limits_are_multiples_of_8(num_ids, num_partitions):
    limits = choose_limits(
        num_ids, num_samples=256, num_partitions=num_partitions, memory_bytes=MEMORY
    )
    for value in (limits.max_ids, limits.max_unique, limits.room):
        assert value > 0 and value % 8 == 0
    assert limits.max_unique <= limits.max_ids
    assert limits.room >= num_ids + 7 * num_partitions


def test_one_id_per_sample_always_fits():
    limits = choose_limits(
        1024, num_samples=1024, num_partitions=16, memory_bytes=MEMORY
    )
    assert limits.max_ids == 1024  # all ids of a core in one partition
    assert limits.max_unique == 64 + 6 * 8


def test_a_row_that_every_sample_asks_for_fits():
    limits = choose_limits(
        20 * 1024, num_samples=1024, num_partitions=16, memory_bytes=MEMORY
    )
    assert limits.max_ids >= 1024 + 1280


def test_buffers_for_every_id_bound_the_skew():
    limits = choose_limits(
        1024,
        num_samples=1024,
        num_partitions=16,
        memory_bytes=MEMORY,
        sends_rows_once=False,
    )
    assert limits.max_ids == 4 * limits.max_unique


@pytest.mark.parametrize("name", ["v5p", "v6e", "tpu7x"])
def test_limits_stay_within_memory(name):
    memory = hardware_by_name(name).subcore_memory_bytes
    limits = choose_limits(
        10**7, num_samples=10**6, num_partitions=16, memory_bytes=memory
    )
    assert memory // 14 < limits.max_ids < memory // 12
    assert 36 * limits.max_unique + limits.max_ids // 8 < memory


@pytest.mark.parametrize("field", ["ids", "unique", "positions"])
def test_one_device_beyond_a_limit_is_seen_by_all(field):
    limits = Limits(max_ids=16, max_unique=8, room=64)
    at_limit = {"ids": 16, "unique": 8, "positions": 64}

    def check(excess):
        counts = {
            name: jnp.int32(value) + (excess if name == field else 0)
            for name, value in at_limit.items()
        }
        return are_within(LargestCounts(**counts), limits, ("shard",))

    run = on_devices(check, 3, 1, 1)
    assert run(jnp.zeros(3, jnp.int32)).tolist() == [True] * 3
    assert run(jnp.array([0, 1, 0])).tolist() == [False] * 3
