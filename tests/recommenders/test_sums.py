"""Tests sums of two float32 values against integers and fractions."""

import fractions

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from tests.conftest import mesh_of
from tpu_embedding.metrics import Sum

NUM_VALUES = 12


def exact(total):
    return fractions.Fraction(float(total.high)) + fractions.Fraction(float(total.low))


@jax.jit
def fold(highs, lows):
    """Adds values one by one."""
    values = Sum(high=highs, low=lows)
    return jax.lax.scan(lambda total, x: (total.add(x), None), Sum.zeros(), values)[0]


def fold_of(numbers):
    highs = np.array([np.float32(x) for x in numbers])
    lows = [x - int(high) for x, high in zip(numbers, highs, strict=True)]
    return fold(highs, np.array(lows, np.float32))


@given(st.lists(st.integers(0, 2**42), min_size=NUM_VALUES, max_size=NUM_VALUES))
@settings(max_examples=60, deadline=None)
def test_whole_numbers_add_exactly_in_any_order(numbers):
    total = fold_of(numbers)
    assert exact(total) == sum(numbers)
    backwards = fold_of(numbers[::-1])
    assert (total.high, total.low) == (backwards.high, backwards.low)


def test_whole_numbers_up_to_the_limit():
    assert exact(fold_of([2**46 - 2**23 + 1, 2**23 - 2] + [0] * 10)) == 2**46 - 1


@given(
    st.lists(
        st.floats(2.0**-60, 2.0**60, width=32),
        min_size=NUM_VALUES,
        max_size=NUM_VALUES,
    )
)
@settings(max_examples=60, deadline=None)
def test_relative_error(values):
    total = fold(np.array(values, np.float32), np.zeros(NUM_VALUES, np.float32))
    wanted = sum(map(fractions.Fraction, values))
    # 2^-44 for each of the additions, as the class promises.
    assert abs(exact(total) - wanted) <= NUM_VALUES * wanted / 2**44


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_running_totals(size):
    values = np.random.default_rng(0).random(size).astype(np.float32)
    running = Sum.of(jnp.array(values)).running()
    wanted = np.cumsum(values.astype(np.float64))
    got = np.float64(running.high) + np.float64(running.low)
    np.testing.assert_allclose(got, wanted, rtol=1000 * 2.0**-44)
    total = Sum.of(jnp.array(values)).total()
    assert float(total.value()) == np.float32(wanted[-1])


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ((np.inf, 1.0), np.inf),
        ((1.0, -np.inf), -np.inf),
        ((np.inf, -np.inf), np.nan),
        ((np.nan, 1.0), np.nan),
        ((3e38, 3e38), np.inf),
        ((0.0, 0.0), 0.0),
        ((-1.0, 1.0), 0.0),
    ],
)
def test_values_that_are_not_finite(values, wanted):
    first, second = (Sum.of(jnp.float32(x)) for x in values)
    for total in (first.add(second), second.add(first)):
        np.testing.assert_equal(float(total.value()), wanted)
        np.testing.assert_equal(float(total.add(Sum.zeros()).value()), wanted)


@pytest.mark.full
def test_psum_rounds_once():
    """The highs of 8 devices add as float32; the lows keep what they held."""
    summed = jax.shard_map(
        lambda total: jax.lax.psum(total, "shard"),
        mesh=mesh_of(8),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
    )(fold_of([2**40, 5]))
    assert exact(summed) == 8 * (2**40 + 5)
