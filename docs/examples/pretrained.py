"""Trains beside a table of pretrained rows that never change.

Command: python docs/examples/pretrained.py
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tpu_embedding as te

random = np.random.default_rng(0)
pretrained = random.normal(size=(300, 8)).astype(np.float32)  # such as np.load("...")
words = te.TableConfig(
    vocabulary_size=300,
    dim=8,
    combiner="mean",
    name="words",
    optimizer=optax.set_to_zero(),
)
users = te.TableConfig(vocabulary_size=100, dim=8, name="users")
features = {
    "title": te.FeatureConfig(table=words),
    "user": te.FeatureConfig(table=users),
}


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embedding = te.TPUEmbedding(features, te.optimizers.adam(1e-2), rngs=rngs)
        self.linear = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, ids):
        rows = self.embedding(ids)
        joined = jnp.concatenate([rows["title"], rows["user"]], axis=1)
        return self.linear(joined)[:, 0]


model = Model(nnx.Rngs(0))
model.embedding.set_embedding_tables({"words": pretrained})
optimizer = te.Optimizer(model, optax.sgd(0.1))


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, ids, labels):
    def loss_fn(model):
        return jnp.mean((model(ids) - labels) ** 2)

    loss, gradients = te.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


ids = {
    "title": random.integers(0, 300, (16, 5), dtype=np.int32),
    "user": np.arange(16, dtype=np.int32),
}
labels = random.normal(size=16).astype(np.float32)
before = model.embedding.embedding_tables()
for _ in range(5):
    loss = train_step(model, optimizer, ids, labels)
after = model.embedding.embedding_tables()
np.testing.assert_array_equal(after["words"], pretrained)  # frozen, bit for bit
changed = (after["users"] != before["users"]).any(axis=1)
print(f"loss: {loss:.3f}; changed rows: 0 of 300 words, {changed.sum()} of 100 users")
