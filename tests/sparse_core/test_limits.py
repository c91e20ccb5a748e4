"""The limits hold the expected skew, and stay within the memory of a SparseCore."""

import functools

import pytest

from tpu_embedding.hardware import hardware_by_name
from tpu_embedding.sparse_core import limits as limits_module

MEMORY = 512 * 1024
choose_limits = functools.partial(limits_module.choose_limits, cores=4)


@pytest.mark.parametrize("num_ids", [1, 8, 1000, 10**6])
@pytest.mark.parametrize("num_partitions", [2, 16, 256])
def test_limits_are_multiples_of_8(num_ids, num_partitions):
    limits = choose_limits(
        num_ids,
        device_ids=4 * (num_ids),
        num_samples=256,
        num_partitions=num_partitions,
        memory_bytes=MEMORY,
    )
    for value in (limits.max_ids, limits.max_unique, limits.room):
        assert value > 0 and value % 8 == 0
    assert limits.max_unique <= limits.max_ids
    assert limits.room >= 4 * (num_ids + 7 * num_partitions)


def test_one_id_per_sample_always_fits():
    limits = choose_limits(
        1024,
        device_ids=4 * (1024),
        num_samples=1024,
        num_partitions=16,
        memory_bytes=MEMORY,
    )
    assert limits.max_ids == 1024  # all ids of a core in one partition
    assert limits.max_unique == 64 + 6 * 8


def test_a_row_that_every_sample_asks_for_fits():
    limits = choose_limits(
        20 * 1024,
        device_ids=4 * (20 * 1024),
        num_samples=1024,
        num_partitions=16,
        memory_bytes=MEMORY,
    )
    assert limits.max_ids >= 1024 + 1280


def test_buffers_for_every_id_bound_the_skew():
    limits = choose_limits(
        1024,
        device_ids=4 * (1024),
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
        10**7,
        device_ids=4 * (10**7),
        num_samples=10**6,
        num_partitions=16,
        memory_bytes=memory,
    )
    assert memory // 14 < limits.max_ids < memory // 12
    assert 36 * limits.max_unique + limits.max_ids // 8 < memory
