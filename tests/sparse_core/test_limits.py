"""The limits hold the expected skew, and stay within the memory of a SparseCore."""

import pytest

from tpu_embedding.hardware import hardware_by_name
from tpu_embedding.sparse_core.limits import choose_limits

MEMORY = 512 * 1024


def limits_of(num_ids, **options):
    options = dict(num_samples=1024, num_partitions=16, memory_bytes=MEMORY) | options
    return choose_limits(num_ids, device_ids=4 * num_ids, cores=4, **options)


@pytest.mark.parametrize("num_ids", [1, 8, 1000, 10**6])
@pytest.mark.parametrize("num_partitions", [2, 16, 256])
def test_limits_are_multiples_of_8(num_ids, num_partitions):
    limits = limits_of(num_ids, num_samples=256, num_partitions=num_partitions)
    for value in (limits.max_ids, limits.max_unique, limits.room):
        assert value > 0 and value % 8 == 0
    assert limits.max_unique <= limits.max_ids
    assert limits.room >= 4 * (num_ids + 7 * num_partitions)


def test_skew_fits():
    """One id per sample, a row that all ask for, and buffers for every id."""
    limits = limits_of(1024)
    assert limits.max_ids == 1024  # all ids of a core in one partition
    assert limits.max_unique == 64 + 6 * 8

    assert limits_of(20 * 1024).max_ids >= 1024 + 1280
    limits = limits_of(1024, sends_rows_once=False)
    assert limits.max_ids == 4 * limits.max_unique


@pytest.mark.parametrize("name", ["v5p", "v6e", "tpu7x"])
def test_limits_stay_within_memory(name):
    memory = hardware_by_name(name).subcore_memory_bytes
    limits = limits_of(10**7, num_samples=10**6, memory_bytes=memory)
    assert memory // 14 < limits.max_ids < memory // 12
    assert 36 * limits.max_unique + limits.max_ids // 8 < memory
