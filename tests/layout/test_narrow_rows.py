"""Kernels against NumPy, run by Pallas' interpreter; TPUs' compiler in tests/aot."""

import functools

import jax
import numpy as np
import pytest

from tests.conftest import needs_kernels
from tpu_embedding.layout.narrow_rows import (
    add_to_narrow_rows,
    gather_narrow_rows,
    kernels_reach,
)

pytestmark = needs_kernels

DIMS = [8, 16, 32, 64]
NUM_IDS = [8, 24, 384, 2048]
NUM_ROWS = 5008

gather = functools.partial(jax.jit, static_argnames=("dim", "runner", "distance"))(
    gather_narrow_rows
)
add = functools.partial(jax.jit, static_argnames=("dim", "runner"), donate_argnums=0)(
    add_to_narrow_rows
)


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def num_ids_of_lines(dim):
    """Those that fill lines."""
    return [n for n in NUM_IDS if n % (128 // dim) == 0]


CASES = [(dim, n) for dim in DIMS for n in num_ids_of_lines(dim)]


@pytest.mark.parametrize(("dim", "num_ids"), CASES)
def test_gather(dim, num_ids):
    rows = random(NUM_ROWS, dim)
    ids = np.random.default_rng(1).integers(0, NUM_ROWS, num_ids).astype(np.int32)
    ids[:4] = [0, NUM_ROWS - 1, 0, NUM_ROWS - 1]
    lines = gather(rows.reshape(-1, 128), ids, dim=dim, runner="interpreter")
    assert lines.shape == (num_ids * dim // 128, 128)
    np.testing.assert_array_equal(np.asarray(lines).reshape(-1, dim), rows[ids])


@pytest.mark.parametrize(("dim", "num_ids"), CASES)
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_gather_rows_of_a_line_that_are_apart(dim, num_ids, num_blocks):
    places = 128 // dim
    rows = random(NUM_ROWS, dim)
    shape = (num_blocks, places, num_ids)
    ids = np.random.default_rng(1).integers(0, NUM_ROWS, shape).astype(np.int32)
    lines = gather(
        rows.reshape(-1, 128),
        ids.reshape(-1),
        dim=dim,
        runner="interpreter",
        distance=num_ids,
    )
    expected = rows[np.moveaxis(ids, 1, 2)].reshape(num_blocks * num_ids, 128)
    np.testing.assert_array_equal(lines, expected)


@pytest.mark.parametrize(("dim", "num_ids"), CASES)
def test_add(dim, num_ids):
    rows = random(NUM_ROWS, dim)
    ids = np.random.default_rng(1).permutation(NUM_ROWS)[:num_ids].astype(np.int32)
    additions = random(num_ids, dim, seed=2)
    lines = add(
        rows.reshape(-1, 128),
        ids,
        additions.reshape(-1, 128),
        dim=dim,
        runner="interpreter",
    )
    expected = rows.copy()
    expected[ids] += additions
    np.testing.assert_array_equal(np.asarray(lines).reshape(-1, dim), expected)


def test_add_to_a_row_that_means_nothing_as_often_as_one_likes():
    rows = random(64, 32)
    ids = np.full(128, 63, np.int32)
    ids[5] = 7
    additions = random(128, 32, seed=2)
    lines = add(
        rows.reshape(-1, 128),
        ids,
        additions.reshape(-1, 128),
        dim=32,
        runner="interpreter",
    )
    expected = rows.copy()
    expected[7] += additions[5]
    after = np.asarray(lines).reshape(-1, 32)
    np.testing.assert_array_equal(after[:63], expected[:63])


@pytest.mark.parametrize(
    ("num_rows", "dim", "line_lanes", "expected"),
    [(10, dim, 128, True) for dim in DIMS]
    + [(10, dim, 128, False) for dim in (1, 2, 4, 7, 12, 24, 48, 100, 128, 256)]
    + [(10, 32, None, False)]
    # SparseCores address no more than 16 GiB of an array.
    + [(2**26 - 1, 64, 128, True), (2**26, 64, 128, False), (2**26, 32, 128, True)],
)
def test_rows_that_kernels_reach(num_rows, dim, line_lanes, expected):
    assert kernels_reach(num_rows, dim, line_lanes) is expected


@pytest.mark.parametrize("num_ids", [4, 12, 129])
def test_refuses_numbers_of_ids(num_ids):
    with pytest.raises(ValueError, match=f"multiple of 8, got {num_ids}"):
        gather(
            random(4, 128), np.zeros(num_ids, np.int32), dim=32, runner="interpreter"
        )


def test_refuses_ids_that_fill_no_lines():
    with pytest.raises(ValueError, match="multiple of 16, which fill lines, got 8"):
        gather(random(4, 128), np.zeros(8, np.int32), dim=8, runner="interpreter")
