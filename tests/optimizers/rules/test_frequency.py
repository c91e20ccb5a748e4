"""The rules that count lookups, against their formulas."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.optimizers.row_by_row import (
    UNTOUCHED_ROW,
    VOCABULARY_SIZE,
    check_against_loop,
    steps,
)
from tpu_embedding.optimizers.rules.adagrad import adagrad
from tpu_embedding.optimizers.rules.frequency import (
    frequency_aware_adagrad,
    frequency_estimator,
    frequency_weights,
)

CASES = {
    "regularised": {"l1": 0.1, "l2": 0.2, "max_lr_multiplier": 1.2},
    "decayed": {"accumulator_decay": 0.3, "probability_exponent": 2.0},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_adagrad_follows_the_formula(options):
    def step(row, gradient, slots, t):
        accumulator, counter = slots
        counter = counter + 1
        decayed = options.get("accumulator_decay", 1.0) * accumulator + gradient**2
        accumulator = np.maximum(decayed, 0.1)
        multiplier = (t / counter) ** options.get("probability_exponent", 0.5)
        multiplier = min(multiplier, options.get("max_lr_multiplier", 1e6))
        change = multiplier * gradient / np.sqrt(accumulator)
        change += options.get("l1", 0.0) * np.sign(row) + options.get("l2", 0.0) * row
        return row - 0.1 * change, [accumulator, counter]

    _, (_, counters) = check_against_loop(
        frequency_aware_adagrad(0.1, **options), step, [0.1, 0]
    )
    expected = sum(np.bincount(np.unique(ids), minlength=11) for ids, _ in steps())
    np.testing.assert_array_equal(counters, expected)


def test_a_row_of_every_step_learns_as_under_adagrad():
    rows = jnp.ones((3, 2))
    aware: Any = frequency_aware_adagrad(0.1)
    plain: Any = adagrad(0.1)
    state, plain_state = aware.init(rows), plain.init(rows)
    for _ in range(3):
        updates, state = aware.update(rows, state, rows)
        expected, plain_state = plain.update(rows, plain_state)
        np.testing.assert_allclose(updates, expected, rtol=1e-6)


def test_estimator_follows_the_formula():
    tau, max_delta, outlier_threshold = 0.25, 3.0, 0.9

    def step(row, gradient, slots, t):
        delta = t - slots[0]
        clipped = min(delta, max_delta)
        if delta >= outlier_threshold * row[0]:
            return np.array([clipped]), [t]
        return (1 - tau) * row + tau * clipped, [t]

    start = np.full((VOCABULARY_SIZE, 1), max_delta, np.float32)
    table, (last_hit_step,) = check_against_loop(
        frequency_estimator(tau, max_delta, outlier_threshold), step, [0], start=start
    )
    assert last_hit_step[UNTOUCHED_ROW] == 0
    assert last_hit_step[:UNTOUCHED_ROW].max() == len(list(steps()))
    # Some rows were seen early, some late: the branches of the formula were taken.
    assert len(np.unique(table)) > 3


def test_weights():
    deltas = jnp.array([[100.0], [25.0], [0.0]])
    np.testing.assert_allclose(frequency_weights(deltas, 100.0, 0.5), [[1], [0.5], [0]])
    np.testing.assert_allclose(frequency_weights(deltas, 100.0), deltas / 100)
    gradient = jax.grad(lambda d: frequency_weights(d, 100.0, 0.5).sum())(deltas)
    np.testing.assert_array_equal(gradient, 0)
