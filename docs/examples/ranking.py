"""Trains the rating model of the TFRS tutorial on MovieLens-100K.

Command: python docs/examples/ranking.py ml-100k
"""

import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tpu_embedding as te


def ratings_of(path):
    users, movies, ratings, _ = np.loadtxt(path, dtype=np.int32).T
    return {"user": users - 1, "movie": movies - 1}, ratings.astype(np.float32)


features = {
    "user": te.FeatureConfig(
        table=te.TableConfig(vocabulary_size=943, dim=32, name="user")
    ),
    "movie": te.FeatureConfig(
        table=te.TableConfig(vocabulary_size=1682, dim=32, name="movie")
    ),
}


class RatingModel(nnx.Module):
    def __init__(self, rngs):
        self.embedding = te.TPUEmbedding(features, te.optimizers.adam(3e-3), rngs=rngs)
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.rating = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, ids):
        rows = self.embedding(ids)
        x = nnx.relu(self.hidden(jnp.concatenate([rows["user"], rows["movie"]], 1)))
        return 3.5 + self.rating(x)[:, 0]


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, ids, ratings):
    def loss_fn(model):
        return jnp.mean((model(ids) - ratings) ** 2)

    loss, gradients = te.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def train(folder, epochs=2, batch_size=1000):
    model = RatingModel(nnx.Rngs(0))
    optimizer = te.Optimizer(model, optax.adam(3e-3))
    ids, ratings = ratings_of(f"{folder}/u1.base")
    random = np.random.default_rng(0)
    for _ in range(epochs):
        for rows in random.permutation(len(ratings)).reshape(-1, batch_size):
            batch = {name: column[rows] for name, column in ids.items()}
            train_step(model, optimizer, batch, ratings[rows])
    ids, ratings = ratings_of(f"{folder}/u1.test")
    return float(jnp.sqrt(jnp.mean((model(ids) - ratings) ** 2)))


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "ml-100k"
    if not pathlib.Path(folder, "u1.base").is_file():
        sys.exit(f"{folder} has no file u1.base: unpack MovieLens-100K of GroupLens.")
    print(f"RMSE on u1.test: {train(folder):.3f}")
