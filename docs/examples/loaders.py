"""Trains from batches that worker processes read and prepare.

Command: python docs/examples/loaders.py
"""

import collections
import multiprocessing

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tpu_embedding as te

items = te.TableConfig(vocabulary_size=200, dim=8, combiner="mean", name="items")
features = {"watched": te.FeatureConfig(table=items)}


def read_batch(step):
    """Stands for a file: 16 samples with up to 5 ids each, and their labels."""
    random = np.random.default_rng(step)
    lengths = random.integers(0, 6, 16)
    watched = te.RaggedIds(
        values=random.integers(0, 200, lengths.sum()),
        row_splits=np.cumsum([0, *lengths]),
    )
    return {"watched": watched}, random.normal(size=16).astype(np.float32)


def start_worker(plan, sizes):
    global worker_plan, worker_sizes
    worker_plan, worker_sizes = plan, sizes


def read_and_prepare(step):
    ids, labels = read_batch(step)
    return te.inputs.prepare_features(ids, worker_plan, sizes=worker_sizes), labels


def prepared_batches(workers, num_steps, num_ahead=4):
    """Yields batches in order, while the workers prepare the next few."""
    pending = collections.deque()
    for step in range(num_steps):
        pending.append(workers.apply_async(read_and_prepare, (step,)))
        if len(pending) > num_ahead:
            yield pending.popleft().get()
    for batch in pending:
        yield batch.get()


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embedding = te.TPUEmbedding(
            features, te.optimizers.adagrad(0.1), rngs=rngs
        )
        self.linear = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, ids):
        return self.linear(self.embedding(ids)["watched"])[:, 0]


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, ids, labels):
    def loss_fn(model):
        return jnp.mean((model(ids) - labels) ** 2)

    loss, gradients = te.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def main(num_steps=20):
    model = Model(nnx.Rngs(0))
    optimizer = te.Optimizer(model, optax.adam(1e-2))
    plan, sizes = model.embedding.plan, te.inputs.BufferSizes()
    te.inputs.prepare_features(read_batch(0)[0], plan, sizes=sizes)
    spawn = multiprocessing.get_context("spawn")  # JAX has threads, so no fork
    with spawn.Pool(2, start_worker, (plan.for_loaders(), sizes)) as workers:
        for batch in prepared_batches(workers, num_steps):
            loss = train_step(model, optimizer, *te.inputs.shard_batch(batch, plan))
    return float(loss)


if __name__ == "__main__":
    print(f"loss after 20 steps: {main():.3f}")
