"""Rows pooled into samples, by XLA and by kernels, against a dense matrix."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import needs_kernels
from tests.lookup.pooled import (
    FUSED,
    KERNELS,
    NATURAL,
    XLA,
    integers,
    kernel_backends,
    matrix_of,
    places_of,
    pooling_of,
)
from tpu_embedding.lookup._combine import combine
from tpu_embedding.rows.packed_rows import RowLayout, pack_rows


@functools.partial(jax.jit, static_argnames=("layout", "backends"))
def jitted_combine(rows, places, poolings, layout, backends):
    return combine(
        pack_rows(rows, layout, backends.kernels), places, poolings, backends
    )


def check(poolings, layout, backends=XLA):
    places = places_of(poolings, layout.num_rows)
    rows = integers(layout.num_rows, layout.dim)
    # The last place is no id's, so it may hold anything.
    rows[-1] = np.nan
    pooled = jitted_combine(rows.copy(), places, poolings, layout, backends)
    assert [x.shape for x in pooled] == [(p.num_samples, layout.dim) for p in poolings]
    assert all(x.dtype == jnp.float32 for x in pooled)
    rows[-1] = 0
    expected = matrix_of(poolings, places, layout.num_rows) @ rows
    np.testing.assert_array_equal(np.concatenate(pooled), expected)


@pytest.mark.parametrize("backends", [XLA, FUSED], ids=["whole", "fused"])
@pytest.mark.parametrize("case", NATURAL)
def test_features(case, backends):
    poolings = [pooling_of(form) for form in NATURAL[case]]
    check(poolings, RowLayout(num_rows=9, row_shape=(3,)), backends)


@pytest.mark.parametrize(
    ("dim", "line_lanes"),
    [(1, None), (16, 128), (200, None)],
)
def test_dims(dim, line_lanes):
    layout = RowLayout(num_rows=9, row_shape=(dim,), line_lanes=line_lanes)
    check([pooling_of("many+gains+scales"), pooling_of("ragged")], layout)


@pytest.mark.full(every_case=True)
@needs_kernels
@pytest.mark.parametrize("case", KERNELS)
def test_kernels(case):
    dim, num_rows, num_samples, forms, pool, _ = KERNELS[case]
    layout = RowLayout(num_rows=num_rows, row_shape=(dim,), line_lanes=128)
    poolings = [pooling_of(form, num_samples) for form in forms]
    backends = kernel_backends(layout, poolings)
    assert (backends.pool.backend == "xla") == (pool == "xla")
    check(poolings, layout, backends)


def test_ids_without_rows_give_zeros():
    poolings = [pooling_of("many"), pooling_of("ragged+gains")]
    layout = RowLayout(num_rows=8, row_shape=(3,))
    num_ids = sum(pooling.num_ids for pooling in poolings)
    for place in (7, 8, 2**31 - 1):
        places = np.full(num_ids, place, np.int32)
        rows = np.full((8, 3), np.nan, np.float32)
        for pooled in jitted_combine(rows, places, poolings, layout, XLA):
            np.testing.assert_array_equal(pooled, np.zeros((8, 3)))
