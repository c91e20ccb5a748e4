"""Trains a DLRM on samples with any number of weighted ids.

Command: python docs/examples/weighted_ragged.py
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tpu_embedding as te

DIM = 8
features = {
    name: te.FeatureConfig(
        table=te.TableConfig(vocabulary_size=1000, dim=DIM, combiner="mean", name=name)
    )
    for name in ("queries", "clicks", "purchases")
}


class DLRM(nnx.Module):
    def __init__(self, rngs):
        self.embedding = te.TPUEmbedding(
            features, te.optimizers.rowwise_adagrad(0.5), rngs=rngs
        )
        self.bottom = nnx.Linear(4, DIM, rngs=rngs)
        self.top = nnx.Linear(DIM + 6, 1, rngs=rngs)

    def __call__(self, ids, numbers):
        bottom = nnx.relu(self.bottom(numbers))
        vectors = jnp.stack([bottom, *self.embedding(ids).values()], axis=1)
        products = jnp.einsum("bid,bjd->bij", vectors, vectors)
        upper = jnp.triu_indices(4, k=1)
        joined = jnp.concatenate([bottom, products[:, *upper]], axis=1)
        return self.top(joined)[:, 0]


model = DLRM(nnx.Rngs(0))
optimizer = te.Optimizer(model, optax.adam(3e-2))


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, ids, numbers, labels):
    def loss_fn(model):
        logits = model(ids, numbers)
        return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

    loss, gradients = te.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


random = np.random.default_rng(0)


def ragged_column(batch_size=32):
    splits = np.concatenate([[0], np.cumsum(random.integers(0, 6, batch_size))])
    values = random.integers(0, 1000, splits[-1])
    weights = random.uniform(0.5, 2.0, splits[-1])
    return te.RaggedIds(values=values, row_splits=splits, weights=weights)


numbers = random.normal(size=(32, 4)).astype(np.float32)
labels = random.integers(0, 2, 32).astype(np.float32)
ids = model.embedding.prepare({name: ragged_column() for name in features})
losses = [float(train_step(model, optimizer, ids, numbers, labels)) for _ in range(20)]
print(f"log loss: {losses[0]:.3f} at first, {losses[-1]:.3f} after 20 steps")
