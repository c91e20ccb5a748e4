"""Rows pooled into samples, against a dense matrix."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.lookup.pooled import (
    NATURAL,
    integers,
    matrix_of,
    places_of,
    pooling_of,
)
from tpu_embedding.lookup._forward import pool_buffer, samples_of


@functools.partial(jax.jit, static_argnames="gathers")
def jitted_combine(rows, places, poolings, gathers):
    return samples_of(pool_buffer(rows, places, poolings, gathers), poolings)


def check(poolings, dim=3, gathers="whole"):
    num_rows = 9
    places = places_of(poolings, num_rows)
    rows = integers(num_rows, dim)
    # The last place is no id's, so it may hold anything.
    rows[-1] = np.nan
    pooled = jitted_combine(rows.copy(), places, poolings, gathers)
    assert [x.shape for x in pooled] == [(p.num_samples, dim) for p in poolings]
    assert all(x.dtype == jnp.float32 for x in pooled)
    rows[-1] = 0
    expected = matrix_of(poolings, places, num_rows) @ rows
    np.testing.assert_array_equal(np.concatenate(pooled), expected)


@pytest.mark.parametrize("gathers", ["whole", "fused", "by_feature"])
@pytest.mark.parametrize("case", NATURAL)
def test_features(case, gathers):
    poolings = [pooling_of(form) for form in NATURAL[case]]
    check(poolings, gathers=gathers)


@pytest.mark.parametrize("dim", [1, 32, 200])
def test_dims(dim):
    check([pooling_of("many+gains+scales"), pooling_of("ragged")], dim)


def test_ids_without_rows_give_zeros():
    poolings = [pooling_of("many"), pooling_of("ragged+gains")]
    num_ids = sum(pooling.num_ids for pooling in poolings)
    for place in (7, 8, 2**31 - 1):
        places = np.full(num_ids, place, np.int32)
        rows = np.full((8, 3), np.nan, np.float32)
        for pooled in jitted_combine(rows, places, poolings, "whole"):
            np.testing.assert_array_equal(pooled, np.zeros((8, 3)))
