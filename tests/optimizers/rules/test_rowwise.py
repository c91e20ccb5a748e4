"""Rules with one number per row, and steps as long as the row, against formulas."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.optimizers.row_by_row import check_against_loop
from tests.tiers import full_cases
from tpu_embedding.optimizers.rules.rowwise import (
    lamb,
    partial_rowwise_adam,
    partial_rowwise_lamb,
    rowwise_rmsprop,
    scale_by_corrected_moments,
)

# A larger epsilon than the default, or its place in the formula would not show.
OPTIONS = {"beta_1": 0.8, "beta_2": 0.95, "epsilon": 0.01}


def moments_step(gradient, slots, t, mean):
    m = 0.8 * slots[0] + 0.2 * gradient
    v = 0.95 * slots[1] + 0.05 * mean(gradient**2)
    step = m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.95**t)) + 0.01)
    return step, [m, v]


def element(squares):
    return squares


def trust_ratio(row, step):
    norms = np.linalg.norm(row), np.linalg.norm(step)
    return norms[0] / norms[1] if min(norms) > 0 else 1.0


RULES = {
    "partial_rowwise_adam": (partial_rowwise_adam, np.mean, lambda row, step: 1.0),
    "lamb": (lamb, element, trust_ratio),
    "partial_rowwise_lamb": (partial_rowwise_lamb, np.mean, trust_ratio),
}


@pytest.mark.parametrize(
    ("name", "weight_decay"),
    full_cases(
        [("partial_rowwise_adam", 0.3), ("lamb", 0.3), ("partial_rowwise_lamb", 0.0)],
        "partial_rowwise_adam-0.3",
    ),
)
def test_follows_the_formula(name, weight_decay):
    make, mean, ratio = RULES[name]

    def loop(row, gradient, slots, t):
        step, slots = moments_step(gradient, slots, t, mean)
        step = step + weight_decay * row
        return row - 0.1 * ratio(row, step) * step, slots

    check_against_loop(make(0.1, weight_decay=weight_decay, **OPTIONS), loop, [0, 0])


def test_rowwise_rmsprop_follows_the_formula():
    def loop(row, gradient, slots, t):
        ms = 0.7 * slots[0] + 0.3 * np.mean(gradient**2)
        return row - 0.1 * gradient / np.sqrt(ms + 0.01), [ms]

    check_against_loop(rowwise_rmsprop(0.1, rho=0.7, epsilon=0.01), loop, [0])


def test_moments_of_elements_are_those_of_optax():
    ours: Any = scale_by_corrected_moments(epsilon=1e-8)
    theirs: Any = optax.scale_by_adam()
    rows = jnp.linspace(-1, 1, 6).reshape(3, 2)
    state, their_state = ours.init(rows), theirs.init(rows)
    for i in range(3):
        updates, state = ours.update(rows + i, state)
        expected, their_state = theirs.update(rows + i, their_state)
        np.testing.assert_allclose(updates, expected, rtol=1e-5)


def test_lamb_of_one_row_is_that_of_optax():
    rows = jnp.array([[0.5, -2.0, 1.0]])
    ours: Any = lamb(0.1, weight_decay=0.2)
    theirs: Any = optax.lamb(0.1, eps=1e-8, weight_decay=0.2)
    state, their_state = ours.init(rows), theirs.init(rows)
    for i in range(3):
        updates, state = ours.update(jnp.cos(rows + i), state, rows)
        expected, their_state = theirs.update(jnp.cos(rows + i), their_state, rows)
        np.testing.assert_allclose(updates, expected, rtol=1e-5)


@pytest.mark.parametrize("name", [*RULES, "rowwise_rmsprop"])
def test_zeros_and_tiny_values_give_numbers(name):
    """Norms whose squares underflow count as zero."""
    make = RULES[name][0] if name in RULES else rowwise_rmsprop
    optimizer: Any = make(0.1)
    for row, gradient in [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1e-30, 1e-30)]:
        rows = jnp.full((2, 4), row)
        updates, state = optimizer.update(
            jnp.full((2, 4), gradient), optimizer.init(rows), rows
        )
        assert np.isfinite(updates).all()
        assert all(np.isfinite(x).all() for x in state[0])
        assert (np.asarray(updates) != 0).any() == (gradient != 0)
