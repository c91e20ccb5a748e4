"""The buffers of the SparseCore operations equal those of plain NumPy."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sparse_core.cases import (
    PAD,
    buffers,
    expected_buffers,
    random_case,
    room_for,
)
from tests.tiers import quick_cases, with_ids
from tpu_embedding.sparse_core.partitioned_ids import partition_ids

SHAPES = quick_cases(
    with_ids(
        {
            f"{cores}cores-{devices}devices": (cores, devices)
            for cores in (1, 2, 4)
            for devices in (1, 2, 3, 8)
        }
    ),
    "4cores-3devices",
    every_case=True,
)


def check(case, room=None):
    room = room or room_for(case)
    ids, counts = buffers(case, room)
    pointers, rows, samples, gains, expected_counts = expected_buffers(case, room)
    assert counts == expected_counts
    np.testing.assert_array_equal(ids.pointers, pointers)
    np.testing.assert_array_equal(ids.rows, rows)
    np.testing.assert_array_equal(ids.samples, samples)
    # Gains of merged ids are summed, in another order.
    np.testing.assert_allclose(ids.gains, gains, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cores, devices", SHAPES)
def test_buffers_equal_plain_numpy(cores, devices):
    check(random_case(cores * 10 + devices, cores, devices))


def test_many_ids_are_padded_for_their_sort():
    check(random_case(0, 2, 1, num_samples=5488, valence=3))  # 16,464 ids


def test_padding_ids_vanish():
    case = random_case(0, 2, 1)
    ids, counts = buffers(dataclasses.replace(case, ids=np.full_like(case.ids, -1)), 64)
    assert counts == (0, 0, 0)
    assert not np.any(np.asarray(ids.pointers))
    assert np.all(np.asarray(ids.rows) == PAD) and np.all(np.isnan(ids.gains))


def test_equal_ids_of_a_sample_are_merged():
    case = random_case(0, 2, 1)
    equal = np.zeros_like(case.ids)
    case = dataclasses.replace(case, ids=equal, samples=equal, gains=equal + 0.5)
    ids, counts = buffers(case, 64)
    assert counts == (1, 1, 8)
    assert float(ids.gains[0]) == 0.5 * equal.size


@pytest.mark.parametrize("word", ["one word", "two words"])
def test_many_rows_need_two_sorts(word):
    case = random_case(3, 2, 1)
    many = {"one word": case.rows_per_partition, "two words": 2**30}[word]
    ids = np.where(case.ids < 0, -1, case.ids * (many // case.rows_per_partition))
    ids = ids // case.num_partitions * case.num_partitions + case.ids % 2
    check(dataclasses.replace(case, ids=ids, rows_per_partition=many))


def test_nothing_is_written_outside_of_a_full_region():
    case = dataclasses.replace(random_case(1, 2, 1), gains=np.ones(48))
    needed = expected_buffers(case, room_for(case))[-1][2]
    room = needed - 8
    ids, counts = buffers(case, room)
    assert counts[2] == needed
    _, rows, *_ = expected_buffers(case, room_for(case))
    fitting = rows.reshape(2, -1)[:, :room]
    np.testing.assert_array_equal(np.asarray(ids.rows).reshape(2, room), fitting)


@settings(max_examples=25)
@given(
    data=st.lists(
        st.tuples(st.integers(-1, 63), st.integers(0, 31)), min_size=24, max_size=24
    )
)
def test_any_ids(data):
    ids, samples = np.asarray(data).T
    case = dataclasses.replace(
        random_case(0, 4, 2),
        ids=ids,
        samples=samples,
        gains=np.ones(24),
        num_samples=32,
        rows_per_partition=8,
    )
    placed, counts = _any(*case.arguments())
    pointers, rows, samples, gains, expected = expected_buffers(case, 80)
    assert tuple(int(x) for x in counts) == expected
    for got, wanted in (
        (placed.pointers, pointers),
        (placed.rows, rows),
        (placed.samples, samples),
        (placed.gains, gains),
    ):
        np.testing.assert_array_equal(got, wanted)


@jax.jit
def _any(*arrays):
    ids, largest = partition_ids(
        *arrays, num_samples=32, rows_per_partition=8, cores=4, devices=2, room=80
    )
    return ids, (largest.ids, largest.unique, largest.positions)
