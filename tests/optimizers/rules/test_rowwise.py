"""Rules with one number per row, and steps as long as the row."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embedding.optimizers.rules.rowwise import (
    lamb,
    partial_rowwise_adam,
    partial_rowwise_lamb,
    rowwise_rmsprop,
)


@pytest.mark.parametrize(
    "make", [partial_rowwise_adam, lamb, partial_rowwise_lamb, rowwise_rmsprop]
)
def test_zeros_and_tiny_values_give_numbers(make):
    """Norms whose squares underflow count as zero."""
    optimizer: Any = make(0.1)
    for row, gradient in [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1e-30, 1e-30)]:
        rows = jnp.full((2, 4), row)
        updates, state = optimizer.update(
            jnp.full((2, 4), gradient), optimizer.init(rows), rows
        )
        assert np.isfinite(updates).all()
        assert all(np.isfinite(x).all() for x in state[0])
        assert (np.asarray(updates) != 0).any() == (gradient != 0)
