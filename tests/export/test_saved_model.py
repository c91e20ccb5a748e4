"""SavedModels give the numbers of the live model, without JAX."""

import jax
import numpy as np
import pytest

import tpu_embedding as te
from tests.export.dynamic_models import DynamicTrainer, dynamic_batch, evaluated
from tests.export.served_models import (
    batch_of,
    live_outputs,
    trained_model,
)

tf = pytest.importorskip("tensorflow", reason="the extra `tf` is not installed")


def flat_tensors(nest):
    """Returns the tensors of a batch, by their names in the signature."""

    def is_leaf(x):
        return isinstance(x, te.RaggedIds | te.DenseIds)

    tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(nest, is_leaf=is_leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="_")
        parts = {name: leaf}
        if is_leaf(leaf):
            fields = ("ids", "values", "row_splits", "weights")
            found = {k: getattr(leaf, k, None) for k in fields}
            parts = {f"{name}_{k}": x for k, x in found.items() if x is not None}
            parts = {k.removesuffix("_ids"): x for k, x in parts.items()}
        for key, x in parts.items():
            is_float = x.dtype == np.float32
            tensors[key] = tf.constant(x, tf.float32 if is_float else tf.int64)
    return tensors


def served(path, nest):
    loaded = tf.saved_model.load(str(path))
    return loaded.signatures["serving_default"](**flat_tensors(nest))


def check(found, wanted):
    assert set(found) == set(wanted)
    for name, values in wanted.items():
        # Sums of up to 6 rows, and of 8 products, in another order.
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6)


def test_outputs_are_those_of_the_live_model(tmp_path):
    model = trained_model(2, 1)
    te.export.save_tensorflow(model, tmp_path / "served", *batch_of(16))
    for batch_size in (1, 7):
        features, inputs = batch_of(batch_size)
        lists = [[1, 2**40]] * batch_size  # Ids of 64 bits stay out of range.
        features["ragged"] = te.RaggedIds.from_lists(lists)
        nest = {"features": features, "inputs": inputs}
        wanted = live_outputs(model, features, inputs)
        check(served(tmp_path / "served", nest), wanted)
    loaded = tf.saved_model.load(str(tmp_path / "served"))
    for name, values in model.embedding.embedding_tables().items():
        np.testing.assert_array_equal(loaded.tables[name].numpy(), values)


def test_dynamic_tables_find_ids_of_64_bits(tmp_path):
    model = DynamicTrainer(default_row="learned").train(3).model
    te.export.save_tensorflow(model, tmp_path / "served", dynamic_batch(16))
    batch = dynamic_batch(9, seed=7, first=100)
    check(served(tmp_path / "served", batch), evaluated(model, batch))
