"""Lifting of a rule for one array to pytrees, and learning rates of a step."""

from typing import Any, NamedTuple

import chex
import jax.numpy as jnp

from tpu_embedding.optimizers.array_rules import PerArray, for_each_array


def test_each_array_has_its_own_state():
    def scale(gradient, state, rows):
        return gradient * state + (0 if rows is None else rows), state + 1

    rule = for_each_array(lambda rows: rows * 10, scale)
    rows = {"a": jnp.asarray([2.0]), "b": [jnp.asarray([3.0]), None]}
    state = rule.init(rows)
    assert state == {"a": 20.0, "b": [30.0, None]}
    gradients = {"a": jnp.asarray([1.0]), "b": [jnp.asarray([-1.0]), None]}
    updates, state = rule.update(gradients, state, rows)
    assert updates == {"a": 22.0, "b": [-27.0, None]}
    assert state == {"a": 21.0, "b": [31.0, None]}
    updates, _ = rule.update(gradients, state)
    assert updates == {"a": 21.0, "b": [-31.0, None]}


class Fields(NamedTuple):
    count: Any
    pair: tuple[Any, Any]
    unused: Any


def fields_of(rows):
    second = rows.sum() if rows.ndim else None
    return Fields(jnp.int32(0), (rows, second), None)


def test_fields_are_outside_as_in_optax():
    """So Flax and sharding rules find arrays like the parameters in each field.

    Only arrays shaped like their parameter are found so, and the count is one number.
    """
    rule = for_each_array(fields_of, lambda u, s, x: (u, s._replace(count=s.count + 1)))
    rows = {"a": jnp.ones(2), "b": {"c": jnp.float32(3.0)}, "d": None}
    state = rule.init(rows)
    expected = Fields(
        0, (rows, PerArray((2.0, None))), {"a": None, "b": {"c": None}, "d": None}
    )
    chex.assert_trees_all_equal(state, expected)
    _, state = rule.update(rows, state, rows)
    chex.assert_trees_all_equal(state, expected._replace(count=1))
    assert isinstance(rule.init(jnp.ones(2)), Fields)
    assert rule.init({"d": None}) == {"d": None}
