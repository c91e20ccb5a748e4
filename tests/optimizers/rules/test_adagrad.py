"""Row-wise Adagrad with the options of FBGEMM and TorchRec."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.optimizers.row_by_row import check_against_loop
from tests.tiers import full_cases
from tpu_embedding.optimizers.rules.adagrad import rowwise_adagrad

CASES: dict[str, Any] = {
    "fbgemm": (0.0, 1e-8, 0.0, "l2"),
    "l2": (0.0, 0.02, 0.3, "l2"),
    "decoupled": (0.1, 0.02, 0.3, "decoupled"),
}


@pytest.mark.parametrize("case", full_cases(CASES, "l2"))
def test_follows_the_formula(case):
    initial, epsilon, weight_decay, mode = CASES[case]

    def step(row, gradient, slots, t):
        if mode == "l2":
            gradient = gradient + weight_decay * row
        accumulator = slots[0] + np.mean(gradient**2)
        new = row - 0.1 * gradient / (np.sqrt(accumulator) + epsilon)
        if mode == "decoupled":
            new -= 0.1 * weight_decay * row
        return new, [accumulator]

    optimizer = rowwise_adagrad(
        0.1,
        initial,
        epsilon=epsilon,
        weight_decay=weight_decay,
        weight_decay_mode=mode,
    )
    check_against_loop(optimizer, step, [initial])


def test_zero_accumulators_and_gradients_give_numbers():
    optimizer = rowwise_adagrad(0.1, 0.0, epsilon=1e-8)
    rows = jnp.ones((2, 3))
    updates, _ = optimizer.update(0 * rows, optimizer.init(rows))
    np.testing.assert_array_equal(updates, 0)
