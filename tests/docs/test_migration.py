"""Every line of the migration table from TensorFlow runs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx

import tpu_embedding as te
from tests.docs.test_doc_examples import DOCS
from tests.tiers import full_cases

TABLE = re.compile(r"<!-- executed -->\n\|.*\n\|---.*\n((?:\|.*\n)+)")
CODE = re.compile(r"(?<!\\)`([^`]+)`")


def rows():
    text = (DOCS / "migration" / "tensorflow.md").read_text()
    for table in TABLE.findall(text):
        for line in table.splitlines():
            theirs, ours = line.strip("| ").split(" | ")[:2]
            (code,) = CODE.findall(ours)
            yield pytest.param(code, id=theirs.replace("`", ""))


ROWS = list(rows())


@pytest.fixture
def namespace(tmp_path):
    """Returns what the lines of the table name; a line may donate or delete arrays."""
    directory = tmp_path / "saved"
    path = directory.with_name("tables.safetensors")
    safetensors.numpy.save_file({"movies": np.ones((100, 8))}, path)
    movies = te.TableConfig(vocabulary_size=100, dim=8, combiner="mean", name="movies")
    biases = te.TableConfig(vocabulary_size=100, dim=1, name="biases")
    features = {
        "watched": te.FeatureConfig(table=movies),
        "shown": te.FeatureConfig(table=movies),
    }
    layer = te.TPUEmbedding(features, te.optimizers.adagrad(0.1), rngs=nnx.Rngs(0))
    plan, tables = layer.plan, layer.tables.get_value()
    ids = layer.prepare({"watched": np.array([1, 2]), "shown": np.array([3, 4])})
    model, optimizer = layer, te.Optimizer(layer, optax.adam(1e-3))

    def loss_fn(model, ids):
        return sum(jnp.sum(x) for x in jax.tree.leaves(model(ids)))

    def loss_of_one_feature(model, ids):
        return jnp.sum(model(ids)["shown"])

    def train_step(model, optimizer, ids):
        loss, gradients = te.value_and_grad(loss_fn)(model, ids)
        optimizer.update(model, gradients)
        return loss

    return {**globals(), **locals()}


@pytest.mark.parametrize(
    "code",
    full_cases(
        ROWS,
        "TableConfig(vocabulary_size=100, dim=8)",
        "batch_size",
        "optimizer.apply_gradients",
        "global_clipnorm of Keras",
    ),
)
def test_line_runs(code, namespace, capsys):
    assert code != "print(plan)" or str(namespace["plan"])
    exec(code, dict(namespace))
