"""Cotangents summed into rows: the transpose of `combine`, by XLA and by kernels."""

import functools

import jax
import numpy as np
import pytest

from tests.conftest import needs_kernels
from tests.lookup.pooled import (
    KERNELS,
    NATURAL,
    XLA,
    integers,
    kernel_backends,
    matrix_of,
    places_of,
    pooling_of,
    sort_by_row,
)
from tpu_embedding.lookup._spread_cotangents import spread
from tpu_embedding.rows.packed_rows import RowLayout, unpack_rows


@functools.partial(jax.jit, static_argnames=("layout", "backends"))
def jitted_spread(cotangents, ids_by_row, poolings, layout, backends):
    gradients = spread(cotangents, ids_by_row, poolings, layout, backends)
    assert gradients.layout == layout
    return unpack_rows(gradients)


def check(poolings, layout, backends=XLA, seed=0):
    """Compares the gradients of used rows; those of unused places are undefined."""
    num_rows = layout.num_rows
    places = places_of(poolings, num_rows, seed)
    cotangents = [
        integers(pooling.num_samples, layout.dim, seed=seed + i)
        for i, pooling in enumerate(poolings)
    ]
    gradients = jitted_spread(
        cotangents, sort_by_row(places, num_rows), poolings, layout, backends
    )
    assert gradients.shape == (num_rows, layout.dim)
    expected = matrix_of(poolings, places, num_rows).T @ np.concatenate(cotangents)
    is_used = np.isin(np.arange(num_rows), places)
    assert is_used.any()
    np.testing.assert_array_equal(gradients[is_used], expected[is_used])


@pytest.mark.parametrize("case", NATURAL)
def test_features(case):
    poolings = [pooling_of(form) for form in NATURAL[case]]
    layout = RowLayout(num_rows=9, row_shape=(3,))
    check(poolings, layout)
    check(poolings, layout, seed=5)


@pytest.mark.parametrize("dim", [1, 200])
def test_dims(dim):
    layout = RowLayout(num_rows=9, row_shape=(dim,))
    check([pooling_of("many+gains+scales"), pooling_of("ragged")], layout)


@pytest.mark.full(every_case=True)
@needs_kernels
@pytest.mark.parametrize("case", KERNELS)
def test_kernels(case):
    dim, num_rows, num_samples, forms, _, spread_backend = KERNELS[case]
    layout = RowLayout(num_rows=num_rows, row_shape=(dim,), line_lanes=128)
    poolings = [pooling_of(form, num_samples) for form in forms]
    backends = kernel_backends(layout, poolings)
    assert (backends.spread.backend == "xla") == (spread_backend == "xla")
    check(poolings, layout, backends)


def test_a_row_of_every_id():
    # Almost all ids are repeats.
    poolings = [pooling_of("long"), pooling_of("many+gains")]
    places = np.zeros(sum(pooling.num_ids for pooling in poolings), np.int32)
    layout = RowLayout(num_rows=8, row_shape=(3,))
    cotangents = [integers(8, 3), integers(8, 3, seed=2)]
    ids_by_row = sort_by_row(places, 8)
    gradients = jitted_spread(cotangents, ids_by_row, poolings, layout, XLA)
    expected = matrix_of(poolings, places, 8).T @ np.concatenate(cotangents)
    np.testing.assert_array_equal(gradients[0], expected[0])
