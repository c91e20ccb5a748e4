"""Predicts ratings of MovieLens-100K from users, movies and histories.

Command: python docs/examples/ranking.py ml-100k
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tpu_embedding as te

NUM_STEPS, BATCH_SIZE, NUM_MOVIES, MAX_HISTORY = 800, 1000, 1682, 100
SIZES = {"user": 943, "movie": NUM_MOVIES, "age": 7, "gender": 2, "occupation": 21}
SIZES |= {"genres": 19, "history": 5 * NUM_MOVIES}  # a history of (movie, rating)
RULE = te.optimizers.adam(
    optax.warmup_cosine_decay_schedule(
        0.0, 0.005, NUM_STEPS // 20, NUM_STEPS, end_value=0.00005
    ),
    beta_2=0.99,
    epsilon=1e-8,
    sum_inside_sqrt=False,
)
features = {
    name: te.FeatureConfig(
        table=te.TableConfig(
            vocabulary_size=size,
            dim=32,  # column 0 is a bias
            initializer=te.initializers.normal(0.01),
            combiner="mean" if name == "genres" else "sqrtn",
            name=name,
        ),
        expected_valence=MAX_HISTORY if name == "history" else None,
    )
    for name, size in SIZES.items()
}


class Ratings:
    """The features of users and movies, and the history of each user in u1.base."""

    def __init__(self, folder):
        users = fields_of(f"{folder}/u.user", "|")
        ages = np.searchsorted(
            (18, 25, 35, 45, 50, 56), users[:, 1].astype(int), "right"
        )
        self.of_user = {"age": ages, "gender": (users[:, 2] == "M").astype(int)}
        self.of_user["occupation"] = np.unique(users[:, 3], return_inverse=True)[1]
        is_genre = fields_of(f"{folder}/u.item", "|")[:, 5:] == "1"
        self.genres = [np.flatnonzero(row) for row in is_genre]
        self.train, self.test = (
            fields_of(f"{folder}/{name}", "\t").astype(np.int32)[:, :3] - [1, 1, 0]
            for name in ("u1.base", "u1.test")
        )
        random = np.random.default_rng(0)
        users, movies, ratings = random.permutation(self.train).T
        pairs = 5 * movies + ratings - 1
        self.histories = [pairs[users == user] for user in range(SIZES["user"])]

    def batch(self, samples, random):
        """Returns ids and ratings. No sample has its own rating in its history."""
        users, movies, ratings = samples.T
        histories = []
        for user, pair in zip(users, 5 * movies + ratings - 1, strict=True):
            others = self.histories[user]
            others = others[others != pair]
            places = random.integers(len(others)) + np.arange(MAX_HISTORY)
            histories.append(others[places[: len(others)] % len(others)])
        ids = {name: values[users] for name, values in self.of_user.items()}
        ids |= {"user": users, "movie": movies, "history": ragged(histories)}
        ids["genres"] = ragged([self.genres[movie] for movie in movies])
        return ids, ratings.astype(np.float32)


def fields_of(path, separator):
    return np.loadtxt(path, str, None, separator, encoding="latin-1", ndmin=2)


def ragged(lists):
    splits = np.cumsum([0, *map(len, lists)])
    return te.RaggedIds(values=np.concatenate(lists), row_splits=splits)


class RatingModel(nnx.Module):
    """SVD++ of Koren (KDD 2008), with attributes of user and movie."""

    def __init__(self, mean_rating, rngs):
        self.embedding = te.TPUEmbedding(features, RULE, rngs=rngs)
        self.bias = nnx.Param(jnp.asarray(mean_rating))

    def __call__(self, ids):
        """Returns ratings, and the sum of the squares of all activations."""
        a = self.embedding(ids)
        about_user = a["age"] + a["gender"] + a["occupation"]
        user = a["user"] + a["history"] + about_user
        movie = a["movie"] + a["genres"]
        products = jnp.sum(user[:, 1:] * movie[:, 1:], axis=1)
        parts = (a["user"], a["movie"], a["history"], a["genres"], about_user)
        squares = sum(jnp.sum(jnp.square(part), axis=1) for part in parts)
        return self.bias + user[:, 0] + movie[:, 0] + products, squares


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, ids, ratings):
    def loss_fn(model):
        predicted, squares = model(ids)
        return jnp.mean(jnp.square(predicted - ratings) + 0.1 * squares)

    loss, gradients = te.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def predict(model, ids):
    return jnp.clip(model(ids)[0], 1, 5)


def train(folder):
    """Returns the root mean square error on the ratings of u1.test."""
    data, random = Ratings(folder), np.random.default_rng(1)
    model = RatingModel(data.train[:, 2].mean(dtype=np.float32), nnx.Rngs(0))
    optimizer = te.Optimizer(model, optax.adam(1e-3))
    for step in range(NUM_STEPS):
        start = step * BATCH_SIZE % len(data.train)
        if start == 0:
            samples = random.permutation(data.train)
        ids, ratings = data.batch(samples[start : start + BATCH_SIZE], random)
        loss = train_step(model, optimizer, model.embedding.prepare(ids), ratings)
        if step % 100 == 0:
            print(f"step {step}: loss {loss:.3f}")
    errors = []
    for samples in np.split(data.test, len(data.test) // BATCH_SIZE):
        ids, ratings = data.batch(samples, random)
        errors.append(predict(model, model.embedding.prepare(ids)) - ratings)
    return float(np.sqrt(np.mean(np.square(errors))))


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "ml-100k"
    if not pathlib.Path(folder, "u1.base").is_file():
        sys.exit(f"{folder} has no file u1.base: unpack MovieLens-100K of GroupLens.")
    rmse = train(folder)
    print(f"RMSE on u1.test, on {jax.device_count()} devices: {rmse:.3f}")
