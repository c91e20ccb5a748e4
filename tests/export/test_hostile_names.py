"""Exports whose features, tables, outputs and attributes have hostile names."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of

ROWS, DIM = 7, 2
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
                vocabulary_size=ROWS,
                dim=DIM,
                combiner="sum",
                name=tables.format(name),
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


@pytest.mark.parametrize("shift", range(4))
def test_hostile_names_are_served(shift, tmp_path):
    layer = layer_of(NAMES)
    batch = {name: leaf_of(i + shift) for i, name in enumerate(NAMES)}
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
    """Looks up the input "w" in each layer, and returns a function of all inputs."""

    def __init__(self, returned, layers=None, scales=None):
        self.layers = nnx.Dict(layers or {"layer": layer_of(["w"])})
        self.scales = nnx.Dict({k: nnx.Param(x) for k, x in (scales or {}).items()})
        self.returned = returned

    def __call__(self, features):
        rows = [layer({"w": features["w"]})["w"] for layer in self.layers.values()]
        scales = {name: scale.get_value() for name, scale in self.scales.items()}
        return self.returned(features, sum(rows), scales)


def test_parameters_whose_names_hold_slashes(tmp_path):
    scales = {k: jnp.float32(i) for i, k in enumerate(("a/b", "a%2Fb", "a/value"))}
    model = Model(lambda features, rows, scales: scales | {"rows": rows}, scales=scales)
    te.export.save(model, tmp_path / "served", {"w": IDS})
    outputs = te.export.load(tmp_path / "served")({"w": IDS})
    assert {name: outputs[name] for name in scales} == scales


def rows_of(_, rows, __):
    return rows


REFUSED = {
    "outputs of an export.*'a/b'": lambda: Model(
        lambda _, rows, __: {"a/b": rows, "a": {"b": 2 * rows}}
    ),
    "tables of an export.*'layers/a/b/w'": lambda: Model(
        rows_of, {"a": layer_of(["w"], "b/{}"), "a/b": layer_of(["w"])}
    ),
    r"UTF-8 can encode, got '\\ud800'": lambda: Model(
        lambda _, rows, __: {"\ud800": rows}
    ),
    "'__metadata__', which the format reserves": lambda: Model(
        rows_of, {"layer": layer_of(["w"], "__metadata__")}
    ),
    "shorten the table's name": lambda: Model(
        rows_of, {"layer": layer_of(["w"], "é" * 90)}
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_names_that_no_file_can_hold_are_refused(message, tmp_path):
    with pytest.raises(te.export.ExportError, match=message):
        te.export.save(REFUSED[message](), tmp_path / "served", {"w": IDS})
    assert not list(tmp_path.iterdir())
