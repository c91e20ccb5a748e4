"""Trains a DLRM of Flax Linen on clicks.

Command: python docs/examples/linen_dlrm.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import tpu_embedding as te

DIM = 8
features = {
    name: te.FeatureConfig(
        table=te.TableConfig(vocabulary_size=1000, dim=DIM, name=name)
    )
    for name in ("site", "ad", "device")
}
plan = te.make_plan(features, optimizer=te.optimizers.adagrad(0.1))


class DLRM(nn.Module):
    @nn.compact
    def __call__(self, ids, numbers):
        rows = te.linen.TPUEmbedding(plan, name="embedding")(ids)
        bottom = nn.relu(nn.Dense(DIM)(numbers))
        vectors = jnp.stack([bottom, *rows.values()], axis=1)
        products = jnp.einsum("bid,bjd->bij", vectors, vectors)
        upper = jnp.triu_indices(4, k=1)
        joined = jnp.concatenate([bottom, products[:, *upper]], axis=1)
        return nn.Dense(1)(nn.relu(nn.Dense(16)(joined)))[:, 0]


@jax.jit(donate_argnums=0, compiler_options=plan.compiler_options)
def train_step(state, ids, numbers, labels):
    def loss_fn(variables):
        logits = state.apply_fn(variables, ids, numbers)
        return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

    loss, gradients = te.linen.value_and_grad(loss_fn)(state.variables)
    return state.apply_gradients(grads=gradients), loss


random = np.random.default_rng(0)
ids = te.inputs.prepare_features(
    {name: random.integers(0, 1000, 32) for name in features}, plan
)
numbers = random.normal(size=(32, 4)).astype(np.float32)
labels = random.integers(0, 2, 32).astype(np.float32)

model = DLRM()
state = te.linen.TrainState.create(
    apply_fn=model.apply,
    variables=model.init(jax.random.key(0), ids, numbers),
    tx=optax.adam(1e-2),
)
losses = []
for _ in range(20):
    state, loss = train_step(state, ids, numbers, labels)
    losses.append(float(loss))
print(f"log loss: {losses[0]:.3f} at first, {losses[-1]:.3f} after 20 steps")
