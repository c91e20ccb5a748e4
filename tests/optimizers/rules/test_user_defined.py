"""Rules given as a function of one row."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.optimizers.row_by_row import DIM, check_against_loop
from tests.optimizers.rule_cases import rowwise_momentum_rule
from tpu_embedding.optimizers.rules.user_defined import user_defined


def sgd(gradient, embedding_table, slot_variables, learning_rate, hyperparameters):
    assert (gradient.shape, slot_variables, hyperparameters) == ((DIM,), (), ())
    return embedding_table - learning_rate * gradient


def test_without_slots_it_may_return_the_row_alone():
    check_against_loop(
        user_defined(sgd, 0.5),
        lambda row, gradient, slots, t: (row - 0.5 * gradient, []),
        [],
    )


def test_slots_and_hyperparameters_reach_each_row():
    # The state names the slots; its leaves are in the order of their names.
    def step(row, gradient, slots, t):
        level, momentum = slots
        momentum = 0.9 * momentum + gradient
        level = max(level + np.mean(gradient**2), 0.25 * t)
        return row - 0.1 * momentum / np.sqrt(level), [level, momentum]

    check_against_loop(rowwise_momentum_rule(), step, [0.5, np.zeros(DIM)])


def test_slots_show_their_names():
    state: Any = rowwise_momentum_rule().init(jnp.ones((3, DIM)))
    assert state.slots["z_momenta"].shape == (3, DIM)
    assert state.slots["a_levels"].tolist() == [0.5, 0.5, 0.5]


WRONG = {
    "initializers": (
        {"slot_names": ["a", "b"], "slot_initializers": [0.0]},
        "slot_initializers must have one value for each of the 2 slot_names, got 1",
    ),
    "dims": (
        {"slot_names": ["a"], "slot_initializers": [0.0], "slot_dims": [1, 2]},
        "slot_dims must have one value for each of the 1 slot_names, got 2",
    ),
    "dim": (
        {"slot_names": ["a"], "slot_initializers": [0.0], "slot_dims": [3]},
        r"slot_dims must each be 1 .* or 2 .*, got \(3,\)",
    ),
    "names": (
        {"slot_names": ["a", "a"], "slot_initializers": [0.0, 0.0]},
        r"slot_names must be distinct strings, got \('a', 'a'\)",
    ),
}


@pytest.mark.parametrize(("options", "match"), WRONG.values(), ids=WRONG)
def test_wrong_slots(options, match):
    with pytest.raises(ValueError, match=match):
        user_defined(sgd, **options)


WRONG_RESULTS = {
    "too_few": (
        lambda g, w, slots, rate, _: (w, slots[0]),
        "must return 3 arrays, the row, the slot 'z_momenta', the slot 'a_levels', "
        "got 2",
    ),
    "row_alone": (lambda g, w, slots, rate, _: w, "must return 3 arrays.* got 1"),
    "shapes": (
        lambda g, w, slots, rate, _: (w[:2], g, g),
        r"the row with shape \(4,\), got \(2,\); the slot 'a_levels' with shape \(\), "
        r"got \(4,\)",
    ),
}


@pytest.mark.parametrize(
    ("computation", "match"), WRONG_RESULTS.values(), ids=WRONG_RESULTS
)
def test_wrong_results(computation, match):
    optimizer = rowwise_momentum_rule(computation)
    rows = jnp.ones((3, DIM))
    with pytest.raises(ValueError, match=match):
        optimizer.update(rows, optimizer.init(rows), rows)


def test_initializer_of_another_shape():
    optimizer = user_defined(
        sgd, slot_names=["a"], slot_initializers=[lambda shape, dtype: jnp.zeros(2)]
    )
    with pytest.raises(ValueError, match=r"slot 'a' must return shape \(3, 4\)"):
        optimizer.init(jnp.ones((3, DIM)))
