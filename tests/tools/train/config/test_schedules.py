"""Tests the schedules of learning rates."""

import jax
import numpy as np
import pytest

from tpu_embedding.tools.train import warm_up


def test_a_warm_up_is_exact_at_each_step():
    steps = np.array([0, 1, 2, 3, 23_999, 24_000, 24_001, 2**31 - 1], np.int32)
    rates = jax.jit(warm_up(1e-6, 24_000))(steps)
    wanted = 1e-6 * np.minimum(1.0, steps / 24_000)
    # Tolerance: float32 rounding of the quotient and of the product.
    np.testing.assert_allclose(rates, wanted, rtol=2e-7)


@pytest.mark.parametrize("num_steps", [0, -3])
def test_a_warm_up_of_no_step_is_refused(num_steps):
    with pytest.raises(ValueError, match=f"num_steps must be .* 1, got {num_steps}"):
        warm_up(1e-3, num_steps)
