"""Hyper-parameters from functions that are asked before each step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te

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


def rate_of(optimizer):
    """Returns the learning rate that the state of the only table holds."""
    has_rate = lambda x: hasattr(x, "hyperparams")  # noqa: E731
    nodes = jax.tree.leaves(optimizer.slots.get_value(), is_leaf=has_rate)
    (state,) = filter(has_rate, nodes)
    return float(state.hyperparams["learning_rate"])


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


def test_one_call_for_several_optimizers():
    calls = []

    def rate():
        calls.append("called")
        return 0.5

    def step(*optimizers):
        return [rate_of(optimizer) for optimizer in optimizers]

    (_, first), (_, second) = make(), make()
    assert te.nn.set_each_step(step, learning_rate=rate)(first, second) == [0.5, 0.5]
    assert calls == ["called"]


def test_the_pipelined_step():
    """A call trains on the batch of the call before, with the rate of its own."""
    model, optimizer = make()
    pipelined = te.PipelinedTrainStep(loss_fn)
    rates = iter(RATES)
    step = te.nn.set_each_step(pipelined, learning_rate=lambda: next(rates))
    step(model, optimizer, model.prepare(IDS))
    for rate in RATES[1:]:
        before = rows(model)
        step(model, optimizer, model.prepare(IDS))
        np.testing.assert_allclose(before - rows(model), rate, rtol=0, atol=1e-6)


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


def test_refuses_to_be_compiled():
    """A function would be called once, and its value would stay."""
    step = te.nn.set_each_step(jitted([]), learning_rate=lambda: 0.1)
    model, optimizer = make()
    with pytest.raises(TypeError, match="learning_rate must be a number under jit"):
        nnx.jit(step)(model, optimizer, jnp.asarray(IDS))


def test_refuses_a_step_without_an_optimizer():
    step = te.nn.set_each_step(lambda x: x, learning_rate=lambda: 0.1)
    with pytest.raises(TypeError, match=r"with a te.Optimizer or .*got \['int'\]"):
        step(3)


def test_refuses_an_optimizer_without_the_hyperparameter():
    step = te.nn.set_each_step(lambda _: None, learning_rate=lambda: 0.1)
    _, optimizer = make(te.optimizers.sgd(0.1))
    with pytest.raises(ValueError, match=r"optax.inject_hyperparams\(optimizer\)"):
        step(optimizer)


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (0.1, "must be a function without arguments, got 0.1; set a number by opt"),
        (lambda count: 0.1, "give a function of the step to the optimizer"),
    ],
)
def test_refuses_what_is_no_function_without_arguments(value, match):
    with pytest.raises(TypeError, match=match):
        te.nn.set_each_step(print, learning_rate=value)


@pytest.mark.parametrize(
    "function", [lambda rate=0.25: rate, functools.partial(float, 0.25)]
)
def test_takes_functions_whose_arguments_have_values(function):
    _, optimizer = make()
    assert te.nn.set_each_step(rate_of, learning_rate=function)(optimizer) == 0.25
