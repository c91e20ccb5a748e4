"""Running sums, values held until the next, and copies that keep every bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embedding.xla import (
    copied_in_vectors,
    fill_by_shifts,
    forward_fill,
    running_sum,
    sum_in_blocks,
    value_of_range,
    zeros_unless,
)

NASTY_WORDS = (0, 1, -1, 0x7F800001, -(2**31), 2**31 - 1, 0x7F800000, -0x800000)
"""Bits of zeros, a denormal, NaNs and infinities, and the ends of int32."""


def _rows_of_bits(length):
    words = np.random.default_rng(length).integers(-(2**31), 2**31, (9, length))
    words.flat[: len(NASTY_WORDS)] = NASTY_WORDS[: words.size]
    return words.astype(np.int32)


def _hold(values):
    held = -1
    for i, value in enumerate(values):
        held = value if value >= 0 else held
        values[i] = held
    return values


def _sum(values):
    return np.cumsum(values, dtype=np.int32)


@pytest.mark.parametrize(
    ("running", "expected"),
    [
        (running_sum, _sum),
        (sum_in_blocks, _sum),
        (forward_fill, _hold),
        (fill_by_shifts, _hold),
    ],
)
@pytest.mark.parametrize("size", [0, 1, 129, 1024, 1025, 2**17 + 1])
def test_equals_numpy(size, running, expected):
    int32 = np.iinfo(np.int32)
    for low, high in [(-9, 9), (int32.min, int32.max), (int32.max, int32.max)]:
        values = np.random.default_rng(size).integers(low, high, size, endpoint=True)
        values = values.astype(np.int32)
        result = running(jnp.asarray(values))
        assert result.dtype == jnp.int32
        np.testing.assert_array_equal(result, expected(values.copy()))


@pytest.mark.parametrize("size", [129, 1025, 2**17 + 1])
def test_sums_of_bools(size):
    for values in (np.ones(size, bool), np.arange(size) % 3 == 0):
        for running in (running_sum, sum_in_blocks):
            np.testing.assert_array_equal(running(jnp.asarray(values)), _sum(values))


def test_default_precision_does_not_change_sums():
    values = np.full(1025, 2**16 - 1, np.int32)
    with jax.default_matmul_precision("bfloat16"):
        program = jax.jit(sum_in_blocks).lower(values).as_text()
    assert program.count("HIGHEST") == program.count("dot_general") * 2 > 0


@pytest.mark.parametrize("dtype", ["float32", "int32", "int8", "bfloat16"])
@pytest.mark.parametrize("length", [1, 16, 23, 24, 32, 51, 52, 65, 200])
def test_copies_keep_every_bit(length, dtype):
    words = _rows_of_bits(length)
    rows = words.view(dtype) if dtype in ("float32", "int32") else words.astype(dtype)
    order = np.random.default_rng(0).integers(0, 9, 40)
    copied = jax.jit(lambda rows: copied_in_vectors(rows[order]))(rows)
    assert copied.dtype == rows.dtype
    assert np.asarray(copied).tobytes() == rows[order].tobytes()


def test_copies_of_other_shapes():
    for shape in [(70,), (3, 32, 32), (0, 32)]:
        values = np.ones(shape, np.float32)
        np.testing.assert_array_equal(jax.jit(copied_in_vectors)(values), values)


def test_zeros_unless():
    rows = _rows_of_bits(40).view(np.float32)
    is_row = np.arange(9) % 3 > 0
    result = np.asarray(jax.jit(zeros_unless)(is_row, rows))
    assert result[is_row].tobytes() == rows[is_row].tobytes()
    assert not result[~is_row].view(np.int32).any()


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
@pytest.mark.parametrize(
    ("starts", "values"),
    [
        ([0], [7]),
        ([3, 5], [7, 2]),
        ([0, 4, 8], [0, 4, 8]),
        ([2, 6, 10], [9, 9, 9]),
        ([2, 6, 10], [9, 5, 1]),
        ([0, 4, 9], [0, 4, 8]),
        ([3, 3], [7, 2]),
        ([5, 5, 5], [1, 2, 3]),
        ([0, 3, 3, 6], [0, 4, 8, 12]),
        ([0, 2**30, 2**31 - 1], [5, 2**31 - 1, 0]),
        ([2**31 - 9, 2**31 - 5, 2**31 - 1], [0, 2**30, 2**31 - 1]),
    ],
)
def test_value_of_range(starts, values, dtype):
    numbers = np.concatenate([[0], starts, np.asarray(starts) + 1, [2**31 - 2]])
    numbers = np.minimum(numbers, 2**31 - 1)
    if dtype == np.int32:
        numbers = np.append(numbers, [-1, -(2**31)])
    numbers = numbers.astype(dtype)
    found = np.searchsorted(starts, numbers, side="right")
    expected = np.asarray([0, *values], dtype)[found]
    result = value_of_range(jnp.asarray(numbers), starts, values)
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, expected)


def test_value_of_range_at_the_ends_of_a_type():
    ends = np.int32([-(2**31), -(2**31) + 1, -11, -10, -1, 0, 2**31 - 2, 2**31 - 1])
    for starts in ([-10, 0], [-(2**31), 0], [-(2**31), -1, 2**31 - 2]):
        expected = np.searchsorted(starts, ends, side="right")
        result = value_of_range(ends, starts, range(1, len(starts) + 1))
        np.testing.assert_array_equal(result, expected)
    starts = [2**31 - 1, 2**31, 2**31 + 1]
    large = np.uint32([0, 2**31 - 2, *starts, 2**32 - 1])
    result = value_of_range(large, starts, [2**32 - 1, 2**32 - 2, 2**32 - 3])
    assert result.tolist() == [0, 0, *(2**32 - i for i in (1, 2, 3, 3))]
    with pytest.raises(OverflowError):
        value_of_range(ends, [0, 2**31], [0, 5])
