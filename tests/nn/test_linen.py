"""The Linen layer: steps, gradients, restores and errors of misuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx, serialization

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.nn.test_dense_optimizer import LinenModel
from tests.rejections import rejects
from tests.tiers import full_cases

IDS = np.arange(12)
TABLE = te.TableConfig(vocabulary_size=20, dim=4, name="item")
SGD = te.optimizers.sgd(0.5)
ADAM = optax.adam(0.01)
# Its state has counts of steps next to the slot variables.
SCHEDULED = te.optimizers.adagrad(optax.linear_schedule(0.2, 0.1, 9))


@functools.cache
def plan_of(num_devices=1, optimizer=SGD):
    feature = te.FeatureConfig(table=TABLE)
    return te.make_plan(feature, mesh_of(num_devices), optimizer=optimizer)


def linen_loss(model):
    return lambda variables: jnp.sum(model.apply(variables, IDS) ** 2)


def make_state(model):
    variables = jax.jit(model.init)(jax.random.key(0), IDS)
    return te.linen.TrainState.create(
        apply_fn=model.apply, variables=variables, tx=ADAM
    )


@pytest.mark.full
def test_a_step_compiles_once_and_donates():
    model, traces = LinenModel(plan_of(2, SCHEDULED)), []
    state = make_state(model)

    def step(state):
        traces.append(1)
        compute = te.linen.value_and_grad(linen_loss(model))
        loss, gradients = compute(state.variables)
        return state.apply_gradients(grads=gradients), loss

    step = jax.jit(step, donate_argnums=0)
    for _ in range(3):
        old = jax.tree.leaves((state.variables, state.slots))
        state, _ = step(state)
        assert all(leaf.is_deleted() for leaf in old if leaf.ndim)
    assert len(traces) == 1
    assert step._cache_size() == 1
    assert state.step == 3


def test_init_makes_tables_once_on_the_mesh():
    made = []

    def initializer(key, shape, dtype):
        made.append(shape)
        return jnp.ones(shape, dtype)

    table = te.TableConfig(
        vocabulary_size=9, dim=4, initializer=initializer, name="item"
    )
    plan = te.make_plan(
        te.FeatureConfig(table=table), mesh_of(2), optimizer=te.optimizers.sgd(0.1)
    )
    model, ids = Towers(plan), jnp.arange(4)
    shapes = jax.eval_shape(model.init, jax.random.key(0), ids, ids)
    made.clear()
    variables = jax.jit(model.init)(jax.random.key(0), ids, ids)
    assert len(made) <= 1  # none, if the trace for the shapes is still there
    assert jax.tree.structure(variables) == jax.tree.structure(shapes)
    (lines,) = jax.tree.leaves(variables["embedding_tables"])
    assert lines.sharding.is_equivalent_to(plan.batch_sharding, lines.ndim)
    assert set(variables) == {"params", "embedding_tables"}


class Towers(nn.Module):
    """Two calls of one layer."""

    plan: te.EmbeddingPlan

    def setup(self):
        self.embedding = te.linen.TPUEmbedding(self.plan)

    def __call__(self, left, right):
        return jnp.sum(self.embedding(left) * self.embedding(right), axis=1)


def test_gradients_of_several_calls_and_layers_are_added():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, left, right):
            towers = Towers(plan_of(), name="towers")(left, right)
            other = te.linen.TPUEmbedding(plan_of(), name="other")(left)
            te.linen.TPUEmbedding(plan_of(), name="idle")
            return towers + jnp.sum(other, axis=1)

    left, right = np.array([[1, 5, 1, 7], [5, 2, 2, 9]])
    model = Model()
    variables = model.init(jax.random.key(0), left, right)
    tables = te.linen.embedding_tables(variables)
    state = te.linen.TrainState.create(
        apply_fn=model.apply, variables=variables, tx=optax.sgd(0.1)
    )

    def loss_fn(variables):
        return jnp.sum(model.apply(variables, left, right) ** 2)

    def dense_loss(towers, other):
        product = jnp.sum(towers[left] * towers[right], axis=1)
        return jnp.sum((product + jnp.sum(other[left], axis=1)) ** 2)

    loss, gradients = te.linen.value_and_grad(loss_fn)(state.variables)
    expected = {path: tables[path]["item"] for path in ("towers/embedding", "other")}
    by_path = jax.grad(dense_loss, argnums=(0, 1))(*map(jnp.array, expected.values()))
    np.testing.assert_allclose(
        te.gradients.global_norm(gradients), optax.global_norm(by_path), rtol=1e-5
    )
    state = state.apply_gradients(grads=gradients)
    tables = te.linen.embedding_tables(state.variables)
    for (path, before), gradient in zip(expected.items(), by_path, strict=True):
        np.testing.assert_allclose(
            tables[path]["item"], before - 0.5 * gradient, rtol=1e-5, atol=1e-6
        )


@pytest.mark.full
def test_flax_bytes_restore_under_the_same_plan_only():
    model = LinenModel(plan_of(2, SCHEDULED))
    state = make_state(model)
    _, gradients = te.linen.value_and_grad(linen_loss(model))(state.variables)
    trained = state.apply_gradients(grads=gradients)
    saved = serialization.to_bytes(trained)
    restored = serialization.from_bytes(state, saved)
    jax.tree.map(np.testing.assert_array_equal, restored, trained)
    found, wanted = (
        jax.tree.leaves(x.variables["embedding_tables"]) for x in (restored, trained)
    )
    assert [x.sharding for x in found] == [x.sharding for x in wanted]
    other = make_state(LinenModel(plan_of(3, SCHEDULED)))
    with rejects(fix="te.linen.embedding_tables"):
        serialization.from_bytes(other, saved)


class Remat(nn.Module):
    """Has its layer within a submodule that Linen transforms."""

    @nn.compact
    def __call__(self, ids):
        return nn.remat(te.linen.TPUEmbedding)(plan_of())(ids)


def test_a_transformed_layer_looks_up_and_raises_instead_of_losing_gradients():
    model, ids = Remat(), np.arange(4)
    variables = model.init(jax.random.key(0), ids)
    (tables,) = te.linen.embedding_tables(variables).values()
    np.testing.assert_array_equal(model.apply(variables, ids), tables["item"][ids])
    with rejects():
        te.linen.value_and_grad(lambda v: jnp.sum(model.apply(v, ids)))(variables)


def plain_gradients(model, variables):
    rest = {"embedding_tables": variables["embedding_tables"]}
    jax.grad(lambda params: linen_loss(model)({"params": params, **rest}))(
        variables["params"]
    )


def apply_with_tables_of(plan, model, variables):
    other = LinenModel(plan).init(jax.random.key(0), IDS)
    tables = {"embedding_tables": other["embedding_tables"]}
    model.apply({**variables, **tables}, IDS)


MISUSE = {
    "plain gradients": (plain_gradients, "te.linen.value_and_grad"),
    "loss by parameters only": (
        lambda m, v: te.linen.value_and_grad(linen_loss(m))(v["params"]),
        "model.init",
    ),
    "tables of another plan": (lambda m, v: apply_with_tables_of(plan_of(2), m, v), ""),
    "gradients of jax.grad": (
        lambda m, v: make_state(m).apply_gradients(grads=v["params"]),
        "value_and_grad",
    ),
    "jit inside": (
        lambda m, v: te.linen.value_and_grad(jax.jit(linen_loss(m)))(v),
        "jax.jit to the whole step",
    ),
    "penalty of the tables": (
        lambda m, v: te.linen.value_and_grad(
            lambda v: linen_loss(m)(v) + optax.tree.norm(v["embedding_tables"])
        )(v),
        "weight_decay_factor",
    ),
    "state without tables": (
        lambda m, v: te.linen.TrainState.create(
            apply_fn=m.apply, variables={"params": v["params"]}, tx=optax.sgd(0.1)
        ),
        "model.init",
    ),
}


@pytest.fixture(scope="module")
def untrained():
    model = LinenModel(plan_of())
    return model, jax.jit(model.init)(jax.random.key(0), IDS)


@pytest.mark.parametrize("case", full_cases(MISUSE, "tables of another plan"))
def test_misuse_gives_one_clear_error(case, untrained):
    call, fix = MISUSE[case]
    with rejects((TypeError, ValueError), fix=fix):
        call(*untrained)


def test_linen_layer_in_an_nnx_model_looks_up_and_raises_in_training():
    ids = np.arange(4)
    layer = te.linen.TPUEmbedding(plan_of())
    model = nnx.bridge.ToNNX(layer, rngs=nnx.Rngs(0)).lazy_init(ids)
    assert model(ids).shape == (4, 4)

    def loss_fn(model):
        return jnp.sum(model(ids))

    for compute in (te.value_and_grad(loss_fn), nnx.grad(loss_fn)):
        with rejects(fix="te.TPUEmbedding instead of nnx.bridge"):
            compute(model)
