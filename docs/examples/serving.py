"""Trains on ratings, then answers for features that training does not know.

Command: python docs/examples/serving.py
"""

import tempfile

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tpu_embedding as te

movies = te.TableConfig(vocabulary_size=200, dim=8, combiner="mean", name="movies")
users = te.TableConfig(vocabulary_size=50, dim=8, name="users")
features = {
    "user": te.FeatureConfig(table=users),
    "watched": te.FeatureConfig(table=movies),
    "rated": te.FeatureConfig(table=movies),
}


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embedding = te.TPUEmbedding(
            features, te.optimizers.adagrad(0.1), rngs=rngs
        )

    def __call__(self, ids):
        rows = self.embedding(ids)
        return jnp.sum((rows["user"] + rows["watched"]) * rows["rated"], axis=1)

    def similar(self, liked, candidates):
        """Scores candidates by movies that someone without a user id likes."""
        serving = {
            "liked": te.FeatureConfig(table=movies),
            "candidates": te.FeatureConfig(table=movies, max_sequence_length=4),
        }
        ids = {"liked": liked, "candidates": candidates}
        rows = self.embedding(ids, serving_config=serving)
        return jnp.einsum("bd,bcd->bc", rows["liked"], rows["candidates"])


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, ids, ratings):
    def loss_fn(model):
        return jnp.mean((model(ids) - ratings) ** 2)

    loss, gradients = te.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


model = Model(nnx.Rngs(0))
optimizer = te.Optimizer(model, optax.sgd(0.1))
random = np.random.default_rng(0)
ids = {
    "user": random.integers(0, 50, 16, dtype=np.int32),
    "watched": random.integers(0, 200, (16, 5), dtype=np.int32),
    "rated": random.integers(0, 200, 16, dtype=np.int32),
}
for _ in range(3):
    loss = train_step(model, optimizer, ids, np.ones(16, np.float32))

user_rows = model.embedding({"user": np.array([3, 4])})["user"]  # one of the features
liked, candidates = np.array([[1, 2, 3]]), np.array([[7, 8, 9, 10]])
scores = nnx.jit(lambda model, *ids: model.similar(*ids))(model, liked, candidates)


# Export
with tempfile.TemporaryDirectory() as directory:
    te.export.save(model, f"{directory}/similar", liked, candidates, method="similar")
    served = te.export.load(f"{directory}/similar")
two = served(np.array([[1, 2, 3], [4, 5, 6]]), np.array([[7, 8, 9, 10]] * 2))
np.testing.assert_allclose(two[:1], scores, atol=1e-6)
print("scores of the model: ", *(f"{score:.3f}" for score in scores[0]))
print("scores of the export:", *(f"{score:.3f}" for score in two[0]))
print("tables of the export:", *served.tables)
