"""Assignment: rows become their summed gradients."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.optimizers.row_by_row import check_against_loop
from tpu_embedding.optimizers.rules.assign import assign


def test_rows_become_the_sums_of_their_gradients():
    check_against_loop(assign(), lambda row, gradient, slots, t: (gradient, []), [])


def test_takes_pytrees():
    rows = {"a": jnp.ones((2, 3)), "b": jnp.zeros((4, 1))}
    gradients = {"a": jnp.full((2, 3), 5.0), "b": jnp.full((4, 1), -1.0)}
    optimizer: Any = assign()
    updates, _ = optimizer.update(gradients, optimizer.init(rows), rows)
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(rows[name] + updates[name], gradient)
