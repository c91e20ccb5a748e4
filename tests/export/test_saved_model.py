import functools
import json
import subprocess
import sys

import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.export.dynamic_models import DynamicTrainer, dynamic_batch, evaluated
from tests.export.hostile_names import check_random_exports
from tests.export.served_models import (
    FEATURES,
    UniqueRowsModel,
    batch_of,
    live_outputs,
    trained_model,
    unique_rows_batch,
)
from tpu_embedding.export.saved_model import open_saved_model

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
        if isinstance(ids, dict):
            tensors[name] = tensors_of(ids)
            continue
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
            is_float = ids.dtype == np.float32
            tensors[name] = tf.constant(ids, tf.float32 if is_float else tf.int64)
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


def test_unique_rows_are_served(tmp_path):
    model = UniqueRowsModel()
    te.export.save_saved_model(model, tmp_path / "served", unique_rows_batch(16))
    loaded = tf.saved_model.load(str(tmp_path / "served"))
    for batch_size in (1, 7):
        features = unique_rows_batch(batch_size)
        expected = model(model.embedding.prepare(features))["score"]
        outputs = loaded({"items": tensors_of(features["items"])})
        # Products of 8 values are added in another order.
        np.testing.assert_allclose(outputs["score"], expected, rtol=1e-5, atol=1e-6)


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


@pytest.fixture(scope="module")
def two_inputs():
    names = ("user", "ragged", "weighted_ragged")
    features = {name: FEATURES[name] for name in names}
    return te.TPUEmbedding(features, mesh=mesh_of(1), rngs=nnx.Rngs(0))


def ragged(lists, dtype):
    return tf.ragged.constant(lists, dtype, row_splits_dtype=tf.int32)


def test_row_splits_of_32_bits(two_inputs, tmp_path):
    features, _ = batch_of(7, ("user", "ragged", "weighted_ragged"))
    te.export.save_saved_model(two_inputs, tmp_path / "served", features)
    loaded = tf.saved_model.load(str(tmp_path / "served"))
    tensors = tensors_of(features)
    narrow = tf.nest.map_structure(
        lambda x: (
            x.with_row_splits_dtype(tf.int32) if isinstance(x, tf.RaggedTensor) else x
        ),
        tensors,
    )
    wanted, found = loaded(tensors), loaded(narrow)
    flat = {
        "user": narrow["user"],
        "ragged_values": narrow["ragged"].values,
        "ragged_row_splits": narrow["ragged"].row_splits,
        "weighted_ragged_values": narrow["weighted_ragged"]["ids"].values,
        "weighted_ragged_row_splits": narrow["weighted_ragged"]["ids"].row_splits,
        "weighted_ragged_weights": narrow["weighted_ragged"]["weights"].values,
    }
    by_signature = loaded.signatures["int32_row_splits"](**flat)
    for name, rows in wanted.items():
        np.testing.assert_array_equal(found[name], rows)
        np.testing.assert_array_equal(by_signature[name], rows)


USERS = ["bob", "eve é", "zoe", "", "ann"]
TAGS = [["x", "-"], [], ["é", "y"], ["-"], ["q" * 100]]
WEIGHTS = [[1.0, 2.0], [], [3.0, 4.0], [5.0], [6.0]]
WAYS_TO_IDS = {
    "vocabulary": te.inputs.Vocabulary(["ann", "bob", "eve é"], num_oov_buckets=4),
    "vocabulary with mask": te.inputs.Vocabulary(
        ["ann", "eve é", "x", "y"], num_oov_buckets=1, mask_token=""
    ),
    "hash": functools.partial(te.inputs.hash_ids, num_buckets=53),
    "salted hash": functools.partial(
        te.inputs.hash_ids, num_buckets=50, salt=(2**64 - 1, 7), padding="-"
    ),
}


