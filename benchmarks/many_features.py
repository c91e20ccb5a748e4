"""Trains a model with 26 features for a step, and evaluates it.

`first_step.py` starts it, and times the lines that it prints.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tpu_embedding as te

NUM_FEATURES, NUM_ROWS, DIM, BATCH = 26, 10_000, 16, 1024


class Model(nnx.Module):
    """A logit from the activations of all features, by an MLP."""

    def __init__(self, features: dict[str, te.FeatureConfig], rngs: nnx.Rngs):
        rule = te.optimizers.rowwise_adagrad(0.01)
        self.embedding = te.TPUEmbedding(features, rule, rngs=rngs)
        self.hidden = nnx.Linear(len(features) * DIM, 64, rngs=rngs)
        self.last = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, ids: dict[str, jax.Array]) -> jax.Array:
        """Returns the logits, `[batch]`."""
        activations = jnp.concatenate(list(self.embedding(ids).values()), axis=1)
        return self.last(nnx.relu(self.hidden(activations)))[:, 0]


def loss_of(model: Model, ids: dict[str, jax.Array], labels: jax.Array) -> jax.Array:
    """Returns the log loss of a batch."""
    return optax.sigmoid_binary_cross_entropy(model(ids), labels).mean()


@nnx.jit
def train_step(
    model: Model, optimizer: te.Optimizer, ids: dict[str, jax.Array], labels: jax.Array
) -> jax.Array:
    """Trains on a batch; returns its loss."""
    loss, gradients = te.value_and_grad(loss_of)(model, ids, labels)
    optimizer.update(model, gradients)
    return loss


evaluation_step = nnx.jit(loss_of)


def main() -> None:
    """Starts, trains and evaluates; prints a line at the end of each phase."""
    print("process", flush=True)
    features = {
        f"f{i:02d}": te.FeatureConfig(
            table=te.TableConfig(vocabulary_size=NUM_ROWS, dim=DIM, name=f"t{i:02d}")
        )
        for i in range(NUM_FEATURES)
    }
    model = Model(features, nnx.Rngs(0))
    optimizer = te.Optimizer(model, optax.adam(1e-3))
    random = np.random.default_rng(0)
    ids = {name: random.integers(NUM_ROWS, size=BATCH) for name in features}
    labels = random.integers(2, size=BATCH).astype(np.float32)
    batch = te.inputs.shard_batch(
        (model.embedding.prepare(ids), labels), model.embedding.plan
    )
    print("started", flush=True)
    jax.block_until_ready(train_step(model, optimizer, *batch))
    print("step 1", flush=True)
    jax.block_until_ready(evaluation_step(model, *batch))
    print("evaluation", flush=True)


if __name__ == "__main__":
    main()
