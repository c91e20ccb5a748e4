"""Saves a training loop by Orbax, and continues it with the same numbers.

Command: python docs/examples/resume.py
"""

import pathlib
import tempfile

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

import tpu_embedding as te

items = te.TableConfig(vocabulary_size=200, dim=8, combiner="mean", name="items")


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embedding = te.TPUEmbedding(
            te.FeatureConfig(table=items), te.optimizers.adagrad(0.1), rngs=rngs
        )
        self.linear = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, ids):
        return self.linear(self.embedding(ids))[:, 0]


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, ids, labels):
    def loss_fn(model):
        return jnp.mean((model(ids) - labels) ** 2)

    loss, gradients = te.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def batch_of(step):
    random = np.random.default_rng(step)
    ids = random.integers(0, 200, (16, 3), dtype=np.int32)
    return ids, random.normal(size=16).astype(np.float32)


def run(directory, num_steps):
    model = Model(nnx.Rngs(0))
    optimizer = te.Optimizer(model, optax.adam(1e-2))
    with ocp.CheckpointManager(directory) as checkpoints:
        first_step = 0
        if (saved := checkpoints.latest_step()) is not None:
            wanted = te.checkpoint.RestoreState((model, optimizer))
            checkpoints.restore(saved, args=wanted)
            first_step = saved + 1
        for step in range(first_step, num_steps):
            loss = train_step(model, optimizer, *batch_of(step))
        state = te.checkpoint.SaveState((model, optimizer))
        checkpoints.save(num_steps - 1, args=state)
    return float(loss)


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    run(folder / "resumed", num_steps=3)
    resumed = run(folder / "resumed", num_steps=6)  # continues with step 3
    at_once = run(folder / "at once", num_steps=6)
assert resumed == at_once
print(f"loss of step 5: {resumed:.6f} resumed, {at_once:.6f} at once")