@pytest.mark.parametrize("ids", WAYS_TO_IDS.values(), ids=WAYS_TO_IDS)
def test_strings_have_the_ids_of_the_live_model(two_inputs, tmp_path, ids):
    features, _ = batch_of(5, ("user", "ragged", "weighted_ragged"))
    strings = dict.fromkeys(features, ids)
    te.export.save_saved_model(
        two_inputs, tmp_path / "served", features, strings=strings
    )
    loaded = tf.saved_model.load(str(tmp_path / "served"))
    weighted = {"ids": ragged(TAGS, tf.string), "weights": ragged(WEIGHTS, tf.float32)}
    found = loaded(
        {
            "user": tf.constant(USERS),
            "ragged": ragged(TAGS, tf.string),
            "weighted_ragged": weighted,
        }
    )
    to_ids = ids.ids if isinstance(ids, te.inputs.Vocabulary) else ids
    live = {
        "user": to_ids(USERS),
        "ragged": to_ids(te.RaggedIds.from_lists(TAGS)),
        "weighted_ragged": to_ids(te.RaggedIds.from_lists(TAGS, WEIGHTS)),
    }
    wanted = two_inputs(two_inputs.prepare(live))
    for name, rows in wanted.items():
        # Sums of up to 2 rows in another order.
        np.testing.assert_allclose(found[name], rows, rtol=0, atol=1e-6)
    with pytest.raises(te.export.ExportError, match="takes strings for"):
        open_saved_model(tmp_path / "served")


def test_unknown_strings_are_refused_without_buckets(two_inputs, tmp_path):
    vocabulary = te.inputs.Vocabulary(["ann", "bob"], num_oov_buckets=0)
    features = {"user": np.array([0, 1])}
    te.export.save_saved_model(
        two_inputs, tmp_path / "served", features, strings={"user": vocabulary}
    )
    loaded = tf.saved_model.load(str(tmp_path / "served"))
    assert loaded({"user": tf.constant(["bob"])})["user"].shape == (1, 8)
    with pytest.raises(tf.errors.InvalidArgumentError, match="among the 2 tokens"):
        loaded({"user": tf.constant(["bob", "eve"])})


@pytest.mark.parametrize(
    ("strings", "message"),
    [
        ({"item": WAYS_TO_IDS["hash"]}, r"inputs of ids, \['user'\], got 'item'"),
        (
            {"user": functools.partial(te.inputs.hash_ids, num_buckets=308)},
            "308 ids.*307",
        ),
        ({"user": functools.partial(te.inputs.hash_ids)}, "num_buckets=N"),
        ({"user": te.inputs.hash_ids}, "functools.partial"),
    ],
)
def test_wrong_strings_are_refused(two_inputs, tmp_path, strings, message):
    features = {"user": np.array([0, 1])}
    with pytest.raises(te.export.ExportError, match=message):
        te.export.save_saved_model(
            two_inputs, tmp_path / "served", features, strings=strings
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_narrow_tables_of_a_single_layer(tmp_path, dtype):
    layer = te.TPUEmbedding(FEATURES["user"], mesh=mesh_of(1), rngs=nnx.Rngs(0))
    ids = np.arange(307)
    te.export.save_saved_model(layer, tmp_path / "tf", ids[:5], dtype=dtype)
    te.export.save(layer, tmp_path / "jax", ids[:5], dtype=dtype)
    rows = tf.saved_model.load(str(tmp_path / "tf"))(tf.constant(ids, tf.int64))
    np.testing.assert_array_equal(rows, te.export.load(tmp_path / "jax")(ids))


@pytest.mark.parametrize("file", ["saved_model.pb", "variables/variables.index"])
def test_flipped_bits_are_found(tmp_path, file):
    layer = te.TPUEmbedding(FEATURES["user"], mesh=mesh_of(1), rngs=nnx.Rngs(0))
    te.export.save_saved_model(layer, tmp_path / "served", np.array([1]))
    path = tmp_path / "served" / file
    before = path.read_bytes()
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    with pytest.raises(te.export.ExportError, match=f"{file}.*SHA-256"):
        open_saved_model(tmp_path / "served")
    path.write_bytes(before)
    assert open_saved_model(tmp_path / "served")(np.array([3])).shape == (1, 8)


def test_names_that_tensorflow_cannot_tell_apart(tmp_path):
    layer = te.TPUEmbedding(
        {"a.b": FEATURES["user"], "a_b": FEATURES["user"]},
        mesh=mesh_of(1),
        rngs=nnx.Rngs(0),
    )
    ids = {"a.b": np.array([1]), "a_b": np.array([1])}
    with pytest.raises(
        te.export.ExportError, match="'a.b' and 'a_b'.*rename a feature"
    ):
        te.export.save_saved_model(layer, tmp_path / "served", ids)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("feature", ["user/geo", "x y", "é", "_x", "self", "features"])
def test_a_flat_feature_is_called_by_its_name(feature, tmp_path):
    table = te.TableConfig(vocabulary_size=7, dim=2, name="x y")
    layer = te.TPUEmbedding(
        {feature: te.FeatureConfig(table=table)}, mesh=mesh_of(1), rngs=nnx.Rngs(0)
    )
    ids, path = np.array([3, 5]), tmp_path / "served"
    te.export.save_saved_model(layer, path, {feature: ids})
    loaded = tf.saved_model.load(str(path))
    rows = layer.embedding_tables()["x y"]
    np.testing.assert_array_equal(loaded.tables["x y"], rows)
    found = loaded({feature: tf.constant(ids, tf.int64)})
    np.testing.assert_array_equal(found[feature], rows[ids])
    found = open_saved_model(path)({feature: ids})
    np.testing.assert_array_equal(found[feature], rows[ids])


@pytest.mark.parametrize("number", [8, pytest.param(100, marks=pytest.mark.exhaustive)])
def test_random_names_are_served_or_refused(number, tmp_path):
    def call(path, nest):
        outputs = tf.saved_model.load(str(path))(tensors_of(nest))
        for name, values in open_saved_model(path)(nest).items():
            np.testing.assert_allclose(values, outputs[name], rtol=1e-6)
        return outputs

    save = te.export.save_saved_model
    check_random_exports(range(number), tmp_path, save, call)


def test_exports_of_the_other_kind_are_refused(two_inputs, tmp_path):
    ids = {"user": np.array([1])}
    te.export.save(two_inputs, tmp_path / "jax", ids)
    with pytest.raises(te.export.ExportError, match=r"te\.export\.load"):
        open_saved_model(tmp_path / "jax")
    te.export.save_saved_model(two_inputs, tmp_path / "tf", ids)
    with pytest.raises(te.export.ExportError, match=r"call tf\.saved_model\.load\("):
        te.export.load(tmp_path / "tf")


@pytest.fixture(scope="module")
def dynamic_model():
    return DynamicTrainer(default_row="learned").train(3).model


def test_dynamic_tables_find_ids_of_64_bits(dynamic_model, tmp_path):
    te.export.save_saved_model(dynamic_model, tmp_path / "served", dynamic_batch(16))
    loaded = tf.saved_model.load(str(tmp_path / "served"))
    batch = dynamic_batch(9, seed=7, first=100)
    wanted = evaluated(dynamic_model, batch)
    found = loaded(tensors_of(batch))
    checked = open_saved_model(tmp_path / "served")(batch)
    for name, values in wanted.items():
        # Sums of up to 4 rows in another order.
        np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-6)
        np.testing.assert_allclose(checked[name], values, rtol=0, atol=1e-6)


