"""The layer inside a model: gradients, updates, donation, compilations, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects

BATCH = 24
VOCABULARY_SIZE, DIM = 50, 4


def feature_config():
    table = te.TableConfig(
        vocabulary_size=VOCABULARY_SIZE, dim=DIM, combiner="sum", name="items"
    )
    return {
        "item": te.FeatureConfig(table=table),
        "past": te.FeatureConfig(table=table),
    }


class Model(nnx.Module):
    """A layer in the middle: its input comes from the batch, its output goes on."""

    def __init__(self, mesh, optimizer, rngs):
        self.embedding = te.TPUEmbedding(
            feature_config(), optimizer, mesh=mesh, rngs=rngs
        )
        self.norm = nnx.BatchNorm(2 * DIM, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.linear = nnx.Linear(2 * DIM, 1, rngs=rngs)

    def __call__(self, features):
        activations = self.embedding(features)
        joined = jnp.concatenate([activations["item"], activations["past"]], axis=1)
        return self.linear(self.norm(joined))[:, 0]


def loss_fn(model, batch):
    return jnp.mean((model(batch["features"]) - batch["labels"]) ** 2)


def make_batch(seed=0):
    generator = np.random.default_rng(seed)
    past = generator.integers(0, VOCABULARY_SIZE, (BATCH, 3))
    past[generator.random(past.shape) < 0.5] = te.inputs.PADDING_ROW_ID
    features = {"item": generator.integers(0, VOCABULARY_SIZE, BATCH), "past": past}
    labels = generator.normal(size=BATCH).astype(np.float32)
    return {"features": features, "labels": labels}


def dense_embedding(table, features):
    """What the layer computes, as a function of the dense table."""
    is_used = features["past"] != te.inputs.PADDING_ROW_ID
    rows = table[jnp.where(is_used, features["past"], 0)]
    past = jnp.sum(rows * is_used[..., None], axis=1)
    return {"item": table[features["item"]], "past": past}


def prepared(model, batch):
    features = model.embedding.prepare(batch["features"])
    return te.inputs.shard_batch({**batch, "features": features}, model.embedding.plan)


@pytest.mark.parametrize("num_devices", [2, pytest.param(8, marks=pytest.mark.full)])
def test_training_equals_the_dense_model(num_devices):
    """Losses, dense parameters and tables against autodiff of the dense model."""
    model = Model(mesh_of(num_devices), te.optimizers.sgd(0.3), nnx.Rngs(0))
    optimizer, traces = te.Optimizer(model, optax.sgd(0.1)), []
    table = jnp.asarray(model.embedding.embedding_tables()["items"])
    graph, *state = nnx.split((model.norm, model.linear), nnx.Param, ...)
    params, rest = jax.tree.map(lambda x: jnp.asarray(np.array(x)), state)

    def dense_loss(table, params, rest, batch):
        norm, linear = nnx.merge(graph, params, rest, copy=True)
        activations = dense_embedding(table, batch["features"])
        joined = jnp.concatenate([activations["item"], activations["past"]], axis=1)
        predicted = linear(norm(joined))[:, 0]
        _, _, rest = nnx.split((norm, linear), nnx.Param, ...)
        return jnp.mean((predicted - batch["labels"]) ** 2), rest

    dense_step = jax.jit(jax.value_and_grad(dense_loss, argnums=(0, 1), has_aux=True))

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, batch):
        traces.append(1)
        loss, gradients = te.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, gradients)
        return loss

    for seed in range(4):
        batch = make_batch(seed)
        donated = model.embedding.tables.get_value()["stack_0"].lines
        loss = step(model, optimizer, prepared(model, batch))
        assert donated.is_deleted() and len(traces) == 1
        (expected, rest), (by_table, by_params) = dense_step(table, params, rest, batch)
        table -= 0.3 * by_table
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, by_params)
        # Batch normalisation of few samples amplifies rounding.
        np.testing.assert_allclose(loss, expected, rtol=1e-4)
    np.testing.assert_allclose(
        model.embedding.embedding_tables()["items"], table, rtol=1e-3, atol=1e-4
    )
    expected_norm, _ = nnx.merge(graph, params, rest)
    np.testing.assert_allclose(
        model.norm.mean.get_value(),
        expected_norm.mean.get_value(),
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.full(every_case=True)
def test_random_streams_and_statistics_move_on():
    model = Model(mesh_of(1), te.optimizers.sgd(0.1), nnx.Rngs(0))

    def noisy_loss(model, batch):
        activations = model.embedding(batch["features"])
        noisy = model.dropout(activations["item"])
        return jnp.mean(noisy), {"kept": jnp.mean(noisy != 0)}

    count = model.dropout.rngs.count.get_value()
    compute = nnx.jit(te.value_and_grad(noisy_loss, has_aux=True))
    (_, aux), gradients = compute(model, make_batch())
    assert model.dropout.rngs.count.get_value() == count + 1
    assert 0.2 < aux["kept"] < 0.8
    assert set(gradients.tables) == {"embedding"}
    assert model.embedding.stats.get_value().rounds["stack_0"] == 1


def plain_gradients_of_a_part(model, batch):
    linear = nnx.DiffState(0, nnx.PathContains("linear"))
    nnx.grad(loss_fn, argnums=linear)(model, batch)


def plain_gradients_of_merged_parts(model, batch):
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    jax.grad(lambda params: loss_fn(nnx.merge(graph, params, rest), batch))(params)


COMPUTE = "te.value_and_grad(loss_fn)"
MISUSE = {
    "plain gradients": (lambda m, b: nnx.grad(loss_fn)(m, b), COMPUTE),
    "plain gradients of a part": (plain_gradients_of_a_part, "wrt=nnx.PathContains"),
    "plain gradients of another argument": (
        lambda m, b: nnx.grad(lambda m, x: loss_fn(m, b) * x, argnums=1)(m, 1.0),
        "nnx.grad(lambda x: loss_fn(model, x))(x)",
    ),
    "plain gradients of merged parts": (plain_gradients_of_merged_parts, COMPUTE),
    "plain gradients through jit": (
        lambda m, b: nnx.grad(lambda m: nnx.jit(lambda m: loss_fn(m, b))(m))(m),
        COMPUTE,
    ),
    "gradients of a part": (
        lambda m, b: te.Optimizer(m, optax.sgd(0.1)).update(m, nnx.state(m.linear)),
        "value_and_grad",
    ),
    "no layer": (lambda m, b: te.value_and_grad(loss_fn)(m.linear, b), ""),
    "plan and optimizer": (
        lambda m, b: te.TPUEmbedding(
            None, optax.sgd(0.1), plan=m.embedding.plan, rngs=nnx.Rngs(0)
        ),
        "make_plan",
    ),
}


@pytest.fixture(scope="module")
def untrained():
    return Model(mesh_of(1), te.optimizers.sgd(0.1), nnx.Rngs(0))


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_gives_one_clear_error(case, untrained):
    call, fix = MISUSE[case]
    with rejects((TypeError, ValueError), fix=fix):
        call(untrained, make_batch())


def make_layer():
    table = te.TableConfig(
        vocabulary_size=VOCABULARY_SIZE, dim=DIM, combiner="sum", name="items"
    )
    feature, rule = te.FeatureConfig(table=table), te.optimizers.adagrad(0.3)
    return te.TPUEmbedding(feature, rule, mesh=mesh_of(1), rngs=nnx.Rngs(0))


def test_a_function_that_closes_over_a_model_may_be_differentiated():
    head = nnx.Linear(DIM, 1, rngs=nnx.Rngs(0))

    def gradients(head, layer, ids):
        return nnx.grad(lambda head: jnp.sum(head(layer(ids))))(head)

    found = nnx.eval_shape(gradients, head, make_layer(), np.zeros((2, 3), int))
    assert set(found) == {"bias", "kernel"}


def test_weights_of_ids_can_be_learned():
    weights = nnx.Param(jnp.full((4, 2), 0.5))
    model = nnx.Dict(embedding=make_layer(), weights=weights)
    ids = np.arange(8).reshape(4, 2)
    _, gradients = te.value_and_grad(
        lambda m: jnp.sum(m.embedding(ids, m.weights.get_value()))
    )(model)
    rows = model.embedding.embedding_tables()["items"][ids]
    np.testing.assert_allclose(
        gradients["weights"].get_value(), rows.sum(axis=2), rtol=1e-5, atol=1e-6
    )


@pytest.mark.full
def test_two_calls_equal_one_call_over_both():
    generator = np.random.default_rng(0)
    left, right = generator.integers(0, VOCABULARY_SIZE, (2, BATCH, 3))
    targets = generator.normal(size=BATCH).astype(np.float32)

    def loss_of(left, right):
        return jnp.mean((jnp.sum(left * right, axis=1) - targets) ** 2)

    def two_calls(layer):
        return loss_of(layer(left), layer(right))

    def one_call(layer):
        both = layer(np.concatenate([left, right]))
        return loss_of(both[:BATCH], both[BATCH:])

    layer, updates = make_layer(), []
    for loss_fn in (two_calls, one_call):
        gradients = nnx.jit(te.grad(loss_fn))(layer)
        updates.append(gradients.tables[""].row_updates("stack_0"))
    # A row's gradients are summed in the order of its samples, which differs.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), *updates
    )
