"""Slot variables of a model's tables, through the optimizer."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.checkpoint.states import make_layer
from tests.optimizers.rule_cases import compilations


class Towers(nnx.Module):
    """Two layers, each with a table "shared" and one of its own."""

    def __init__(self):
        left, right = ({"shared": (6, 4), x: (6, 4)} for x in ("user", "item"))
        self.left = make_layer(left, te.optimizers.adagrad(0.5))
        self.right = make_layer(right, optax.adam(0.1), seed=1)

    def __call__(self, ids):
        left = self.left({"shared": ids, "user": ids})
        right = self.right({"shared": ids, "item": ids})
        return sum(jnp.sum(x**2) for x in (*left.values(), *right.values()))


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, ids):
    gradients = te.value_and_grad(lambda model: model(ids))(model)[1]
    optimizer.update(model, gradients)


@pytest.mark.full
def test_slots_of_several_layers():
    model = Towers()
    optimizer = te.Optimizer(model, optax.adam(1e-3))
    values = optimizer.slot_values()
    assert {key: set(of_table) for key, of_table in values.items()} == {
        "left/shared": {"accumulators"},
        "user": {"accumulators"},
        "right/shared": {"mu", "nu"},
        "item": {"mu", "nu"},
    }
    assert "count" in optimizer.slot_values("all")["item"]
    ids = np.int32([1, 3])
    train_step(model, optimizer, ids)
    new = np.arange(24, dtype=np.float32).reshape(6, 4)
    optimizer.set_slot_values({"left/shared": {"accumulators": new}})
    optimizer.set_slot_values({"item": {"mu": new, "nu": 2 * new}})
    after = optimizer.slot_values()
    np.testing.assert_array_equal(after["left/shared"]["accumulators"], new)
    np.testing.assert_array_equal(after["item"]["nu"], 2 * new)
    np.testing.assert_array_equal(
        after["user"]["accumulators"][[0, 2]], np.full((2, 4), 0.1, np.float32)
    )
    with compilations() as compiled:
        train_step(model, optimizer, ids)
    assert not compiled
    moved = optimizer.slot_values()["left/shared"]["accumulators"] != new
    np.testing.assert_array_equal(moved.all(axis=1), np.isin(np.arange(6), ids))