def test_strings_of_dynamic_tables_are_fingerprints(dynamic_model, tmp_path):
    model, lists = dynamic_model, [["é", ""], [], ["a" * 200], ["ann"]]
    batch = {"user": np.array(["ann", "bob", "ann", "x"]), "history": lists}
    ids = {"user": np.arange(4), "history": te.RaggedIds.from_lists([[1], [], [2], []])}
    optimizer = te.Optimizer(model, optax.sgd(0.1))
    optimizer.insert_ids(model, model.embedding.prepare(batch))
    strings = dict.fromkeys(batch, "fingerprint")
    te.export.save_saved_model(model, tmp_path / "served", ids, strings=strings)
    loaded = tf.saved_model.load(str(tmp_path / "served"))
    tensors = {
        "user": tf.constant(batch["user"]),
        "history": ragged(lists, tf.string),
    }
    outputs, wanted = loaded(tensors), evaluated(model, batch)
    for name, values in wanted.items():
        np.testing.assert_array_equal(outputs[name], values)
    assert np.all(np.any(wanted["user"], axis=1))


def test_strings_of_dynamic_tables_need_fingerprints(dynamic_model, tmp_path):
    vocabulary = te.inputs.Vocabulary(["ann", "bob"], num_oov_buckets=2)
    batch = {"user": np.arange(4), "tag": np.arange(4)}
    for name, strings in (("user", vocabulary), ("tag", "fingerprint")):
        with pytest.raises(te.export.ExportError, match=r"te\.Dynamic vocabulary, got"):
            te.export.save_saved_model(
                dynamic_model, tmp_path / "served", batch, strings={name: strings}
            )
