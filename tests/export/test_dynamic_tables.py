"""Exports of dynamic tables: ids are found read-only, or stand beside their rows."""

import json

import jax
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx

import tpu_embedding as te
from tests.export.dynamic_models import (
    STEP,
    DynamicModel,
    DynamicTrainer,
    dynamic_batch,
    evaluated,
)
from tpu_embedding.export.row_formats import decode
from tpu_embedding.plan.dynamic_rows import dynamic_tables

ExportError = te.export.ExportError


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((1, "learned"), id="learned"),
        pytest.param((3, "none"), id="3devices", marks=pytest.mark.full),
        pytest.param((3, "learned"), id="3devices_learned", marks=pytest.mark.full),
    ],
)
def trained(request):
    num_devices, default_row = request.param
    # Half of the users get no row, so they train a learned default row.
    options = {"admit": te.dynamic.AdmitWithProbability(0.5)}
    trainer = DynamicTrainer(
        num_devices=num_devices, default_row=default_row, **options
    )
    return trainer.train(4).model


@pytest.fixture(scope="module")
def directory(trained, tmp_path_factory):
    directory = tmp_path_factory.mktemp("export") / "served"
    te.export.save(trained, directory, dynamic_batch(16))
    return directory


@pytest.fixture(scope="module")
def served(directory):
    return te.export.load(directory)


def table_of(path, name):
    return safetensors.numpy.load_file(path / "tables" / f"{name}.safetensors")


@pytest.mark.parametrize("batch_size", [1, 33])
def test_outputs_are_those_of_the_live_model(trained, served, batch_size):
    batch = dynamic_batch(batch_size, seed=9, first=100)
    outputs, wanted = served(batch), evaluated(trained, batch)
    assert set(outputs) == set(wanted)
    for name, values in wanted.items():
        # Sums of up to 4 rows in another order.
        np.testing.assert_allclose(outputs[name], values, rtol=0, atol=1e-6)


def test_a_call_refuses_ids_that_jax_has_cut(served):
    batch = dynamic_batch(3) | {"user": jax.numpy.arange(3)}
    with pytest.raises(TypeError, match="'user' .* must hold Ids64"):
        served(batch)


def test_single_rows_are_equal_bit_for_bit_and_unknown_ids_read_the_default_row(
    trained, served
):
    found = te.functional.dynamic_rows(
        trained.embedding.tables.get_value(), trained.embedding.plan
    )["user"]
    batch = dynamic_batch(len(found.ids) + 2)
    unknown = np.uint64([7, 2**63 + 5])
    batch["user"] = np.concatenate([found.ids, unknown])
    outputs, wanted = served(batch)["user"], evaluated(trained, batch)["user"]
    np.testing.assert_array_equal(outputs, wanted)
    np.testing.assert_array_equal(outputs[-1], outputs[-2])
    tables = trained.embedding.plan.stacks
    is_learned = any(
        t.config.dynamic and t.config.dynamic.default_row == "learned"
        for stack in tables
        for t in stack.tables
    )
    assert np.any(np.asarray(outputs[-1]) != 0) == is_learned


def test_strings_and_prepared_batches_are_served(served):
    batch = dynamic_batch(4)
    batch["user"] = np.array(["ann", "bob", "ann", "eve é"])
    assert served(batch)["user"].shape == (4, 8)


def test_program_runs_with_jax_and_safetensors_alone(trained, directory):
    program = (directory / "program.stablehlo").read_bytes()
    exported = jax.export.deserialize(bytearray(program))
    document = json.loads((directory / "export.json").read_text())
    tables = {}
    for entry in document["tables"].values():
        tables |= safetensors.numpy.load_file(directory / entry["file"])
    batch = dynamic_batch(16, seed=5)

    def words(ids):
        ids = np.ascontiguousarray(ids, "<i8")
        return ids.view("<u4").reshape(*ids.shape, 2)

    arrays = {"user": words(batch["user"]), "tag": batch["tag"].astype(np.int32)}
    for name in ("item", "history"):
        arrays[f"{name}/values"] = words(batch[name].values)
        arrays[f"{name}/row_splits"] = np.asarray(batch[name].row_splits, np.int32)
    arrays["weighted/ids"] = words(batch["weighted"].ids)
    arrays["weighted/weights"] = batch["weighted"].weights
    outputs = exported.call(tables, {}, arrays)
    for name, values in evaluated(trained, batch).items():
        np.testing.assert_allclose(outputs[name], values, rtol=0, atol=1e-6)


def test_signature_tells_of_64_bits(directory):
    document = json.loads((directory / "export.json").read_text())
    inputs = {each["name"]: each for each in document["signature"]["inputs"]}
    assert inputs["user"]["arrays"] == {
        "user": {"shape": ["batch", 2], "dtype": "uint32"}
    }
    wide = {name: each["is_wide"] for name, each in inputs.items()}
    assert wide == {name: name != "tag" for name in inputs}


