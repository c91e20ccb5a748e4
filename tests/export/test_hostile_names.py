"""Exports whose features, tables, outputs and attributes have hostile names."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.export.hostile_names import (
    DIM,
    ROWS,
    check_each,
    check_random_exports,
    leaf_of,
)

NUMBER = [8, pytest.param(100, marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("number", NUMBER)
def test_random_names_are_served_or_refused(number, tmp_path):
    def call(path, nest):
        return te.export.load(path)(nest)

    check_random_exports(range(number), tmp_path, te.export.save, call)


@pytest.mark.parametrize("number", NUMBER)
def test_deltas_of_random_names_are_applied_or_refused(number, tmp_path):
    def check(names, model, path):
        optimizer = te.Optimizer(model, optax.sgd(0.1))
        te.export.save_tables(model, path, optimizer=optimizer)
        # An attribute may be called `values` or `items`.
        layers = {attribute: model.layers[attribute] for attribute in names.layers}
        for i, layer in enumerate(layers.values()):
            ones = np.ones((ROWS, DIM), np.float32)
            tables = enumerate(layer.embedding_tables(), start=2 * i + 1)
            layer.set_embedding_tables({name: j * ones for j, name in tables})
        te.export.save_delta(model, optimizer, path.with_name("delta"))
        te.export.apply_delta(path, path.with_name("delta"))
        shutil.rmtree(path.with_name("delta"))
        entries = json.loads((path / "export.json").read_text())["tables"]
        many = len(layers) > 1
        assert len(entries) == len(names.tables)
        for attribute, layer in layers.items():
            for name, rows in layer.embedding_tables().items():
                key = f"layers/{attribute}/{name}" if many else name
                file = path / entries[key]["file"]
                stored = safetensors.numpy.load_file(file)[key]
                np.testing.assert_array_equal(stored, rows)

    check_each(range(number), tmp_path, check)


def layer_of(features, table="t"):
    table = te.TableConfig(vocabulary_size=ROWS, dim=DIM, combiner="sum", name=table)
    configs = {name: te.FeatureConfig(table=table) for name in features}
    return te.TPUEmbedding(configs, mesh=mesh_of(1), rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [
        *(("ragged", "values"), ("ragged", "row_splits")),
        *(("weighted_ragged", "weights"), ("weighted", "weights"), ("weighted", "ids")),
    ],
)
def test_names_of_another_features_arrays(kind, suffix, tmp_path):
    other = f"w/{suffix}"
    layer = layer_of(["w", other])
    draw = np.random.default_rng(0)
    batch = {"w": leaf_of(kind, draw), other: np.array([1, 2, 3])}
    te.export.save(layer, tmp_path / "served", batch)
    served = te.export.load(tmp_path / "served")
    assert {f"w/{suffix}", f"w%2F{suffix}"} <= set(served.signature.arrays)
    outputs = served(batch)
    for name, rows in layer(layer.prepare(batch)).items():
        # Sums of two products in another order.
        np.testing.assert_allclose(outputs[name], rows, rtol=1e-6)


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


IDS = np.array([1, 2, 3])


@pytest.mark.parametrize("name", ["features", "output", "", "a/b"])
def test_a_single_feature_keeps_its_name(name, tmp_path):
    layer = layer_of([name])
    te.export.save(layer, tmp_path / "served", {name: IDS})
    outputs = te.export.load(tmp_path / "served")({name: IDS[:2]})
    rows = layer.embedding_tables()["t"]
    assert list(outputs) == [name]
    np.testing.assert_array_equal(outputs[name], rows[IDS[:2]])


def test_parameters_whose_names_hold_slashes(tmp_path):
    scales = {
        name: jnp.float32(i) for i, name in enumerate(("a/b", "a%2Fb", "a/value"))
    }
    model = Model(lambda features, rows, scales: scales | {"rows": rows}, scales=scales)
    te.export.save(model, tmp_path / "served", {"w": IDS})
    outputs = te.export.load(tmp_path / "served")({"w": IDS})
    assert {name: outputs[name] for name in scales} == scales


TWO_PATHS = {"a/b": np.ones((3, 1)), "a": {"b": np.zeros((3, 1))}}


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (
            lambda: Model(lambda _, rows, __: rows),
            TWO_PATHS,
            "inputs of an export.*'a/b'",
        ),
        (
            lambda: Model(lambda _, rows, __: {"a/b": rows, "a": {"b": 2 * rows}}),
            {},
            "outputs of an export.*'a/b'",
        ),
        (
            lambda: Model(
                lambda _, rows, __: rows,
                {"a": layer_of(["w"], "b/t"), "a/b": layer_of(["w"], "t")},
            ),
            {},
            "tables of an export.*'layers/a/b/t'",
        ),
        (
            lambda: Model(lambda _, rows, __: {"\ud800": rows}),
            {},
            r"UTF-8 can encode, got '\\ud800'",
        ),
        (
            lambda: Model(
                lambda _, rows, __: rows, {"layer": layer_of(["w"], "__metadata__")}
            ),
            {},
            "'__metadata__', which the format reserves",
        ),
    ],
)
def test_names_that_mean_two_things_are_refused(model, batch, message, tmp_path):
    with pytest.raises(te.export.ExportError, match=message):
        te.export.save(model(), tmp_path / "served", {"w": IDS} | batch)
    assert not list(tmp_path.iterdir())


def test_two_layers_of_one_path_are_refused():
    nested = nnx.Dict({"a/b": layer_of(["w"]), "a": nnx.Dict({"b": layer_of(["w"])})})
    with pytest.raises(ValueError, match="Two TPUEmbedding layers.*path 'a/b'"):
        te.Optimizer(nested, optax.sgd(0.1))


def test_signatures_whose_arrays_clash_are_refused(tmp_path):
    te.export.save(layer_of(["w"]), tmp_path / "served", {"w": IDS})
    path = tmp_path / "served" / "export.json"
    document = json.loads(path.read_text())
    document["signature"]["inputs"] *= 2
    path.write_text(json.dumps(document))
    with pytest.raises(te.export.ExportError, match="inputs of an export.*'w'"):
        te.export.load(tmp_path / "served")
