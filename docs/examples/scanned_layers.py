"""Trains a model whose dense layers are one scan.

Command: python docs/examples/scanned_layers.py
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tpu_embedding as te

items = te.TableConfig(vocabulary_size=200, dim=16, combiner="mean", name="items")


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x):
        return x + nnx.relu(self.linear(x))


class Model(nnx.Module):
    def __init__(self, num_blocks, rngs):
        self.embedding = te.TPUEmbedding(
            te.FeatureConfig(table=items), te.optimizers.adagrad(0.1), rngs=rngs
        )

        @nnx.split_rngs(splits=num_blocks)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make_blocks(rngs):
            return Block(rngs)

        self.blocks = make_blocks(rngs)
        self.head = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, ids):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run_blocks(x, block):
            return block(x)

        return self.head(run_blocks(self.embedding(ids), self.blocks))[:, 0]


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, ids, labels):
    def loss_fn(model):
        return jnp.mean((model(ids) - labels) ** 2)

    loss, gradients = te.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


model = Model(num_blocks=4, rngs=nnx.Rngs(0))
optimizer = te.Optimizer(model, optax.adam(1e-2))
random = np.random.default_rng(0)
ids = random.integers(0, 200, (32, 3), dtype=np.int32)
labels = random.normal(size=32).astype(np.float32)
losses = [float(train_step(model, optimizer, ids, labels)) for _ in range(20)]
print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} after 20 steps")
