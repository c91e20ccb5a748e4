"""Tests the distribution of synthetic ids against its definition, id by id."""

import numpy as np
import pytest

from tpu_embedding.tools.data.zipf import MAX_VOCABULARY_SIZE, ZipfIds

CASES = {
    "one_id": (1, 1.0),
    "two_ids": (2, 1.0),
    "uniform": (10, 0.0),
    "zipf": (1000, 1.0),
    "just_off_one": (1000, 1.0 + 1e-9),
    "flat": (1000, 0.5),
    "steep": (1000, 2.5),
    "prime": (997, 1.2),
}


def generator():
    return np.random.Generator(np.random.Philox(7))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_ranks_are_a_permutation_of_the_ids(case):
    size, exponent = case
    ids = ZipfIds(vocabulary_size=size, exponent=exponent)
    np.testing.assert_array_equal(
        np.sort(ids.ids_of_ranks(np.arange(size))), np.arange(size)
    )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_drawn_frequencies_match_the_probabilities(case):
    size, exponent = case
    ids = ZipfIds(vocabulary_size=size, exponent=exponent)
    drawn = ids.draw(generator(), (1000, 100))
    assert drawn.dtype == np.int32 and drawn.shape == (1000, 100)
    ranks, expected = np.arange(size), np.empty(size)
    expected[ids.ids_of_ranks(ranks)] = ids.probabilities(ranks)
    assert expected.sum() == pytest.approx(1.0)
    frequencies = np.bincount(drawn.ravel(), minlength=size) / drawn.size
    # Tolerance: six standard errors of a frequency, plus one count for the rarest ids.
    tolerance = 6 * np.sqrt(expected / drawn.size) + 1 / drawn.size
    assert len(frequencies) == size
    assert (np.abs(frequencies - expected) <= tolerance).all()


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.3])
def test_probabilities_are_the_integrals_of_the_power(exponent):
    ids = ZipfIds(vocabulary_size=50, exponent=exponent)
    # Integrates with the midpoint rule on 1000 parts of each interval.
    points = 1 + (np.arange(50 * 1000) + 0.5) / 1000
    integrals = (points**-exponent).reshape(50, 1000).mean(axis=1)
    by_rank = ids.probabilities(np.arange(50))
    np.testing.assert_allclose(by_rank, integrals / integrals.sum(), rtol=1e-6)


def test_hot_ids_are_no_neighbours():
    hot = np.sort(ZipfIds(vocabulary_size=10_000).ids_of_ranks(np.arange(20)))
    assert np.diff(hot).min() > 200  # Evenly spread ids would be 500 apart.


@pytest.mark.parametrize("exponent", [0.0, 1.0, 3.0])
def test_largest_vocabulary_stays_in_range(exponent):
    ids = ZipfIds(vocabulary_size=MAX_VOCABULARY_SIZE, exponent=exponent)
    drawn = ids.draw(generator(), 10_000)
    assert drawn.min() >= 0 and drawn.max() < MAX_VOCABULARY_SIZE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocabulary_size": 0}, r"vocabulary_size must be from 1 .* got 0"),
        ({"vocabulary_size": 2**31 - 1}, "vocabulary_size"),
        ({"vocabulary_size": 5, "exponent": -0.1}, r"exponent .* got -0\.1"),
        ({"vocabulary_size": 5, "exponent": float("nan")}, "exponent .* got nan"),
        ({"vocabulary_size": 0, "exponent": -1.0}, "vocabulary_size.*; .*exponent"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ZipfIds(**arguments)
