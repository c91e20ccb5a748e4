"""Rules given as a function of one row."""

import jax.numpy as jnp
import pytest

from tests.optimizers.rule_cases import rowwise_momentum_rule
from tpu_embedding.optimizers.rules.user_defined import user_defined

DIM = 4


def sgd(gradient, embedding_table, slot_variables, learning_rate, hyperparameters):
    assert (gradient.shape, slot_variables, hyperparameters) == ((DIM,), (), ())
    return embedding_table - learning_rate * gradient


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
