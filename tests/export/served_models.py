"""A model with one feature of each kind, and batches for it."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of

MOVIES = te.TableConfig(vocabulary_size=1009, dim=8, combiner="mean", name="movies")
USERS = te.TableConfig(vocabulary_size=307, dim=8, name="users")
TAGS = te.TableConfig(vocabulary_size=53, dim=8, combiner="sqrtn", name="tags/all")

FEATURES = {
    "user": te.FeatureConfig(table=USERS),
    "watched": te.FeatureConfig(table=MOVIES),
    "weighted": te.FeatureConfig(table=MOVIES),
    "ragged": te.FeatureConfig(table=TAGS, out_of_range_ids="drop"),
    "weighted_ragged": te.FeatureConfig(table=MOVIES, out_of_range_ids="clip"),
    "defaulted": te.FeatureConfig(table=TAGS, default_id=5),
    "sequence": te.FeatureConfig(table=MOVIES, max_sequence_length=4),
}
DENSE_KINDS = ("user", "watched", "weighted")


class Model(nnx.Module):
    """Sums activations, and puts a dense layer with dropout behind them."""

    def __init__(self, mesh=None, names=tuple(FEATURES)):
        rngs = nnx.Rngs(0)
        self.embedding = te.TPUEmbedding(
            {name: FEATURES[name] for name in names},
            te.optimizers.adagrad(0.1),
            mesh=mesh,
            rngs=rngs,
        )
        self.dense = nnx.Linear(8, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, features, inputs):
        rows = self.embedding(features)
        total = sum(x.sum(axis=1) if x.ndim == 3 else x for x in rows.values())
        return {"scores": self.dropout(self.dense(total)) + inputs, "rows": rows}


def batch_of(batch_size, names=tuple(FEATURES), seed=0):
    """Returns features and dense inputs; some ids of two features are out of range."""
    random = np.random.default_rng([batch_size, seed])

    def lists(low, high):
        valences = random.integers(0, 6, batch_size)
        return [random.integers(low, high, n).tolist() for n in valences]

    def weights(of_lists):
        return [random.uniform(-0.5, 1, len(ids)).tolist() for ids in of_lists]

    out_of_range = lists(-20, 1500)
    features = {
        "user": random.integers(0, 307, batch_size),
        "watched": random.integers(0, 1009, (batch_size, 3)),
        "weighted": te.DenseIds(
            ids=random.integers(0, 1009, (batch_size, 3)),
            weights=random.uniform(-0.5, 1, (batch_size, 3)).astype(np.float32),
        ),
        "ragged": te.RaggedIds.from_lists(lists(-3, 60)),
        "weighted_ragged": te.RaggedIds.from_lists(out_of_range, weights(out_of_range)),
        "defaulted": te.RaggedIds.from_lists(lists(0, 53)),
        "sequence": te.RaggedIds.from_lists(lists(0, 1009)),
    }
    inputs = random.standard_normal((batch_size, 2)).astype(np.float32)
    return {name: features[name] for name in names}, inputs


def trained_model(num_devices, num_steps):
    """Returns a model after some steps on so many devices."""
    model = Model(mesh_of(num_devices))
    optimizer = te.Optimizer(model, optax.sgd(0.1))

    def loss_fn(model, features, inputs):
        return jnp.mean(model(features, inputs)["scores"] ** 2)

    for step in range(num_steps):
        features, inputs = batch_of(16, seed=step)
        features = model.embedding.prepare(features)
        _, gradients = te.value_and_grad(loss_fn)(model, features, inputs)
        optimizer.update(model, gradients)
    return model


def live_outputs(model, features, inputs):
    """Returns the outputs of the model itself, named as those of an export."""
    model.eval()
    outputs = model(model.embedding.prepare(features), inputs)
    rows = {f"rows/{name}": x for name, x in outputs["rows"].items()}
    return {
        name: np.asarray(x) for name, x in (rows | outputs).items() if name != "rows"
    }
