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
from tests.rejections import rejects
from tests.tiers import full_cases

BATCH, DIM = 12, 4
VOCABULARY_SIZE = 50
# Its state has counts of steps next to the slot variables.
ADAGRAD = te.optimizers.adagrad(0.1)
SCHEDULED = te.optimizers.adagrad(optax.linear_schedule(0.2, 0.1, 9))


def make_config():
    item, user = (
        te.TableConfig(vocabulary_size=size, dim=DIM, combiner="sum", name=name)
        for name, size in (("item", VOCABULARY_SIZE), ("user", 30))
    )
    return {"past": te.FeatureConfig(table=item), "user": te.FeatureConfig(table=user)}


@functools.cache
def plan_of(num_devices, optimizer=None):
    return te.make_plan(make_config(), mesh_of(num_devices), optimizer=optimizer)


def trained_plan(num_devices=1):
    return plan_of(num_devices, ADAGRAD)


def make_batch(seed=0):
    generator = np.random.default_rng(seed)
    past = generator.integers(0, VOCABULARY_SIZE, (BATCH, 3))
    past[generator.random(past.shape) < 0.5] = te.inputs.PADDING_ROW_ID
    labels = generator.integers(0, 2, BATCH).astype(np.float32)
    return {"ids": {"past": past, "user": np.arange(BATCH)}, "labels": labels}


def loss_of(logits, batch):
    return optax.sigmoid_binary_cross_entropy(logits[:, 0], batch["labels"]).mean()


class LinenModel(nn.Module):
    plan: te.EmbeddingPlan

    @nn.compact
    def __call__(self, batch):
        activations = te.linen.TPUEmbedding(self.plan, name="embedding")(batch["ids"])
        joined = jnp.concatenate([activations["past"], activations["user"]], axis=1)
        return nn.Dense(1, name="top")(joined)


def linen_loss(model, batch):
    return lambda variables: loss_of(model.apply(variables, batch), batch)


def make_state(model, batch, tx=None):
    variables = jax.jit(model.init)(jax.random.key(0), batch)
    tx = tx or optax.adam(0.01)
    return te.linen.TrainState.create(apply_fn=model.apply, variables=variables, tx=tx)


@pytest.mark.full
def test_a_step_compiles_once_and_donates():
    model, traces = LinenModel(trained_plan(2)), []
    state = make_state(model, make_batch())

    def step(state, batch):
        traces.append(1)
        compute = te.linen.value_and_grad(linen_loss(model, batch))
        loss, gradients = compute(state.variables)
        return state.apply_gradients(grads=gradients), loss

    step = jax.jit(step, donate_argnums=0)
    for _ in range(3):
        old = jax.tree.leaves((state.variables, state.slots))
        state, _ = step(state, make_batch())
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


@functools.cache
def towers_plan(num_devices=1):
    table = te.TableConfig(vocabulary_size=20, dim=4, name="item")
    feature = te.FeatureConfig(table=table)
    rule = te.optimizers.sgd(0.5)
    return te.make_plan(feature, mesh_of(num_devices), optimizer=rule)


def test_gradients_of_several_calls_and_layers_are_added():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, left, right):
            towers = Towers(towers_plan(), name="towers")(left, right)
            other = te.linen.TPUEmbedding(towers_plan(), name="other")(left)
            te.linen.TPUEmbedding(towers_plan(), name="idle")
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
    batch, tx = make_batch(), optax.adam(0.01)
    model = LinenModel(plan_of(2, SCHEDULED))
    state = make_state(model, batch, tx)
    _, gradients = te.linen.value_and_grad(linen_loss(model, batch))(state.variables)
    trained = state.apply_gradients(grads=gradients)
    saved = serialization.to_bytes(trained)
    restored = serialization.from_bytes(state, saved)
    jax.tree.map(np.testing.assert_array_equal, restored, trained)
    found, wanted = (
        jax.tree.leaves(x.variables["embedding_tables"]) for x in (restored, trained)
    )
    assert [x.sharding for x in found] == [x.sharding for x in wanted]
    other = make_state(LinenModel(plan_of(3, SCHEDULED)), batch, tx)
    with rejects(fix="te.linen.embedding_tables"):
        serialization.from_bytes(other, saved)


class Remat(nn.Module):
    """Has its layer within a submodule that Linen transforms."""

    @nn.compact
    def __call__(self, ids):
        return nn.remat(te.linen.TPUEmbedding)(towers_plan())(ids)


def test_a_transformed_layer_looks_up_and_raises_instead_of_losing_gradients():
    model, ids = Remat(), np.arange(4)
    variables = model.init(jax.random.key(0), ids)
    (tables,) = te.linen.embedding_tables(variables).values()
    np.testing.assert_array_equal(model.apply(variables, ids), tables["item"][ids])
    with rejects():
        te.linen.value_and_grad(lambda v: jnp.sum(model.apply(v, ids)))(variables)


def plain_gradients(model, variables, batch):
    rest = {"embedding_tables": variables["embedding_tables"]}
    jax.grad(lambda params: linen_loss(model, batch)({"params": params, **rest}))(
        variables["params"]
    )


def apply_with_tables_of(plan, variables):
    other = LinenModel(plan).init(jax.random.key(0), make_batch())
    tables = {"embedding_tables": other["embedding_tables"]}
    LinenModel(trained_plan()).apply({**variables, **tables}, make_batch())


MISUSE = {
    "plain gradients": (plain_gradients, "te.linen.value_and_grad"),
    "loss by parameters only": (
        lambda m, v, b: te.linen.value_and_grad(linen_loss(m, b))(v["params"]),
        "model.init",
    ),
    "tables of another plan": (
        lambda m, v, b: apply_with_tables_of(trained_plan(2), v),
        "",
    ),
    "gradients of jax.grad": (
        lambda m, v, b: make_state(m, b).apply_gradients(grads=v["params"]),
        "value_and_grad",
    ),
    "jit inside": (
        lambda m, v, b: te.linen.value_and_grad(jax.jit(linen_loss(m, b)))(v),
        "jax.jit to the whole step",
    ),
    "penalty of the tables": (
        lambda m, v, b: te.linen.value_and_grad(
            lambda v: linen_loss(m, b)(v) + optax.tree.norm(v["embedding_tables"])
        )(v),
        "weight_decay_factor",
    ),
    "state without tables": (
        lambda m, v, b: te.linen.TrainState.create(
            apply_fn=m.apply, variables={"params": v["params"]}, tx=optax.sgd(0.1)
        ),
        "model.init",
    ),
}


@pytest.fixture(scope="module")
def untrained():
    model, batch = LinenModel(trained_plan()), make_batch()
    return model, jax.jit(model.init)(jax.random.key(0), batch), batch


@pytest.mark.parametrize("case", full_cases(MISUSE, "tables of another plan"))
def test_misuse_gives_one_clear_error(case, untrained):
    call, fix = MISUSE[case]
    with rejects((TypeError, ValueError), fix=fix):
        call(*untrained)


def test_linen_layer_in_an_nnx_model_looks_up_and_raises_in_training():
    ids = np.arange(4)
    layer = te.linen.TPUEmbedding(towers_plan())
    model = nnx.bridge.ToNNX(layer, rngs=nnx.Rngs(0)).lazy_init(ids)
    assert model(ids).shape == (4, 4)

    def loss_fn(model):
        return jnp.sum(model(ids))

    for compute in (te.value_and_grad(loss_fn), nnx.grad(loss_fn)):
        with rejects(fix="te.TPUEmbedding instead of nnx.bridge"):
            compute(model)
