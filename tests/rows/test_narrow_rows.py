"""Narrow rows: every pattern decoded, rounding against NumPy, and its exact mean."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.tiers import each_once, with_ids
from tpu_embedding.rows.narrow_rows import (
    NARROW_DTYPES,
    decode_rows,
    encode_rows,
    join_rows,
    lanes_per_row,
    rows_per_lane,
    split_rows,
)

BFLOAT16 = ml_dtypes.bfloat16
MODULES = {"numpy": np.asarray, "jax": jnp.asarray}

each_dtype = pytest.mark.parametrize("dtype", NARROW_DTYPES)
each_module = pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)

encode = jax.jit(encode_rows, static_argnums=1)
decode = jax.jit(decode_rows, static_argnums=(1, 2))


def rounded(rows, dtype, bits=None):
    """Encodes and decodes rows, in a compiled program."""
    bits = None if bits is None else jnp.asarray(bits)
    rows = jnp.asarray(rows, jnp.float32)
    return np.asarray(decode(encode(rows, dtype, bits), dtype, rows.shape[1]))


def patterns(num_rows, dim, seed=0):
    generator = np.random.default_rng(seed)
    return generator.integers(0, 2**32, (num_rows, dim), np.uint32)


def all_numbers():
    """Returns every number of bfloat16, as float32 `[2**16, 1]`."""
    every = np.arange(2**16, dtype=np.uint16)[:, None]
    return every.view(BFLOAT16).astype(np.float32)


def assert_same(found, expected):
    """Compares bits, but for the payload of NaNs."""
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), is_nan)
    found, expected = (
        np.where(is_nan, 0, x).view(np.uint32) for x in (found, expected)
    )
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("dtype", "dim", "lanes"),
    [("bfloat16", 3, 3), ("int8", 1, 3), ("int8", 5, 4), ("int8", 128, 34)],
)
def test_lanes_of_a_row(dtype, dim, lanes):
    assert lanes_per_row(dtype, dim) == lanes
    stored = encode(jnp.ones((7, dim)), dtype, None)
    assert stored.shape == (7, lanes)
    assert stored.dtype == jnp.int32
    assert decode(stored, dtype, dim).shape == (7, dim)
    assert decode(stored, dtype, dim).dtype == jnp.float32


@each_module
@each_dtype
def test_rows_share_lanes(dtype, module):
    shared = rows_per_lane(dtype)
    limit = 2**16 if shared == 2 else 2**31
    stored = np.random.default_rng(0).integers(0, limit, (5, shared, 7), np.int32)
    lines = join_rows(module(stored), dtype)
    assert lines.shape == (5, 7)
    assert lines.dtype == np.int32
    np.testing.assert_array_equal(split_rows(lines, dtype), stored)
    if shared == 2:
        halves = np.ascontiguousarray(np.asarray(lines)).view(np.uint16)
        np.testing.assert_array_equal(halves[:, 0::2], stored[:, 0])
        np.testing.assert_array_equal(halves[:, 1::2], stored[:, 1])


@each_module
def test_every_number_is_decoded(module):
    every = np.arange(2**16, dtype=np.int32)[:, None]
    assert_same(np.asarray(decode_rows(module(every), "bfloat16", 1)), all_numbers())


@pytest.mark.parametrize("is_random", [False, True])
def test_every_number_stays_what_it_is(is_random):
    numbers = all_numbers()
    bits = patterns(len(numbers), 1) if is_random else None
    assert_same(rounded(numbers, "bfloat16", bits), numbers)


@each_module
def test_rounding_to_nearest_equals_numpys(module):
    generator = np.random.default_rng(1)
    rows = np.concatenate(
        [
            patterns(4000, 7).view(np.float32),
            np.ldexp(
                generator.normal(size=(4000, 7)).astype(np.float32),
                generator.integers(-30, 18, (4000, 7)),
            ),
        ]
    )
    rows[0] = [np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 0.0, -0.0]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = rows.astype(BFLOAT16).astype(np.float32)
    largest = np.float32(ml_dtypes.finfo(BFLOAT16).max)
    is_lost = np.isinf(expected) & np.isfinite(rows)
    expected = np.where(is_lost, np.copysign(largest, rows), expected)
    assert is_lost.any()
    words = encode_rows(module(rows), "bfloat16")
    assert_same(np.asarray(decode_rows(words, "bfloat16", 7)), expected)


@pytest.mark.parametrize("value", [1.0, -1.001, 1.9999, 3.14159, 6.2e-5, -0.0])
def test_the_mean_over_all_random_bits_is_exact(value):
    """All values of the dropped bits once: numbers above and below, in proportion."""
    bits = np.arange(2**16, dtype=np.uint32)[:, None] | np.uint32(0xABC0 << 16)
    value = np.float32(value)
    found = rounded(np.full(bits.shape, value), "bfloat16", bits)
    assert len(np.unique(found)) <= 2
    assert found.astype(np.float64).mean() == value


def test_random_rounding_takes_a_neighbour():
    rows = patterns(3000, 5).view(np.float32)
    rows = rows[np.isfinite(rows).all(axis=1)]
    found = rounded(rows, "bfloat16", patterns(len(rows), 5, seed=1))
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(np.signbit(found), np.signbit(rows))
    with np.errstate(over="ignore"):
        nearest = rows.astype(BFLOAT16)
        above, below = (
            np.nextafter(nearest, BFLOAT16(end)).astype(np.float32)
            for end in (np.inf, -np.inf)
        )
        nearest = nearest.astype(np.float32)
    largest = np.float32(ml_dtypes.finfo(BFLOAT16).max)
    is_inside = np.abs(rows) < largest
    np.testing.assert_array_equal(np.abs(found[~is_inside]), largest)
    is_near = (found == nearest) | (found == above) | (found == below)
    assert is_near[is_inside].all()
    # Not two steps away: the row is between its neighbours.
    low, high = np.minimum(found, rows), np.maximum(found, rows)
    is_between = (nearest > low) & (nearest < high)
    assert not is_between[is_inside].any()


@pytest.mark.parametrize(("dim", "module"), each_once([1, 5, 33], with_ids(MODULES)))
def test_int8_rows_are_within_half_a_step(dim, module):
    generator = np.random.default_rng(dim)
    rows = generator.normal(size=(500, dim)) * 10.0 ** generator.integers(
        -6, 6, (500, 1)
    )
    rows = rows.astype(np.float32)
    rows[0] = 0
    rows[1] = -7.25
    words = np.asarray(encode_rows(module(rows), "int8"))
    scale = np.ascontiguousarray(words[:, -2:-1]).view(np.float32)
    bias = np.ascontiguousarray(words[:, -1:]).view(np.float32)
    np.testing.assert_array_equal(bias[:, 0], rows.min(axis=1))
    ranges = rows.max(axis=1) - rows.min(axis=1)
    # XLA divides by a constant by multiplying: one rounding more.
    np.testing.assert_allclose(scale[:, 0], ranges / np.float32(255), rtol=3e-7)
    found = np.asarray(decode_rows(module(words), "int8", dim))
    # Half a step, and the rounding of float32 arithmetic.
    rounding = 4 * np.finfo(np.float32).eps * np.abs(rows).max(axis=1, keepdims=True)
    assert (np.abs(found - rows) <= scale / 2 * (1 + 1e-5) + rounding).all()
    np.testing.assert_array_equal(found[:2], rows[:2])


def test_int8_rows_equal_fbgemms():
    """Codes by the formula of FBGEMM's `FloatOrHalfToFused8BitRowwiseQuantized`."""
    rows = np.random.default_rng(3).normal(size=(50, 8)).astype(np.float32)
    low, high = rows.min(axis=1, keepdims=True), rows.max(axis=1, keepdims=True)
    codes = np.rint((rows - low) * (255 / (high - low + np.float32(1e-8))))
    words = np.asarray(encode_rows(jnp.asarray(rows), "int8"))
    # Word w holds elements w and w + 2, w + 4 and w + 6, lowest bits first.
    found = np.ascontiguousarray(words[:, :2]).view(np.uint8).reshape(50, 2, 4)
    found = found.transpose(0, 2, 1).reshape(50, 8)
    # A code halfway between two may go either way.
    assert (np.abs(found - codes) <= 1).all()
    assert (found == codes).mean() > 0.99
    assert (found.min(axis=1) == 0).all() and (found.max(axis=1) == 255).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows_in_its_int8_row_only(bad):
    rows = np.ones((3, 4), np.float32)
    rows[1, 2] = bad
    found = rounded(rows, "int8")
    assert not np.isfinite(found[1]).all()
    np.testing.assert_array_equal(found[[0, 2]], rows[[0, 2]])
