"""Losses that copy their layers, or read tables without a lookup.

Each call's gradient reaches its own rows, however the layer was copied, or the user
gets an error.
"""

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects
from tests.tiers import quick_cases

SIZE, DIM = 12, 2
SGD = te.optimizers.sgd(1.0)
TABLE = te.TableConfig(vocabulary_size=SIZE, dim=DIM, name="t")
FEATURE = te.FeatureConfig(table=TABLE)
READ_FIXES = ("weight_decay_factor", "te.nn.top_k", "nnx.Embed", "stop_gradient")


class Model(nnx.Module):
    def __init__(self):
        self.layer = te.TPUEmbedding(FEATURE, SGD, mesh=mesh_of(1), rngs=nnx.Rngs(0))


def moved_by(loss_fn, model):
    """Returns how far a step with rate 1 moves the rows: the gradient."""
    before = model.layer.embedding_tables()["t"]
    _, gradients = te.value_and_grad(loss_fn)(model)
    te.Optimizer(model, optax.sgd(1.0)).update(model, gradients)
    return before - model.layer.embedding_tables()["t"]


def with_split_state(transform):
    def call(layer, ids):
        graph, state = nnx.split(layer)
        return transform(lambda state, ids: nnx.merge(graph, state)(ids))(state, ids)

    return call


def scan_with_broadcast(layer, ids):
    @nnx.scan(in_axes=(nnx.Carry, nnx.StateAxes({...: None}), 0), out_axes=nnx.Carry)
    def body(carry, layer, ids):
        return carry + jnp.sum(layer(ids) ** 2)

    return jnp.sqrt(body(jnp.zeros(()), layer, ids[None]))


def scan_with_closure(layer, ids):
    return jax.lax.scan(lambda carry, i: (carry, layer(i)), 0, ids[None])[1]


def mapped(function):
    return lambda state, ids: jax.vmap(function, (None, 0))(state, ids[None])


def differentiated(function):
    def call(state, ids):
        return jax.grad(lambda x: jnp.sum(x * jax.jit(function)(state, ids)))(1.0)

    return call


def plain(layer, ids):
    return layer(ids)


def cond(layer, ids):
    return nnx.cond(ids[0] < 6, plain, lambda layer, ids: 2 * layer(ids), layer, ids)


# Compiled by the first loss, and found again by all others.
COMPILED = nnx.jit(plain)

COPIES = {
    "clone": nnx.clone,
    "deepcopy": copy.deepcopy,
    "merge with copy": lambda layer: nnx.merge(*nnx.split(layer), copy=True),
    "split and merge": lambda layer: nnx.merge(*nnx.split(layer)),
}
CALLS = {
    "plain": plain,
    "nnx.jit": COMPILED,
    "a fresh nnx.jit": lambda layer, ids: nnx.jit(lambda m, i: m(i))(layer, ids),
    "nnx.remat": lambda layer, ids: nnx.remat(plain)(layer, ids),
    "nnx.jit of nnx.remat": lambda layer, ids: nnx.jit(nnx.remat(plain))(layer, ids),
    "jax.jit": with_split_state(jax.jit),
    "jax.checkpoint": with_split_state(jax.checkpoint),
    "jax.vmap": with_split_state(mapped),
    "jax.grad": with_split_state(differentiated),
    "nnx.scan": scan_with_broadcast,
    "scan": scan_with_closure,
    "nnx.cond": cond,
}
KEEP_GRADIENTS = ("nnx.jit", "a fresh nnx.jit", "nnx.remat", "nnx.jit of nnx.remat")
"""Calls that keep the gradient of the model's own layer."""


@pytest.mark.parametrize("is_first", [True, False], ids=["copy first", "copy second"])
@pytest.mark.parametrize("make", quick_cases(COPIES, "clone"))
def test_each_call_of_a_copy_has_its_own_gradient(make, is_first):
    def loss_fn(model):
        layers = [model.layer, COPIES[make](model.layer)]
        if is_first:
            layers.reverse()
        return sum(
            jnp.sum((1 if layer is not model.layer else 10) * layer(ids))
            for layer, ids in zip(layers, jnp.array([[0, 1], [2, 3]]), strict=True)
        )

    moved = moved_by(loss_fn, Model())
    expected = [1, 1, 10, 10] if is_first else [10, 10, 1, 1]
    np.testing.assert_allclose(moved[:4], np.outer(expected, [1, 1]), rtol=1e-5)


@pytest.mark.parametrize(
    "call",
    quick_cases(
        [call for call in CALLS if call not in ("plain", "nnx.cond")],
        "jax.checkpoint",
        "nnx.jit",
    ),
)
def test_a_copy_inside_a_transformation_raises(call):
    """Also if the copy finds a program that was compiled for the layer itself."""

    def loss_fn(model):
        clone, ids = nnx.clone(model.layer), jnp.array([0, 1])
        own = CALLS[call if call in KEEP_GRADIENTS else "plain"](model.layer, ids)
        return jnp.sum(own) + jnp.sum(CALLS[call](clone, ids + 2))

    for _ in range(2):  # The second run finds the traces of the first.
        with rejects():
            te.value_and_grad(loss_fn)(Model())


@pytest.mark.parametrize("call", quick_cases(CALLS, "jax.vmap", "nnx.remat"))
def test_a_call_of_the_layer_itself_is_right_or_raises(call):
    def loss_fn(model):
        return jnp.sum(CALLS[call](model.layer, jnp.array([0, 1])) ** 2)

    model = Model()
    rows = model.layer.embedding_tables()["t"]
    try:
        moved = moved_by(loss_fn, model)
    except ValueError:
        assert call not in ("plain", *KEEP_GRADIENTS)
        return
    np.testing.assert_allclose(moved[:2], 2 * rows[:2], rtol=1e-4, atol=1e-5)
    assert not moved[2:].any()


