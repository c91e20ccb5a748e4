"""Hyper-parameters from functions that are asked before each step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.rejections import rejects

TABLE = te.TableConfig(vocabulary_size=6, dim=2, name="movie")
FEATURE = te.FeatureConfig(table=TABLE)
RATES = (0.5, 0.0, 0.25)
IDS = np.array([1, 2, 3, 4], np.int32)


def injected(rate=0.1):
    return optax.inject_hyperparams(te.optimizers.sgd)(learning_rate=rate)


def loss_fn(model, ids):
    """A loss whose gradient of each looked-up row is 1."""
    return model(ids).sum()


def make(optimizer=None):
    model = te.TPUEmbedding(FEATURE, optimizer or injected(), rngs=nnx.Rngs(0))
    return model, te.Optimizer(model, optax.adam(1e-3))


def jitted(traces):
    @nnx.jit
    def train_step(model, optimizer, ids):
        traces.append("compiled")
        loss, gradients = te.value_and_grad(loss_fn)(model, ids)
        optimizer.update(model, gradients)
        return loss

    return train_step


def rows(model):
    return model.embedding_tables()["movie"][1:5]


def test_each_step_has_the_rate_of_its_call():
    traces, rates = [], iter(RATES)
    step = te.nn.set_each_step(jitted(traces), learning_rate=lambda: next(rates))
    model, optimizer = make()
    for rate in RATES:
        before = rows(model)
        step(model, ids=model.prepare(IDS), optimizer=optimizer)
        # One rounding of the row.
        np.testing.assert_allclose(before - rows(model), rate, rtol=0, atol=1e-6)
    assert traces == ["compiled"]


@pytest.mark.full
def test_the_state_of_linen():
    plan = te.make_plan(FEATURE, optimizer=injected())
    layer, ids = te.linen.TPUEmbedding(plan), jnp.asarray(IDS)
    state = te.linen.TrainState.create(
        apply_fn=layer.apply,
        variables=layer.init(jax.random.key(0), ids),
        tx=optax.adam(1e-3),
    )

    @jax.jit
    def train_step(state):
        loss = lambda variables: state.apply_fn(variables, ids).sum()  # noqa: E731
        _, gradients = te.linen.value_and_grad(loss)(state.variables)
        return state.apply_gradients(grads=gradients)

    rates = iter(RATES)
    step = te.nn.set_each_step(train_step, learning_rate=lambda: next(rates))
    for rate in RATES:
        before = te.linen.embedding_tables(state.variables)
        state = step(state)
        after = te.linen.embedding_tables(state.variables)
        change = jax.tree.leaves(before)[0][1:5] - jax.tree.leaves(after)[0][1:5]
        np.testing.assert_allclose(change, rate, rtol=0, atol=1e-6)


def test_a_step_is_not_compiled_and_has_an_optimizer():
    """A function would be called once, and its value would stay."""
    step = te.nn.set_each_step(jitted([]), learning_rate=lambda: 0.1)
    with rejects(TypeError, fix="te.nn.set_each_step(jitted_step"):
        nnx.jit(step)(*make(), jnp.asarray(IDS))
    with rejects(TypeError):
        step(3)


@pytest.mark.parametrize("value", [0.1, lambda count: 0.1])
def test_rejects_what_is_not_a_function_without_arguments(value):
    with rejects(TypeError, field="learning_rate", value=value):
        te.nn.set_each_step(print, learning_rate=value)
