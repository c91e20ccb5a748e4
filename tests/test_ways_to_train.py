"""All ways to train one model give the same losses, wherever its tables live."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh

import tpu_embedding as te
from tests.conftest import mesh_of

DIM, BATCH, STEPS = 8, 24, 200
SIZES = {"site": 40, "ad": 11, "device": 5}


def make_plan(mesh, placement):
    features = {
        name: te.FeatureConfig(
            table=te.TableConfig(
                vocabulary_size=size, dim=DIM, combiner="mean", name=name
            )
        )
        for name, size in SIZES.items()
    }
    return te.make_plan(
        features, mesh, optimizer=te.optimizers.adagrad(0.05), placement=placement
    )


def batch_of(step):
    """Ids with hot rows, and labels of a rule, so that the loss falls."""
    random = np.random.default_rng(step)
    ids = {
        name: (size * random.random((BATCH, 3)) ** 2).astype(np.int32)
        for name, size in SIZES.items()
    }
    numbers = random.normal(size=(BATCH, 4)).astype(np.float32)
    labels = (ids["ad"][:, 0] % 3 == 0) ^ (numbers[:, 0] > 0)
    return ids, numbers, labels.astype(np.float32)


BATCHES = [batch_of(step) for step in range(8)]


def batches():
    return (BATCHES[step % len(BATCHES)] for step in range(STEPS))


def interact(rows, bottom):
    vectors = jnp.stack([bottom, *rows.values()], axis=1)
    products = jnp.einsum("bid,bjd->bij", vectors, vectors)
    return jnp.concatenate([bottom, products[:, *jnp.triu_indices(4, k=1)]], axis=1)


@functools.cache
def initial_params():
    """The dense parameters of every way: two layers, as Linen names them."""
    random = np.random.default_rng(0)

    def layer(inputs, outputs):
        kernel = random.normal(size=(inputs, outputs)) / np.sqrt(inputs)
        return {
            "kernel": kernel.astype(np.float32),
            "bias": np.zeros(outputs, np.float32),
        }

    return {"bottom": layer(4, DIM), "top": layer(DIM + 6, 1)}


def logits_of(params, rows, numbers):
    def dense(x, layer):
        return x @ layer["kernel"] + layer["bias"][None]

    bottom = jax.nn.relu(dense(numbers, params["bottom"]))
    return dense(interact(rows, bottom), params["top"])[:, 0]


def loss_of(logits, labels):
    return optax.sigmoid_binary_cross_entropy(logits, labels).mean()


class NnxModel(nnx.Module):
    def __init__(self, plan):
        self.embedding = te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(0))
        self.bottom = nnx.Linear(4, DIM, rngs=nnx.Rngs(0))
        self.top = nnx.Linear(DIM + 6, 1, rngs=nnx.Rngs(0))
        for name, layer in initial_params().items():
            for key, value in layer.items():
                getattr(getattr(self, name), key).set_value(jnp.asarray(value))

    def __call__(self, ids, numbers):
        bottom = nnx.relu(self.bottom(numbers))
        return self.top(interact(self.embedding(ids), bottom))[:, 0]


class LinenModel(nn.Module):
    plan: te.EmbeddingPlan

    @nn.compact
    def __call__(self, ids, numbers):
        rows = te.linen.TPUEmbedding(self.plan, name="embedding")(ids)
        params = {
            name: {
                key: self.param(f"{name}_{key}", lambda _, value=value: value)
                for key, value in layer.items()
            }
            for name, layer in initial_params().items()
        }
        return logits_of(params, rows, numbers)


def tables_of(plan):
    return te.functional.init_tables(plan, nnx.Rngs(0).params())


def nnx_loss(model, ids, numbers, labels):
    return loss_of(model(ids, numbers), labels)


def train_nnx(plan):
    model = NnxModel(plan)
    optimizer = te.Optimizer(model, optax.adam(1e-2))

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, batch):
        loss, gradients = te.value_and_grad(nnx_loss)(model, *batch)
        optimizer.update(model, gradients)
        return loss

    losses = [step(model, optimizer, batch) for batch in batches()]
    return losses, model.embedding.embedding_tables()


def train_nnx_pipelined(plan):
    model = NnxModel(plan)
    optimizer = te.Optimizer(model, optax.adam(1e-2))
    pipeline = te.PipelinedTrainStep(nnx_loss, mode="exact")
    losses = [pipeline(model, optimizer, *batch) for batch in batches()]
    losses.append(pipeline.drain(model, optimizer))
    return losses[1:], model.embedding.embedding_tables()


def train_linen(plan):
    model = LinenModel(plan)
    variables = te.linen.with_embedding_tables(
        model.init(jax.random.key(0), *BATCHES[0][:2]),
        {"embedding": te.functional.unstack_tables(tables_of(plan), plan)},
    )
    state = te.linen.TrainState.create(
        apply_fn=model.apply, variables=variables, tx=optax.adam(1e-2)
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, ids, numbers, labels):
        def loss_fn(variables):
            return loss_of(state.apply_fn(variables, ids, numbers), labels)

        loss, gradients = te.linen.value_and_grad(loss_fn)(state.variables)
        return state.apply_gradients(grads=gradients), loss

    losses = []
    for batch in batches():
        state, loss = step(state, *batch)
        losses.append(loss)
    return losses, te.linen.embedding_tables(state.variables)["embedding"]


def functional_parts(plan):
    tx = optax.adam(1e-2)
    params = jax.tree.map(jnp.asarray, initial_params())
    tables = tables_of(plan)
    state = (tables, te.functional.init_slots(tables, plan), params, tx.init(params))

    def update(state, result, numbers, labels):
        tables, slots, params, opt_state = state

        def dense_loss(params, rows):
            return loss_of(logits_of(params, rows, numbers), labels)

        loss, (by_params, cotangents) = jax.value_and_grad(dense_loss, (0, 1))(
            params, result.activations
        )
        gradients = te.functional.compute_gradients(result.routing, cotangents, plan)
        tables, slots = te.functional.apply_gradients(tables, slots, gradients, plan)
        updates, opt_state = tx.update(by_params, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (tables, slots, params, opt_state), loss

    return state, update


def train_functional(plan):
    state, update = functional_parts(plan)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, ids, numbers, labels):
        result = te.functional.lookup(state[0], ids, plan)
        return update(state, result, numbers, labels)

    losses = []
    for batch in batches():
        state, loss = step(state, *batch)
        losses.append(loss)
    return losses, te.functional.unstack_tables(state[0], plan)


def train_functional_pipelined(plan):
    """The ids of the next batch are routed while this batch is trained on."""
    state, update = functional_parts(plan)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, routed, numbers, labels, next_ids):
        next_routed = te.functional.route(next_ids, plan)
        result = te.functional.read_rows(state[0], routed, plan)
        state, loss = update(state, result, numbers, labels)
        return state, next_routed, loss

    losses, stream = [], list(batches())
    routed = jax.jit(lambda ids: te.functional.route(ids, plan))(stream[0][0])
    for i, (_, numbers, labels) in enumerate(stream):
        next_ids = stream[(i + 1) % len(stream)][0]
        state, routed, loss = step(state, routed, numbers, labels, next_ids)
        losses.append(loss)
    return losses, te.functional.unstack_tables(state[0], plan)


WAYS = {
    "nnx": train_nnx,
    "nnx, pipelined": train_nnx_pipelined,
    "linen": train_linen,
    "functional": train_functional,
    "functional, pipelined": train_functional_pipelined,
}
PLACES = {
    "sharded": lambda: make_plan(mesh_of(8), te.Sharded()),
    "replicated": lambda: make_plan(mesh_of(8), te.Replicated()),
    "two axes": lambda: make_plan(
        Mesh(np.asarray(jax.devices()[:8]).reshape(2, 4), ("data", "model")),
        te.Sharded(axes=("model",)),
    ),
}


@functools.cache
def losses_on_one_device():
    losses, tables = train_functional(make_plan(mesh_of(1), None))
    assert np.mean(losses[-8:]) < 0.8 * np.mean(losses[:8])
    return losses, tables


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_one_device(way, place):
    expected, expected_tables = losses_on_one_device()
    losses, tables = WAYS[way](PLACES[place]())
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-5)
    for name, values in expected_tables.items():
        # Sums in another order; 200 steps add their roundings up.
        np.testing.assert_allclose(tables[name], values, rtol=1e-3, atol=1e-4)
