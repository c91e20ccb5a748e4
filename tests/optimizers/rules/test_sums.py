"""Compensated sums against float64."""

import jax.numpy as jnp
import numpy as np

from tpu_embedding.optimizers.rules.adafactor import compensated_sum


def test_keeps_what_float32_would_lose():
    """Each addend is far below half a unit in the last place of the sum."""
    start = np.float32([1.0, -1.0, 1000.0])
    addend = np.float32([1e-8, -1e-8, 3e-6])
    total = compensated_sum(jnp.asarray(start))
    plain = start.copy()
    for _ in range(50):
        total = total.plus(jnp.asarray(addend))
        plain += addend
    expected = start.astype(np.float64) + 50 * addend.astype(np.float64)
    np.testing.assert_array_equal(plain, start)
    # The rest holds what the value does not: together, nearly float64.
    found = np.float64(total.value) + np.float64(total.rest)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_array_equal(total.value, expected.astype(np.float32))


def test_holds_the_rounding_error_of_addends_larger_than_the_sum():
    total = compensated_sum(jnp.float32(1.0))
    total = total.plus(jnp.float32(2.0**24))
    assert (float(total.value), float(total.rest)) == (2.0**24, 1.0)
    total = total.plus(jnp.float32(-(2.0**24)))
    assert (float(total.value), float(total.rest)) == (1.0, 0.0)
