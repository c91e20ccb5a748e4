"""The buffers of the SparseCore operations equal plain NumPy's."""

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
    limits_for,
    minibatches_of,
    on_devices,
    partition,
    random_case,
)
from tests.tiers import quick_cases, with_ids
from tpu_embedding.sparse_core.limits import Limits

SHAPES = quick_cases(
    with_ids(
        {
            f"{cores}cores-{devices}devices": (cores, devices)
            for cores in (1, 2, 4)
            for devices in (1, 2, 3, 8)
        }
    ),
    "4cores-2devices",
)


def check(cases, limits=None, may_repeat=True):
    """Compares the buffers of each device; returns the number of minibatches."""
    limits = limits or limits_for(cases[0])
    ends = minibatches_of(cases, limits)
    all_ids, fits = buffers(cases, limits, may_repeat)
    assert fits == [ends is not None] * len(cases)
    if ends is None:
        return None
    for case, ids in zip(cases, all_ids, strict=True):
        pointers, rows, samples, gains = expected_buffers(case, limits.room, ends)
        assert ids.num_minibatches.tolist() == [len(ends)]
        np.testing.assert_array_equal(ids.pointers, pointers)
        np.testing.assert_array_equal(ids.rows, rows)
        np.testing.assert_array_equal(ids.samples, samples)
        # Gains of merged ids are summed, in another order.
        np.testing.assert_allclose(ids.gains, gains, rtol=1e-6, atol=1e-6)
    return len(ends)


@pytest.mark.parametrize("cores, devices", SHAPES)
def test_buffers_equal_plain_numpy(cores, devices):
    assert check([random_case(cores * 10 + devices, cores, devices)]) == 1


def cases_of_devices(seed, cores, devices, **options):
    """Draws the ids of each device, for one table."""
    cases = [random_case(seed + i, cores, devices, **options) for i in range(devices)]
    rows = max(case.rows_per_partition for case in cases)
    return [dataclasses.replace(case, rows_per_partition=rows) for case in cases]


@pytest.mark.parametrize("devices", quick_cases([1, 2, 3, 8], "2"))
def test_all_devices_cut_the_same_minibatches(devices):
    cases = cases_of_devices(40 + devices, 2, devices, num_samples=64)
    counts = [
        check(cases, limits_for(cases[0], max_ids, max_unique))
        for max_ids, max_unique in ((64, 1), (8, 8), (24, 3), (64, 64))
    ]
    assert counts[0] == cases[0].rows_per_partition > counts[2] > counts[3] == 1


def test_a_row_with_more_ids_than_the_limit_does_not_fit():
    case = random_case(0, 2, 1, valence=1)
    zeros = np.zeros_like(case.ids)
    equal = dataclasses.replace(case, ids=zeros, samples=np.sort(case.samples))
    assert check([equal], limits_for(equal, max_ids=8)) == 1
    assert check([equal], limits_for(equal, max_ids=7)) is None


def test_more_than_64_minibatches_do_not_fit():
    case = dataclasses.replace(
        random_case(0, 1, 1),
        ids=np.arange(65),
        samples=np.arange(65),
        gains=np.ones(65),
        num_samples=72,
        rows_per_partition=65,
    )
    assert check([case], limits_for(case, max_unique=1)) is None
    fewer = dataclasses.replace(case, ids=np.minimum(case.ids, 63))
    assert check([fewer], limits_for(case, max_unique=1)) == 64


def test_gains_beyond_float32_do_not_fit():
    case = random_case(0, 2, 1)
    gains = np.where(case.ids == case.ids.max(), np.inf, 1.0)
    _, fits = buffers([dataclasses.replace(case, gains=gains)], limits_for(case))
    assert fits == [False]
    gains = np.where(case.ids < 0, np.nan, 1.0)  # of padding
    _, fits = buffers([dataclasses.replace(case, gains=gains)], limits_for(case))
    assert fits == [True]


@pytest.mark.full
@pytest.mark.parametrize("cores, devices", quick_cases([(2, 1), (4, 2)], "4-2"))
def test_ids_that_do_not_repeat_take_fewer_steps(cores, devices):
    case = random_case(3, cores, devices, valence=1, num_samples=64)
    case = dataclasses.replace(case, gains=np.ones_like(case.gains))
    limits = limits_for(case, max_unique=2)
    assert check([case], limits, may_repeat=False) == check([case], limits)


@pytest.mark.full
def test_many_ids_are_padded_for_their_sort():
    check([random_case(0, 2, 1, num_samples=5488, valence=3)])  # 16,464 ids


def test_padding_ids_vanish():
    case = random_case(0, 2, 1)
    case = dataclasses.replace(case, ids=np.full_like(case.ids, -1))
    (ids,), fits = buffers([case], limits_for(case))
    assert fits == [True] and ids.num_minibatches.tolist() == [1]
    assert not np.any(ids.pointers)
    assert np.all(ids.rows == PAD) and np.all(np.isnan(ids.gains))


def test_many_rows_need_two_sorts():
    case, many = random_case(3, 2, 1), 2**30
    ids = np.where(case.ids < 0, -1, case.ids * (many // case.rows_per_partition))
    ids = ids // case.num_partitions * case.num_partitions + case.ids % 2
    check([dataclasses.replace(case, ids=ids, rows_per_partition=many)])


def test_ids_beyond_the_room_do_not_fit():
    case = random_case(1, 2, 1)
    groups = case.cores * case.num_partitions
    enough = case.ids.size + 7 * groups
    for room, expected in ((enough // 8 * 8 + 8, True), (enough // 8 * 8 - 48, False)):
        limits = Limits(max_ids=4096, max_unique=4096, room=room)
        _, fits = buffers([case], limits)
        assert fits == [expected]


ANY_LIMITS = Limits(max_ids=3, max_unique=2, room=4096)


@pytest.mark.full
@settings(max_examples=25)
@given(
    data=st.lists(
        st.tuples(st.integers(-1, 63), st.integers(0, 31)), min_size=24, max_size=24
    )
)
def test_any_ids(data):
    ids, samples = np.asarray(sorted(data)).T
    case = dataclasses.replace(
        random_case(0, 4, 2),
        ids=ids,
        samples=samples,
        gains=np.ones(24),
        num_samples=32,
        rows_per_partition=8,
    )
    *leaves, fits = (
        np.asarray(x[0]) for x in _any(*(x[None] for x in case.arguments()))
    )
    ends = minibatches_of([case], ANY_LIMITS)
    assert fits == (ends is not None)
    if ends is not None:
        expected = expected_buffers(case, ANY_LIMITS.room, ends)
        for got, wanted in zip(leaves, expected, strict=False):
            np.testing.assert_array_equal(got, wanted)


def _partition(*arguments):
    ids, fits = partition(
        *arguments,
        num_samples=32,
        rows_per_partition=8,
        cores=4,
        devices=2,
        limits=ANY_LIMITS,
    )
    return *jax.tree.leaves(ids), fits


_any = on_devices(_partition, 1, 4, 6)
