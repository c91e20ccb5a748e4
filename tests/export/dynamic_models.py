"""A model with dynamic tables, and batches for it."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of

STEP = 2**40
"""Difference of two user ids, which no 32 bits hold."""


class DynamicModel(nnx.Module):
    """Looks ids up in two dynamic tables and a static one."""

    def __init__(self, num_devices=1, default_row="none", rule=None, **dynamic):
        users = te.TableConfig(
            vocabulary_size=te.Dynamic(
                capacity=128, default_row=default_row, **dynamic
            ),
            dim=8,
            name="user",
        )
        items = te.TableConfig(
            vocabulary_size=te.Dynamic(capacity=200, default_row=default_row),
            dim=8,
            combiner="mean",
            name="item",
        )
        tags = te.TableConfig(vocabulary_size=20, dim=8, name="tag")
        self.embedding = te.TPUEmbedding(
            {
                "user": te.FeatureConfig(table=users),
                "item": te.FeatureConfig(table=items),
                "weighted": te.FeatureConfig(table=items, find_only=True),
                "history": te.FeatureConfig(table=items, max_sequence_length=2),
                "tag": te.FeatureConfig(table=tags),
            },
            rule or te.optimizers.adagrad(0.1),
            mesh=mesh_of(num_devices),
            rngs=nnx.Rngs(0),
        )

    def __call__(self, features):
        return self.embedding(features)


def dynamic_batch(batch_size, seed=0, first=0):
    """Returns a batch; users above `first` only."""
    random = np.random.default_rng([batch_size, seed])

    def items(n):
        return (random.integers(0, 300, n) - 310).tolist()

    lists = [items(n) for n in random.integers(0, 5, batch_size)]
    return {
        "user": (first + random.integers(0, 150, batch_size)) * STEP,
        "item": te.RaggedIds.from_lists(lists),
        "weighted": te.DenseIds(
            ids=np.asarray([items(3) for _ in range(batch_size)]),
            weights=random.uniform(0.5, 1, (batch_size, 3)).astype(np.float32),
        ),
        "history": te.RaggedIds.from_lists(lists[::-1]),
        "tag": random.integers(0, 20, batch_size),
    }


@nnx.jit
def _train_step(model, optimizer, batch):
    batch = optimizer.insert_ids(model, batch)

    def loss_fn(model):
        return sum(jnp.sum((x - 1.0) ** 2) for x in model(batch).values())

    _, gradients = te.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)


class DynamicTrainer:
    """A model in training, whose users move on from step to step."""

    def __init__(self, **options):
        self.model = DynamicModel(**options)
        self.optimizer = te.Optimizer(self.model, optax.sgd(0.1))
        self.steps = 0

    def train(self, steps=1):
        for _ in range(steps):
            batch = dynamic_batch(48, seed=self.steps, first=60 * self.steps)
            batch = self.model.embedding.prepare(batch)
            _train_step(self.model, self.optimizer, batch)
            self.steps += 1
        return self


@nnx.jit
def _outputs(model, batch):
    return model(batch)


def evaluated(model, batch):
    """Returns the outputs of the model itself."""
    outputs = _outputs(model, model.embedding.prepare(batch))
    return {name: np.asarray(x) for name, x in outputs.items()}
