"""Compares kernels with NumPy, in Pallas' interpreter.

tests/tools/compile_report compiles them for TPUs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import needs_kernels
from tests.tiers import quick_cases
from tpu_embedding.rows.kernels.kernel_access import KernelBody
from tpu_embedding.rows.kernels.kernel_bodies import DROPPED_ROW
from tpu_embedding.rows.kernels.row_kernels import (
    add_rows,
    read_rows,
    update_rows,
    write_rows,
)

pytestmark = needs_kernels

DIMS = [8, 32, 128, 384]
NUM_IDS = [8, 24, 1152]
NUM_ROWS = 5008

STATIC = ("dim", "backend", "sizes", "valences", "row_stride")
read = functools.partial(jax.jit, static_argnames=STATIC)(read_rows)
add = functools.partial(jax.jit, static_argnames=("dim", "backend"), donate_argnums=0)(
    add_rows
)


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def lines_of(rows):
    return rows.reshape(-1, max(128, rows.shape[1]))


CASES = [(dim, n) for dim in DIMS for n in NUM_IDS if n * dim % 128 == 0]
few_cases = pytest.mark.parametrize(
    ("dim", "num_ids"), quick_cases(CASES, "8-1152", "32-24", "128-8", "384-24")
)
few_dims = pytest.mark.parametrize("dim", quick_cases(DIMS, "8", "384"))


@few_cases
def test_read(dim, num_ids):
    rows = random(NUM_ROWS, dim)
    ids = np.random.default_rng(1).integers(0, NUM_ROWS, num_ids).astype(np.int32)
    ids[:4] = [0, NUM_ROWS - 1, 0, NUM_ROWS - 1]
    (lines,) = read(lines_of(rows), ids, dim=dim, backend="interpreter")
    assert lines.shape == lines_of(rows[ids]).shape
    np.testing.assert_array_equal(np.asarray(lines).reshape(-1, dim), rows[ids])


def samples_in_lines(samples):
    """Returns `[lines, rows_per_line, dim]`, with the lines as the stride of rows."""
    rows_per_line = max(1, 128 // samples.shape[1])
    return np.moveaxis(samples.reshape(rows_per_line, -1, samples.shape[1]), 0, 1)


@few_dims
@pytest.mark.parametrize("repetitions", [(1, 1), (2, 1, 5)])
def test_write(dim, repetitions):
    """Each row is written to one of two arrays, or dropped."""
    generator = np.random.default_rng(0)
    size = 24 * max(1, 128 // dim)
    samples = [random(size, dim, seed=i) for i in range(len(repetitions))]
    rows_of_ids = np.concatenate(
        [np.tile(x, (n, 1)) for x, n in zip(samples, repetitions, strict=True)]
    )
    num_ids = len(rows_of_ids)
    target_ids = generator.permutation(num_ids).astype(np.int32)
    array_of_id = generator.choice(3, num_ids)
    write = jax.jit(write_rows, static_argnums=(1, 3, 4, 5))
    arrays = write(
        [lines_of(samples_in_lines(x).reshape(-1, dim)) for x in samples],
        repetitions,
        [np.where(array_of_id == i, target_ids, DROPPED_ROW) for i in range(2)],
        (num_ids, num_ids),
        dim,
        "interpreter",
    )
    for i, array in enumerate(arrays):
        is_here = array_of_id == i
        written = np.asarray(array).reshape(-1, dim)[target_ids[is_here]]
        np.testing.assert_array_equal(written, rows_of_ids[is_here])


@few_cases
def test_add(dim, num_ids):
    rows = random(NUM_ROWS, dim)
    ids = np.random.default_rng(1).permutation(NUM_ROWS)[:num_ids].astype(np.int32)
    additions = random(num_ids, dim, seed=2)
    lines = add(
        lines_of(rows),
        ids,
        lines_of(additions),
        dim=dim,
        backend="interpreter",
    )
    expected = rows.copy()
    expected[ids] += additions
    np.testing.assert_array_equal(np.asarray(lines).reshape(-1, dim), expected)


def adagrad_like(gradient, row, slot, rate, bound):
    new_slot = jnp.minimum(slot + gradient * gradient, bound)
    return [row - rate * gradient / jnp.sqrt(new_slot), new_slot]


@pytest.mark.parametrize(("dim", "num_ids"), quick_cases(CASES, "128-1152", "32-24"))
def test_update(dim, num_ids):
    rows, slots = random(NUM_ROWS, dim), 1 + abs(random(NUM_ROWS, dim, seed=3))
    ids = np.random.default_rng(1).permutation(NUM_ROWS)[:num_ids].astype(np.int32)
    ids[0] = NUM_ROWS - 1
    gradients = random(num_ids, dim, seed=2)
    rule = KernelBody(run=lambda sums, *vectors: adagrad_like(*vectors))
    update = jax.jit(functools.partial(update_rows, rule), static_argnums=(3, 5))
    (new_rows, new_slots), _ = update(
        [lines_of(rows), lines_of(slots)],
        ids,
        lines_of(gradients),
        dim,
        [np.float32(0.5), np.float32(2)],
        "interpreter",
    )
    expected = [rows.copy(), slots.copy()]
    expected[0][ids], expected[1][ids] = adagrad_like(
        gradients, rows[ids], slots[ids], 0.5, 2
    )
    for new, by_numpy in zip((new_rows, new_slots), expected, strict=True):
        new = np.asarray(new).reshape(-1, dim)
        np.testing.assert_allclose(new, by_numpy, rtol=1e-6, atol=1e-6)
        others = np.setdiff1d(np.arange(NUM_ROWS), ids)
        np.testing.assert_array_equal(new[others], by_numpy[others])