def test_prepared_example_makes_the_same_program(directory, tmp_path):
    model = DynamicModel()
    prepared = model.embedding.prepare(dynamic_batch(16))
    te.export.save(model, tmp_path / "again", prepared)
    again = json.loads((tmp_path / "again" / "export.json").read_text())
    document = json.loads((directory / "export.json").read_text())
    assert again["signature"] == document["signature"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_tables_hold_rising_ids_and_their_rows(trained, tmp_path, dtype):
    te.export.save_tables(trained, tmp_path / "tables", dtype=dtype)
    layer = trained.embedding
    found = te.functional.dynamic_rows(layer.tables.get_value(), layer.plan)
    values = layer.embedding_tables()
    default_rows = {
        member.table.name: member.default_row
        for stack in layer.plan.stacks
        for member in dynamic_tables(stack)
    }
    document = json.loads((tmp_path / "tables" / "export.json").read_text())
    for name in ("user", "item"):
        stored, entry = table_of(tmp_path / "tables", name), document["tables"][name]
        np.testing.assert_array_equal(stored[f"{name}:ids"], found[name].ids)
        wanted = values[name][found[name].rows]
        default = default_rows[name]
        if entry["dynamic"]["default_row"] == "learned":
            wanted = np.concatenate([wanted, values[name][default : default + 1]])
        assert entry["dynamic"]["num_ids"] == len(found[name].ids)
        assert len(stored[name]) == len(wanted)
        error = entry["error"]["largest"]
        np.testing.assert_allclose(
            decode(np.asarray(stored[name])), wanted, rtol=0, atol=error
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_narrow_rows_are_served(trained, tmp_path, dtype):
    te.export.save(trained, tmp_path / "served", dynamic_batch(8), dtype=dtype)
    served = te.export.load(tmp_path / "served")
    batch = dynamic_batch(8, seed=3)
    outputs, wanted = served(batch)["user"], evaluated(trained, batch)["user"]
    error = served.document["tables"]["user"]["error"]["largest"]
    np.testing.assert_allclose(outputs, wanted, rtol=0, atol=error + 1e-7)


def test_table_without_an_id_is_exported(tmp_path):
    model = DynamicModel()
    te.export.save_tables(model, tmp_path / "tables")
    assert table_of(tmp_path / "tables", "user")["user"].shape == (0, 8)
    te.export.save(model, tmp_path / "served", dynamic_batch(8))
    rows = te.export.load(tmp_path / "served")(dynamic_batch(8))["user"]
    assert not np.any(rows)


class UniqueItems(nnx.Module):
    """Reads unique rows of a dynamic table."""

    def __init__(self, find_only=False):
        table = te.TableConfig(
            vocabulary_size=te.Dynamic(capacity=64), dim=8, name="item"
        )
        config = te.FeatureConfig(table=table, unique_rows=True, find_only=find_only)
        self.embedding = te.TPUEmbedding({"item": config}, "adagrad", rngs=nnx.Rngs(0))

    def __call__(self, features):
        unique = self.embedding(features)["item"]
        return unique.expand(unique.rows)


def test_unique_rows_of_a_dynamic_table(tmp_path):
    model, ids = UniqueItems(), np.arange(8) * STEP
    optimizer = te.Optimizer(model, optax.sgd(0.1))
    optimizer.insert_ids(model, model.embedding.prepare({"item": ids[:5]}))
    batch = {"item": {"a": ids, "b": ids[::-1]}}
    te.export.save(model, tmp_path / "served", batch)
    outputs = te.export.load(tmp_path / "served")(batch)
    wanted = model(model.embedding.prepare(batch))
    for name in ("a", "b"):
        np.testing.assert_array_equal(outputs[name], wanted[name])
    assert np.any(outputs["a"][0]) and not np.any(outputs["a"][7])


class Computing(DynamicModel):
    """Computes ids in 32 bits."""

    def __call__(self, features):
        return self.embedding({"user": features["user"] // 2})


def test_ids_computed_by_the_model_are_refused(tmp_path):
    with pytest.raises(ExportError, match=r"\['user'\].*inputs of the model as they"):
        te.export.save(Computing(), tmp_path / "served", {"user": np.array([2**40])})


class Sharing(DynamicModel):
    """Looks the same ids up in a dynamic and in a static table."""

    def __call__(self, ids):
        return self.embedding({"user": ids, "tag": ids})


def test_ids_of_dynamic_and_static_tables_need_two_inputs(tmp_path):
    with pytest.raises(ExportError, match=r"\['tag'\]; make two inputs"):
        te.export.save(Sharing(), tmp_path / "served", np.arange(4))


def test_name_of_the_ids_of_another_table_is_refused(tmp_path):
    tables = (
        te.TableConfig(vocabulary_size=te.Dynamic(capacity=9), dim=4, name="user"),
        te.TableConfig(vocabulary_size=9, dim=4, name="user:ids"),
    )
    features = {str(i): te.FeatureConfig(table=x) for i, x in enumerate(tables)}
    layer = te.TPUEmbedding(features, rngs=nnx.Rngs(0))
    with pytest.raises(ExportError, match="dynamic table 'user'; rename one"):
        te.export.save_tables(layer, tmp_path / "tables")
