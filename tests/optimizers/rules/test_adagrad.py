"""Row-wise Adagrad with the options of FBGEMM and TorchRec."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.optimizers.row_by_row import check_against_loop, check_traced
from tpu_embedding.optimizers.rules.adagrad import rowwise_adagrad

CASES: dict[str, Any] = {
    "fbgemm": (0.0, 1e-8, 0.0, "l2"),
    "l2": (0.0, 0.02, 0.3, "l2"),
    "decoupled": (0.1, 0.02, 0.3, "decoupled"),
}


@pytest.mark.parametrize("case", CASES)
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


@pytest.mark.parametrize("mode", ["l2", "decoupled"])
def test_takes_traced_hyperparameters(mode):
    check_traced(
        rowwise_adagrad, learning_rate=0.1, weight_decay=0.2, weight_decay_mode=mode
    )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"initial_accumulator_value": 0.0}, "initial_accumulator_value must be posi"),
        (
            {"initial_accumulator_value": -1.0, "epsilon": 0.1},
            "initial_accumulator_value must be non-negative",
        ),
        ({"epsilon": -1.0}, "epsilon must be non-negative"),
        ({"weight_decay": -1.0}, "weight_decay must be non-negative"),
        (
            {"weight_decay_mode": "cowclip"},
            r"weight_decay_mode must be one of \['l2', 'decoupled'\], got 'cowclip'",
        ),
    ],
)
def test_wrong_hyperparameters(options, match):
    with pytest.raises(ValueError, match=match):
        rowwise_adagrad(0.1, **options)
