"""Proximal and online Yogi, against their formulas."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.optimizers.row_by_row import check_against_loop
from tpu_embedding.optimizers.rules.yogi import online_yogi, proximal_yogi


def second_moment(v, gradient, beta_2):
    return v - (1 - beta_2) * np.sign(v - gradient**2) * gradient**2


def test_proximal_yogi_follows_the_formula():
    l1, l2 = 0.02, 0.3

    def step(row, gradient, slots, t):
        v = second_moment(slots[0], gradient, 0.7)
        m = 0.9 * slots[1] + 0.1 * gradient
        eta = 0.05 / (np.sqrt(v) + 1e-3)
        z = row - eta * m
        row = np.sign(z) * np.maximum(np.abs(z) - eta * l1, 0) / (1 + eta * l2)
        return row, [v, m]

    check_against_loop(proximal_yogi(0.05, 0.9, 0.7, l1=l1, l2=l2), step, [1e-6, 0])


@pytest.mark.parametrize("l2", [pytest.param(0.0, marks=pytest.mark.full), 0.3])
def test_online_yogi_follows_the_formula(l2):
    l1 = 1.0

    def step(row, gradient, slots, t):
        v = second_moment(slots[0], gradient, 0.7)
        linear = slots[1] + gradient - (np.sqrt(v) - np.sqrt(slots[0])) * row / 0.05
        denominator = np.sqrt(v) / 0.05 + 2 * l2
        numerator = np.clip(linear, -l1, l1) - linear
        row = np.array(
            [n / d if d else 0.0 for n, d in zip(numerator, denominator, strict=True)]
        )
        return row, [v, linear]

    table, _ = check_against_loop(online_yogi(0.05, l1, l2, 0.7), step, [0, 0])
    assert (table[:-1] == 0).any()


def test_proximal_yogi_is_that_of_optax_once_the_rate_corrects_the_bias():
    """But for `m`, which optax starts at 1e-6, and an epsilon that it corrects too."""
    rows = jnp.linspace(-1, 1, 6).reshape(3, 2)

    def corrected(count):
        t = count + 1
        return 0.1 * jnp.sqrt(1 - 0.9**t) / (1 - 0.5**t)

    ours: Any = proximal_yogi(corrected, 0.5, 0.9, epsilon=1e-12)
    theirs: Any = optax.yogi(0.1, 0.5, 0.9, eps=1e-12)
    state, their_state = ours.init(rows), theirs.init(rows)
    for i in range(3):
        gradient = jnp.cos(rows + i)
        updates, state = ours.update(gradient, state, rows)
        expected, their_state = theirs.update(gradient, their_state)
        np.testing.assert_allclose(updates, expected, rtol=1e-4, atol=1e-6)


def test_zero_gradients_on_zero_slots_give_numbers():
    rows = jnp.ones((2, 3))
    rules: list[Any] = [
        online_yogi(0.1),
        proximal_yogi(0.1, initial_accumulator_value=0.0),
    ]
    for optimizer in rules:
        updates, state = optimizer.update(0 * rows, optimizer.init(rows), rows)
        assert np.isfinite(updates).all()
        assert all(np.isfinite(x).all() for x in state)
