"""Compares kernels with NumPy, in Pallas' interpreter.

tests/tools/compile_report compiles them for TPUs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import needs_kernels
from tests.tiers import matrix, quick_cases
from tpu_embedding.rows.kernels import backend, row_kernels
from tpu_embedding.rows.kernels.kernel_access import KernelBody
from tpu_embedding.rows.kernels.kernel_bodies import DROPPED_ROW
from tpu_embedding.rows.kernels.kernel_limits import (
    TILE_LINES,
    no_room_reason,
    unreachable_reason,
)
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


@pytest.mark.parametrize(
    ("num_blocks", "dim", "num_ids"),
    quick_cases(
        matrix([1, 3], [x for x in CASES if x[0] < 128]), "1-8-1152", "3-32-24"
    ),
)
def test_read_with_a_stride_between_rows_of_a_line(dim, num_ids, num_blocks):
    rows = random(NUM_ROWS, dim)
    shape = (num_blocks, 128 // dim, num_ids)
    ids = np.random.default_rng(1).integers(0, NUM_ROWS, shape).astype(np.int32)
    (lines,) = read(
        lines_of(rows),
        ids.reshape(-1),
        dim=dim,
        backend="interpreter",
        row_stride=num_ids,
    )
    expected = rows[np.moveaxis(ids, 1, 2)].reshape(num_blocks * num_ids, 128)
    np.testing.assert_array_equal(lines, expected)


def samples_in_lines(samples):
    """Returns `[lines, rows_per_line, dim]`, with the lines as the stride of rows."""
    rows_per_line = max(1, 128 // samples.shape[1])
    return np.moveaxis(samples.reshape(rows_per_line, -1, samples.shape[1]), 0, 1)


@few_dims
@pytest.mark.parametrize("valences", [(1, 1, 1), (3, 1, 20)])
def test_read_sums_into_several_arrays(dim, valences):
    num_lines = 16
    size = num_lines * max(1, 128 // dim)
    rows = random(NUM_ROWS, dim)
    ids = [
        np.random.default_rng(i).integers(0, NUM_ROWS, (n, size)).astype(np.int32)
        for i, n in enumerate(valences)
    ]
    arrays = read(
        lines_of(rows),
        np.concatenate([x.reshape(-1) for x in ids]),
        dim=dim,
        backend="interpreter",
        sizes=(size,) * len(ids),
        valences=valences,
        row_stride=num_lines if dim < 128 else 1,
    )
    for array, ids_of_array in zip(arrays, ids, strict=True):
        # Exact: the kernel adds in the same order, that of the ids.
        expected = functools.reduce(np.add, rows[ids_of_array])
        expected = lines_of(samples_in_lines(expected).reshape(-1, dim))
        np.testing.assert_array_equal(array, expected)


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


def along_rows(sums, gradient, row, slot, value, count, rate):
    """Takes two sums, of which the second needs the first."""
    if len(sums) == 0:
        return gradient * row
    if len(sums) == 1:
        return (slot - rate * sums[0]) ** 2
    scale = value / jnp.sqrt(1 + sums[1])
    return [row - scale * gradient, slot + sums[0], value + sums[1], count + 1]


ROOM_CASES = [
    *[(8, 1, 1, True), (128, 15, 1, True), (2048, 1, 1, True)],
    # Rows of more than 8 KiB: a buffer holds fewer than a tile has.
    *[(2176, 1, 0, False), (3072, 1, 1, False), (2048, 2, 0, True)],
    *[(2048, 3, 0, False), (1536, 3, 0, True), (2**16, 1, 0, False)],
    # The row scalars are the 32 bytes too many.
    *[(2048, 2, 1, False), (384, 15, 0, True), (384, 15, 1, False)],
]


@pytest.mark.parametrize(
    ("dim", "num_arrays", "num_row_scalars", "expected"), ROOM_CASES
)
def test_room_for_whole_rows(dim, num_arrays, num_row_scalars, expected):
    arguments = (dim, num_arrays, num_row_scalars)
    assert (no_room_reason(*arguments) is None) is expected
    max_ids = row_kernels._max_chunk_ids(dim, 1 + num_arrays, num_row_scalars)
    assert (max_ids >= TILE_LINES) is expected


@pytest.mark.parametrize(
    ("dim", "num_arrays", "num_row_scalars", "reason"),
    [
        (
            *(2176, 1, 0),
            "8 rows of dim 2176 take 68 KiB, more than the 64 KiB buffer of a subcore",
        ),
        (
            *(2048, 3, 0),
            "8 rows of dim 2048 of 3 arrays and of their gradient take 256 KiB, more "
            "than the 192 KiB buffers of a subcore",
        ),
        (
            *(384, 15, 1),
            "8 rows of dim 384 of 15 arrays and of their gradient take 193 KiB, more "
            "than the 192 KiB buffers of a subcore",
        ),
    ],
)
def test_reasons_for_no_room(dim, num_arrays, num_row_scalars, reason):
    assert no_room_reason(dim, num_arrays, num_row_scalars) == reason


@pytest.mark.full
@pytest.mark.parametrize(
    ("dim", "num_ids", "num_lanes"),
    quick_cases(
        [(*case, 8 + 8 * (i % 2)) for i, case in enumerate(CASES)]
        + [
            pytest.param(*case, 16 - 8 * (i % 2), marks=pytest.mark.full)
            for i, case in enumerate(CASES)
        ]
        + [(1536, 24, 8)],
        "1536-24-8",
    ),
)
def test_update_with_sums_and_row_scalars(dim, num_ids, num_lanes, monkeypatch):
    """Vectors have 8 or 16 lanes, so they hold several rows, or parts of one."""
    monkeypatch.setattr(backend, "_INTERPRETED_LANES", num_lanes)
    rows, slots = random(NUM_ROWS, dim), random(NUM_ROWS, dim, seed=3)
    ids = np.random.default_rng(1).permutation(NUM_ROWS)[:num_ids].astype(np.int32)
    gradients = random(num_ids, dim, seed=2)
    row_scalars = [random(num_ids, seed=4), random(num_ids, seed=5)]
    rule = KernelBody(run=along_rows, num_sums=2)
    update = jax.jit(functools.partial(update_rows, rule), static_argnums=(3, 5))
    new_arrays, new_row_scalars = update(
        *([lines_of(rows), lines_of(slots)], ids, lines_of(gradients), dim),
        *([np.float32(0.5)], "interpreter"),
        row_scalars=row_scalars,
    )
    expected = [rows.copy(), slots.copy()]
    sums = []
    for _ in range(2):
        summands = along_rows(
            sums, gradients, rows[ids], slots[ids], None, None, np.float32(0.5)
        )
        sums.append(np.sum(np.float64(summands), axis=1, keepdims=True))
    columns = [x[:, None] for x in row_scalars]
    expected[0][ids], expected[1][ids], *expected_row_scalars = along_rows(
        sums, gradients, rows[ids], slots[ids], *columns, np.float32(0.5)
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4)
    for new, by_numpy in zip(new_row_scalars, expected_row_scalars, strict=True):
        close(new, by_numpy[:, 0])
    for new, by_numpy in zip(new_arrays, expected, strict=True):
        new = np.asarray(new).reshape(-1, dim)
        close(new, by_numpy)
        others = np.setdiff1d(np.arange(NUM_ROWS), ids)
        np.testing.assert_array_equal(new[others], by_numpy[others])


def test_add_to_the_spare_row_any_number_of_times():
    rows = random(64, 32)
    ids = np.full(128, 63, np.int32)
    ids[5] = 7
    additions = random(128, 32, seed=2)
    lines = add(
        lines_of(rows),
        ids,
        lines_of(additions),
        dim=32,
        backend="interpreter",
    )
    expected = rows.copy()
    expected[7] += additions[5]
    after = np.asarray(lines).reshape(-1, 32)
    np.testing.assert_array_equal(after[:63], expected[:63])


@pytest.mark.parametrize(
    ("num_rows", "dim", "line_lanes", "expected"),
    [(10, dim, 128, True) for dim in (8, 16, 32, 64, 128, 256, 384)]
    + [(10, dim, 128, False) for dim in (1, 2, 4, 7, 12, 24, 48, 100, 129, 200)]
    + [(10, 32, None, False)]
    # Kernels take no array above 16 GiB.
    + [(2**26 - 8, 64, 128, True), (2**26 - 7, 64, 128, False), (2**26, 32, 128, True)],
)
def test_rows_that_kernels_reach(num_rows, dim, line_lanes, expected):
    assert (unreachable_reason(num_rows, dim, line_lanes) is None) is expected


NOT_PACKED = "rows are not packed into lines of 128 lanes on this device"
TOO_SHORT = "rows of dim {} are shorter than the 32 bytes that a SparseCore addresses"
NO_FULL_LINES = "rows of dim {} do not fill lines of 128 lanes"
TOO_LARGE = "{} GiB per device are more than the 16 GiB that a SparseCore addresses"


@pytest.mark.parametrize(
    ("num_rows", "dim", "line_lanes", "reason"),
    [
        *[(10, 128, None, NOT_PACKED), (10, 1, None, NOT_PACKED)],
        (10, 128, 64, NOT_PACKED),
        *[(10, dim, 128, TOO_SHORT.format(dim)) for dim in (1, 4, 7)],
        *[(10, dim, 128, NO_FULL_LINES.format(dim)) for dim in (9, 100, 129, 192)],
        # The first reason is the one that no number of devices removes.
        (2**40, 100, 128, NO_FULL_LINES.format(100)),
        # One row too many: rounded up, as "16.0 GiB are more than 16" would puzzle.
        (2**26 - 7, 64, 128, TOO_LARGE.format(16.1)),
        (3 * 2**25 - 8, 64, 128, TOO_LARGE.format(24.0)),
        (2**40, 128, 128, TOO_LARGE.format(524288.1)),
    ],
)
def test_reasons_why_kernels_do_not_reach_rows(num_rows, dim, line_lanes, reason):
    assert unreachable_reason(num_rows, dim, line_lanes) == reason


@pytest.mark.parametrize("num_ids", [4, 12, 129])
def test_refuses_numbers_of_ids(num_ids):
    with pytest.raises(ValueError, match=f"multiple of 8, got {num_ids}"):
        read(random(4, 128), np.zeros(num_ids, np.int32), dim=32, backend="interpreter")


def test_refuses_ids_that_fill_no_lines():
    with pytest.raises(ValueError, match="multiple of 16, which fill lines, got 8"):
        read(random(4, 128), np.zeros(8, np.int32), dim=8, backend="interpreter")
