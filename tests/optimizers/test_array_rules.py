"""Lifting of a rule for one array to pytrees, and learning rates of a step."""

import jax.numpy as jnp
import optax
import pytest

from tpu_embedding.optimizers.array_rules import for_each_array
from tpu_embedding.optimizers.learning_rates import learning_rate_at


def scale(gradient, state, rows):
    return (
        gradient * state if rows is None else gradient * state + rows,
        state + 1,
    )


RULE = for_each_array(lambda rows: rows[0] * 10, scale)


def test_each_array_has_its_own_state():
    rows = {"a": jnp.asarray([2.0]), "b": [jnp.asarray([3.0]), None]}
    state = RULE.init(rows)
    assert state == {"a": 20.0, "b": [30.0, None]}
    gradients = {"a": jnp.asarray([1.0]), "b": [jnp.asarray([-1.0]), None]}
    updates, state = RULE.update(gradients, state, rows)
    assert updates == {"a": 22.0, "b": [-27.0, None]}
    assert state == {"a": 21.0, "b": [31.0, None]}


def test_rows_may_be_absent():
    updates, state = RULE.update({"a": 2.0, "b": 3.0}, {"a": 5.0, "b": 7.0})
    assert (updates, state) == ({"a": 10.0, "b": 21.0}, {"a": 6.0, "b": 8.0})


def test_one_array_is_a_tree():
    assert RULE.update(2.0, 5.0, 1.0) == (11.0, 6.0)


def test_other_structures_are_refused():
    with pytest.raises(ValueError):
        RULE.update({"a": 2.0}, {"b": 5.0}, {"a": 1.0})


@pytest.mark.parametrize(
    "rate",
    [0.25, jnp.float32(0.25), optax.linear_schedule(0.0, 1.0, 12)],
    ids=["number", "array", "schedule"],
)
def test_learning_rate_of_a_step(rate):
    found = learning_rate_at(rate, jnp.int32(3))
    assert found == 0.25
    assert (found.shape, found.dtype) == ((), jnp.float32)
