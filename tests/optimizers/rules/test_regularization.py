"""Closed forms of regularisation, against the objective that they minimise."""

import jax.numpy as jnp
import numpy as np

from tpu_embedding.optimizers.rules._regularization import ftrl_rows, proximal_step

GRID = np.arange(-80001, 80002) / 2.0**13


def test_proximal_step_minimises_its_objective():
    """`(w - z)**2 / (2 * eta) + l1 * |w| + l2 / 2 * w**2`, searched on a grid."""
    z = np.array([2.0, 0.1, -0.1, -3.0, 0.0])
    eta, l1, l2 = np.array([0.5, 0.5, 1.0, 2.0, 1.0]), 0.3, 0.7
    found = proximal_step(jnp.float32(z), jnp.float32(eta), l1, l2)
    objective = (
        (GRID[:, None] - z) ** 2 / (2 * eta)
        + l1 * np.abs(GRID)[:, None]
        + l2 / 2 * GRID[:, None] ** 2
    )
    best = GRID[np.argmin(objective, axis=0)]
    np.testing.assert_allclose(found, best, atol=2.0**-13)


def test_ftrl_rows_minimise_their_objective():
    """`l * w + l1 * |w| + d / 2 * w**2`, searched on a grid; 0 where d is 0."""
    linears = np.array([2.0, 0.1, -0.1, -3.0, 5.0])
    denominators, l1 = np.array([0.5, 0.5, 1.0, 2.0, 0.0]), 0.3
    found = ftrl_rows(jnp.float32(linears), l1, jnp.float32(denominators))
    objective = (
        linears * GRID[:, None]
        + l1 * np.abs(GRID)[:, None]
        + denominators / 2 * GRID[:, None] ** 2
    )
    best = GRID[np.argmin(objective, axis=0)]
    np.testing.assert_allclose(found[:4], best[:4], atol=2.0**-13)
    assert found[4] == 0
