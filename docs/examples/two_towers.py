"""Trains two towers on one table by in-batch softmax.

Command: python docs/examples/two_towers.py
"""

import numpy as np
import optax
from flax import nnx

import tpu_embedding as te

items = te.TableConfig(vocabulary_size=500, dim=16, combiner="mean", name="items")


class TwoTowers(nnx.Module):
    def __init__(self, rngs):
        self.embedding = te.TPUEmbedding(
            te.FeatureConfig(table=items), te.optimizers.adagrad(1.0), rngs=rngs
        )
        self.query = nnx.Linear(16, 16, rngs=rngs)
        self.item = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, watched, next_item):
        queries = self.query(self.embedding(watched))  # mean of the watched items
        targets = self.item(self.embedding(next_item))
        return queries, targets


def loss_fn(model, watched, next_item):
    log_softmax, _ = te.nn.in_batch_softmax(*model(watched, next_item))
    return -log_softmax.mean()


model = TwoTowers(nnx.Rngs(0))
optimizer = te.Optimizer(model, optax.adam(1e-2))


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, watched, next_item):
    loss, gradients = te.value_and_grad(loss_fn)(model, watched, next_item)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def recommend(model, watched):
    queries = model.query(model.embedding(watched))
    # Scores every item by its tower, and leaves out those that were watched.
    return te.nn.top_k(
        model.embedding, queries, k=5, transform=model.item, excluded=watched
    )


random = np.random.default_rng(0)
next_item = random.permutation(500)[:64].astype(np.int32)
watched = (next_item[:, None] + np.arange(1, 4, dtype=np.int32)) % 500
losses = [float(train_step(model, optimizer, watched, next_item)) for _ in range(30)]
print(f"softmax loss: {losses[0]:.3f} at first, {losses[-1]:.3f} after 30 steps")
best = recommend(model, watched).ids
hits = np.any(best == next_item[:, None], axis=1).mean()
print(f"recall of the next item in the best 5 of 500: {hits:.2f}")
