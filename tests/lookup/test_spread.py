"""Cotangents summed into rows: the transpose of `combine`."""

import functools

import jax
import numpy as np
import pytest

from tests.lookup.pooled import (
    NATURAL,
    integers,
    matrix_of,
    places_of,
    pooling_of,
    sort_by_row,
)
from tpu_embedding.lookup._backward import cotangent_reader, spread


@functools.partial(jax.jit, static_argnums=3)
def jitted_spread(cotangents, sorted_ids, poolings, buffer_size):
    reader = cotangent_reader(cotangents, poolings)
    return spread(reader, *sorted_ids, buffer_size)


def check(poolings, dim=3, seed=0):
    """Compares the gradients of used rows; those of unused places are undefined."""
    num_rows = 9
    places = places_of(poolings, num_rows, seed)
    cotangents = [
        integers(pooling.num_samples, dim, seed=seed + i)
        for i, pooling in enumerate(poolings)
    ]
    gradients = jitted_spread(
        cotangents, sort_by_row(places, num_rows), poolings, num_rows
    )
    assert gradients.shape == (num_rows, dim)
    expected = matrix_of(poolings, places, num_rows).T @ np.concatenate(cotangents)
    is_used = np.isin(np.arange(num_rows), places)
    assert is_used.any()
    np.testing.assert_array_equal(gradients[is_used], expected[is_used])


@pytest.mark.parametrize("case", NATURAL)
def test_features(case):
    poolings = [pooling_of(form) for form in NATURAL[case]]
    check(poolings)
    check(poolings, seed=5)


@pytest.mark.parametrize("dim", [1, 32, 200])
def test_dims(dim):
    check([pooling_of("many+gains+scales"), pooling_of("ragged")], dim)


def test_a_row_of_every_id():
    # Almost all ids are repeats.
    poolings = [pooling_of("long"), pooling_of("many+gains")]
    places = np.zeros(sum(pooling.num_ids for pooling in poolings), np.int32)
    cotangents = [integers(8, 3), integers(8, 3, seed=2)]
    sorted_ids = sort_by_row(places, 8)
    gradients = jitted_spread(cotangents, sorted_ids, poolings, 8)
    expected = matrix_of(poolings, places, 8).T @ np.concatenate(cotangents)
    np.testing.assert_array_equal(gradients[0], expected[0])
