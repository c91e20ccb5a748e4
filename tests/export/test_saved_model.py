import json
import subprocess
import sys

import numpy as np
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.export.served_models import (
    FEATURES,
    batch_of,
    live_outputs,
    trained_model,
)

tf = pytest.importorskip("tensorflow", reason="the extra `tf` is not installed")


@pytest.fixture(scope="module")
def trained():
    return trained_model(8, 2)


@pytest.fixture(scope="module")
def directory(trained, tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved_model") / "served"
    te.export.save_saved_model(trained, directory, *batch_of(16))
    return directory


@pytest.fixture(scope="module")
def loaded(directory):
    return tf.saved_model.load(str(directory))


def tensors_of(features):
    """Returns the features as TensorFlow holds them."""
    tensors = {}
    for name, ids in features.items():
        weights = getattr(ids, "weights", None)
        if isinstance(ids, te.RaggedIds):
            splits = ids.row_splits.astype(np.int64)

            def ragged(values, splits=splits):
                return tf.RaggedTensor.from_row_splits(values, splits)

            tensors[name] = ragged(ids.values.astype(np.int64))
            weights = None if weights is None else ragged(weights)
        elif isinstance(ids, te.DenseIds):
            tensors[name] = tf.constant(ids.ids, tf.int64)
        else:
            tensors[name] = tf.constant(ids, tf.int64)
        if weights is not None:
            tensors[name] = {"ids": tensors[name], "weights": weights}
    return tensors


@pytest.mark.parametrize("batch_size", [1, 7, 512])
def test_outputs_are_those_of_the_live_model(trained, loaded, batch_size):
    features, inputs = batch_of(batch_size)
    outputs = loaded(tensors_of(features), tf.constant(inputs))
    expected = live_outputs(trained, features, inputs)
    assert set(outputs) == set(expected)
    for name, values in expected.items():
        # Sums of up to 6 rows, and of 8 products, in another order.
        np.testing.assert_allclose(outputs[name], values, rtol=0, atol=1e-6)


def test_serving_signature_takes_flat_tensors(trained, loaded):
    features, inputs = batch_of(7)
    tensors = {"inputs": tf.constant(inputs)}
    for name, leaf in tensors_of(features).items():
        parts = leaf if isinstance(leaf, dict) else {"": leaf}
        for part, tensor in parts.items():
            if isinstance(tensor, tf.RaggedTensor):
                if part != "weights":
                    tensors[f"features_{name}_row_splits"] = tensor.row_splits
                tensor, part = (
                    tensor.values,
                    {"": "values", "ids": "values"}.get(part, part),
                )
            tensors[f"features_{name}_{part}".rstrip("_")] = tensor
    outputs = loaded.signatures["serving_default"](**tensors)
    for name, values in live_outputs(trained, features, inputs).items():
        np.testing.assert_allclose(outputs[name], values, rtol=0, atol=1e-6)


SERVER = """
import sys
import tensorflow as tf

loaded = tf.saved_model.load(sys.argv[1])
ragged = tf.RaggedTensor.from_row_splits(tf.constant([1, 2], tf.int64), [0, 2, 2])
print(loaded({"tags": ragged}).shape)
assert not {"jax", "tpu_embedding"} & set(sys.modules)
"""


def test_server_needs_tensorflow_only(tmp_path):
    class Bag(nnx.Module):
        def __init__(self):
            self.embedding = te.TPUEmbedding(
                {"tags": FEATURES["ragged"]}, mesh=mesh_of(1), rngs=nnx.Rngs(0)
            )

        def __call__(self, features):
            return self.embedding(features)["tags"]

    batch = {"tags": te.RaggedIds.from_lists([[1], [2, 3], []])}
    te.export.save_saved_model(Bag(), tmp_path / "served", batch)
    command = [sys.executable, "-c", SERVER, str(tmp_path / "served")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "(2, 8)\n", done.stderr


def test_tables_are_variables(trained, loaded, directory):
    tables = trained.embedding.embedding_tables()
    assert set(loaded.tables) == set(tables)
    for name, values in tables.items():
        np.testing.assert_array_equal(loaded.tables[name].numpy(), values)
    document = json.loads((directory / "export.json").read_text())
    assert document["tables"]["users"]["error"]["largest"] == 0


def test_ids_of_64_bits_stay_out_of_range(trained, loaded):
    features, inputs = batch_of(2)
    lists = [[1, 2**40], [-(2**40), 2**32 + 3]]
    features["ragged"] = te.RaggedIds.from_lists(lists)
    features["weighted_ragged"] = te.RaggedIds.from_lists(lists, [[1.0, 2.0]] * 2)
    outputs = loaded(tensors_of(features), tf.constant(inputs))
    expected = live_outputs(trained, features, inputs)
    for name in ("rows/ragged", "rows/weighted_ragged"):
        np.testing.assert_allclose(outputs[name], expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_narrow_tables_of_a_single_layer(tmp_path, dtype):
    layer = te.TPUEmbedding(FEATURES["user"], mesh=mesh_of(1), rngs=nnx.Rngs(0))
    ids = np.arange(307)
    te.export.save_saved_model(layer, tmp_path / "tf", ids[:5], dtype=dtype)
    te.export.save(layer, tmp_path / "jax", ids[:5], dtype=dtype)
    rows = tf.saved_model.load(str(tmp_path / "tf"))(tf.constant(ids, tf.int64))
    np.testing.assert_array_equal(rows, te.export.load(tmp_path / "jax")(ids))


def test_names_that_tensorflow_cannot_tell_apart(tmp_path):
    layer = te.TPUEmbedding(
        {"a.b": FEATURES["user"], "a_b": FEATURES["user"]},
        mesh=mesh_of(1),
        rngs=nnx.Rngs(0),
    )
    ids = {"a.b": np.array([1]), "a_b": np.array([1])}
    with pytest.raises(te.export.ExportError, match="rename a feature"):
        te.export.save_saved_model(layer, tmp_path / "served", ids)
    assert not list(tmp_path.iterdir())
