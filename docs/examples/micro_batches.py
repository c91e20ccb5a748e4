"""Averages the gradients of four micro-batches, and clips them as a whole.

Command: python docs/examples/micro_batches.py
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tpu_embedding as te

items = te.TableConfig(vocabulary_size=200, dim=8, combiner="sum", name="items")


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embedding = te.TPUEmbedding(
            te.FeatureConfig(table=items), te.optimizers.adam(1e-2), rngs=rngs
        )
        self.linear = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, ids):
        return self.linear(self.embedding(ids))[:, 0]


def loss_fn(model, ids, labels):
    return jnp.mean((model(ids) - labels) ** 2)


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, micro_batches):
    compute = te.value_and_grad(loss_fn)
    parts = [compute(model, *batch)[1] for batch in micro_batches]
    gradients = te.gradients.scale(te.gradients.add(*parts), 1 / len(parts))
    norm = te.gradients.global_norm(gradients)
    gradients = te.gradients.clip_by_global_norm(gradients, 0.5)
    optimizer.update(model, gradients)
    return norm


model = Model(nnx.Rngs(0))
optimizer = te.Optimizer(model, optax.adam(1e-2))
random = np.random.default_rng(0)
ids = random.integers(0, 200, (4, 16, 3), dtype=np.int32)
labels = random.normal(size=(4, 16)).astype(np.float32)
micro_batches = list(zip(ids, labels, strict=True))
norms = [train_step(model, optimizer, micro_batches) for _ in range(3)]
print("gradient norms before clipping:", *(f"{norm:.3f}" for norm in norms))
