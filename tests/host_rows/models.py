"""Small NNX models whose table is on the host, or on the devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.host_rows.twins import zipf_ids

ROWS, DIM, BATCH = 300, 4, 8
CACHE = te.HostRows(cache_rows=100)


class Model(nnx.Module):
    """A layer and a linear head."""

    def __init__(self, placement, num_devices=2, seed=0, optimizer="adagrad", **table):
        config = te.TableConfig(
            vocabulary_size=ROWS,
            dim=DIM,
            name="user",
            combiner="sum",
            placement=placement,
            **table,
        )
        rngs = nnx.Rngs(seed)
        self.embedding = te.TPUEmbedding(
            {"user": te.FeatureConfig(table=config)},
            optimizer,
            mesh=mesh_of(num_devices),
            rngs=rngs,
        )
        self.head = nnx.Linear(DIM, 1, rngs=rngs)

    def __call__(self, batch):
        return self.head(self.embedding(batch)["user"])[:, 0]


def make(placement=CACHE, num_devices=2, seed=0, **options):
    """Returns a model and its optimizer."""
    model = Model(placement, num_devices, seed, **options)
    return model, te.Optimizer(model, optax.adam(1e-2))


def batches(number, seed=0, size=BATCH):
    """Draws batches of ids."""
    draw = np.random.default_rng(seed)
    return [{"user": zipf_ids(draw, (size, 3), ROWS)} for _ in range(number)]


def loss_of(model, batch):
    return jnp.mean((model(batch) - 1) ** 2)


@nnx.jit(donate_argnums=(0, 1))
def train(model, optimizer, batch):
    loss, gradients = te.value_and_grad(loss_of)(model, batch)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def evaluate(model, batch):
    return model(batch)


def feed(batches, model, optimizer, **options):
    """Returns `te.host_rows` for batches of features."""
    options.setdefault("features_of", lambda batch: batch)
    return te.host_rows(batches, model, optimizer, **options)


def fit(model, optimizer, batches):
    """Trains on batches, and returns the losses."""
    return [
        float(train(model, optimizer, batch))
        for batch in feed(batches, model, optimizer)
    ]


def state_of(model, optimizer):
    """Returns all rows, slot variables and dense parameters."""
    return {
        "tables": model.embedding.embedding_tables(),
        "slots": optimizer.slot_values("all"),
        "head": jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model.head))),
    }


@functools.cache
def expected(number, seed=0, num_devices=2, size=BATCH):
    """Returns losses and state of training with all rows on the devices."""
    model, optimizer = make(te.Sharded(), num_devices)
    losses = fit(model, optimizer, batches(number, seed, size))
    return losses, state_of(model, optimizer)