def table_of(model):
    (stack,) = model.layer.tables.get_value().values()
    return stack.lines


READS = {
    "penalty": lambda model, rows: sum(
        jnp.sum(leaf**2)
        for leaf in jax.tree.leaves(nnx.state(model, te.nn.EmbeddingTables))
    ),
    "softmax": lambda model, rows: jnp.sum(
        jax.nn.logsumexp(rows @ table_of(model)[:SIZE].T, axis=1)
    ),
    "in nnx.jit": lambda model, rows: nnx.jit(lambda m: jnp.sum(table_of(m)))(model),
    "in a clone": lambda model, rows: jnp.sum(table_of(nnx.clone(model))),
}


@pytest.mark.parametrize("read", READS)
def test_a_table_read_in_the_loss_raises(read):
    def loss_fn(model):
        rows = model.layer(jnp.array([0, 1]))
        return jnp.sum(rows) + READS[read](model, rows)

    with rejects() as raised:
        te.value_and_grad(loss_fn)(Model())
    assert [fix for fix in READ_FIXES if fix not in str(raised.value)] == []


def test_reads_without_a_derivative_are_allowed():
    def loss_fn(model):
        ids = jnp.array([0, 1])
        table = table_of(model)
        hard = te.nn.top_k(model.layer, model.layer(ids), 2).ids[:, 1]
        aux = {"norm": jnp.sum(table**2), "rows": table[:1]}
        loss = jnp.sum(model.layer(ids) * model.layer(jax.lax.stop_gradient(hard)))
        return loss + jnp.sum(jax.lax.stop_gradient(table)), aux

    model = Model()
    (_, aux), gradients = te.value_and_grad(loss_fn, has_aux=True)(model)
    np.testing.assert_allclose(aux["norm"], np.sum(np.array(table_of(model)) ** 2))
    assert set(gradients.tables) == {"layer"}


def test_other_numbers_of_calls_in_the_second_run_raise():
    for first, second in ((1, 2), (2, 1)):
        counts = iter((first, second))

        def loss_fn(model, counts=counts):
            return sum(
                jnp.sum(model.layer(jnp.array([i]))) for i in range(next(counts))
            )

        with rejects():
            te.value_and_grad(loss_fn)(Model())


@pytest.mark.full
@pytest.mark.parametrize("is_first", [True, False], ids=["copy first", "copy second"])
def test_a_pipelined_step_with_a_copy(is_first):
    """The prefetched lookup belongs to the first call, whichever copy makes it."""

    def loss_fn(model, batch):
        clone = nnx.clone(model.layer)
        first, second = (clone, model.layer) if is_first else (model.layer, clone)
        return jnp.sum(first(batch)) + 10 * jnp.sum(second(batch + 2))

    model = Model()
    before = model.layer.embedding_tables()["t"]
    optimizer = te.Optimizer(model, optax.sgd(1.0))
    step = te.PipelinedTrainStep(loss_fn, features_of=lambda batch: batch)
    first, second = jnp.array([0, 1]), jnp.array([4, 5])
    step(model, optimizer, first, second)
    step(model, optimizer, second, None)
    moved = before - model.layer.embedding_tables()["t"]
    expected = np.outer([1, 1, 10, 10, 1, 1, 10, 10], [1, 1])
    np.testing.assert_allclose(moved[:8], expected, rtol=1e-4)


def test_models_with_equal_plans_share_a_compiled_step():
    plan = te.make_plan(FEATURE, mesh_of(1), optimizer=SGD)
    tx, traces = optax.sgd(0.1), []

    @nnx.jit
    def step(model, optimizer, ids):
        traces.append(ids)
        _, gradients = te.value_and_grad(lambda m: jnp.sum(m(ids)))(model)
        optimizer.update(model, gradients)

    for seed in range(2):
        model = te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(seed))
        optimizer = te.Optimizer(model, tx)
        step(model, optimizer, jnp.array([1, 2]))
        step(model, optimizer, model.prepare(np.array([1, 2])))
    assert len(traces) == 1


LINEN_COPIES = {
    "clone": lambda layer, variables: layer.clone().apply(variables, jnp.array([0, 1])),
    "unbind": lambda layer, variables: (
        layer.bind(variables).unbind()[0].apply(variables, jnp.array([0, 1]))
    ),
}


@pytest.mark.parametrize("make", quick_cases(LINEN_COPIES, "clone"))
def test_copies_of_a_linen_layer(make):
    plan = te.make_plan(FEATURE, mesh_of(1), optimizer=SGD)
    layer = te.linen.TPUEmbedding(plan)
    variables = layer.init(jax.random.key(0), jnp.array([0, 1]))

    def loss_fn(variables):
        rows: Any = layer.apply(variables, jnp.array([2, 3]))
        return 10 * jnp.sum(rows) + jnp.sum(LINEN_COPIES[make](layer, variables))

    _, gradients = te.linen.value_and_grad(loss_fn)(variables)
    updates = gradients.tables[""].row_updates("stack_0")
    order = np.argsort(updates.row_ids)[:4]
    np.testing.assert_array_equal(updates.row_ids[order], np.arange(4))
    np.testing.assert_allclose(
        updates.values[order], np.outer([1, 1, 10, 10], [1, 1]), rtol=1e-5
    )
