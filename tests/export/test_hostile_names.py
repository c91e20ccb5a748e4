"""Exports whose features, tables, outputs and attributes have hostile names."""

import numpy as np
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects
from tpu_embedding.export.saved_model import _flat_names

IDS = np.array([[1, 2], [3, 4], [5, 6]])
NAMES = (
    *("w", "w/values", "w/row_splits", "w/weights", "w/ids", "w_values", "w/", "/w"),
    *(
        "w%2Fvalues",
        "%",
        "/",
        "//",
        "a/b",
        "a b",
        "a.b",
        "a\\b",
        "a\nb",
        "é",
        "e\u0301",
    ),
    *(".", "..", "../a", "~", ":", "t", "t:ids", "_x", "$(x)", "年/齢", "😀", "\0"),
    *("features", "output", "self", "batch", "values", "é" * 30),
)


def layer_of(names, tables="{}"):
    features = {
        name: te.FeatureConfig(
            table=te.TableConfig(
                vocabulary_size=7, dim=2, combiner="sum", name=tables.format(name)
            )
        )
        for name in names
    }
    return te.TPUEmbedding(features, mesh=mesh_of(1), rngs=nnx.Rngs(0))


def leaf_of(number):
    """Returns ids of each kind in turn."""
    weights = np.full(IDS.shape, 2.0, np.float32)
    ragged = te.RaggedIds.from_lists
    return (
        IDS,
        te.DenseIds(ids=IDS, weights=weights),
        ragged(IDS.tolist()),
        ragged(IDS.tolist(), weights.tolist()),
    )[number % 4]


@pytest.mark.full
def test_hostile_names_are_served(tmp_path):
    layer = layer_of(NAMES)
    # "w" has values, row splits and weights.
    batch = {name: leaf_of(i + 3) for i, name in enumerate(NAMES)}
    te.export.save(layer, tmp_path / "served", batch)
    outputs = te.export.load(tmp_path / "served")(batch)
    assert set(outputs) == set(NAMES)
    for name, table in layer.embedding_tables().items():
        scale = 1 if getattr(batch[name], "weights", None) is None else 2
        # Sums of two products in another order.
        expected = scale * table[IDS].sum(axis=1)
        np.testing.assert_allclose(outputs[name], expected, rtol=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["served"]


class Model(nnx.Module):
    """Two layers and two outputs, whose joined names may be equal."""

    def __init__(self, tables, outputs):
        self.layers = nnx.Dict({k: layer_of(["w"], x) for k, x in tables.items()})
        self.outputs = outputs

    def __call__(self, features):
        rows = [layer({"w": features["w"]})["w"] for layer in self.layers.values()]
        first, second = self.outputs
        return {first: sum(rows), "a": {second: rows[0]}}


@pytest.mark.parametrize(
    ("field", "name", "arguments"),
    [
        ("outputs", "a/b", ({"x": "{}"}, ("a/b", "b"))),
        ("tables", "layers/a/b/w", ({"a": "b/{}", "a/b": "{}"}, ("c", "d"))),
    ],
)
def test_equal_names_are_refused(field, name, arguments, tmp_path):
    with rejects(te.export.ExportError, field=field, value=[name]):
        te.export.save(Model(*arguments), tmp_path / "served", {"w": IDS})
    assert not list(tmp_path.iterdir())


def test_names_of_a_saved_model():
    # TensorFlow takes letters, digits and underscores; see `_tf_name`.
    flat = {"user/geo": "user_geo", "x y": "x_y", "é": "x__xe9", "_x": "x__x"}
    flat |= {"self": "x_self", "features": "features", "a\nb": "a_b", "%2F": "x__2F"}
    assert _flat_names(flat) == flat
    with rejects(te.export.ExportError, field="inputs", value=["a b", "a_b"]):
        _flat_names(["a b", "a_b"])
