"""Imports into models: values and slots arrive bit for bit, under any plan."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.checkpoint.imports.fixtures.values import values
from tests.conftest import mesh_of
from tests.tiers import matrix, quick_cases
from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports import (
    import_into_stacks,
    import_tables,
    open_tables,
)
from tpu_embedding.checkpoint.imports.source import (
    RowArray,
    SourceTable,
    TableSource,
)
from tpu_embedding.rows.file_rows import decode_int8
from tpu_embedding.tables import row_windows

FILES = pathlib.Path(__file__).parent / "fixtures"
SHAPES = {"a": (20, 4), "deep/b.c": (7, 8)}


def features(shapes, **options):
    return {
        name: te.FeatureConfig(
            table=te.TableConfig(vocabulary_size=rows, dim=dim, name=name, **options)
        )
        for name, (rows, dim) in shapes.items()
    }


def make_layer(shapes=SHAPES, rule=None, num_devices=3, **options):
    return te.TPUEmbedding(
        features(shapes, **options),
        rule,
        mesh=mesh_of(num_devices),
        rngs=nnx.Rngs(0),
    )


@pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=pytest.mark.full), "bfloat16"]
)
def test_numbers_that_are_not_finite_are_counted(dtype):
    layer = make_layer({"a": (20, 4), "b": (7, 4)}, dtype=dtype)
    source = {
        name: np.ones((rows, 4), np.float32) for name, rows in (("a", 20), ("b", 7))
    }
    source["a"][[3, 9], 1] = np.nan
    source["b"][6] = np.inf
    with pytest.warns(UserWarning) as found:
        import_tables(source, layer)
    (warning,) = found
    assert "'a' hold 2, the first in row 3" in str(warning.message)
    assert "'b' hold 4, the first in row 6" in str(warning.message)


def arrays_of_adagrad():
    """Returns tables of SHAPES with the slot variables of Adagrad."""
    names = [each for name in SHAPES for each in (name, f"{name}/accumulators")]
    return {
        name: values(name, SHAPES[name.removesuffix("/accumulators")]) for name in names
    }


@pytest.mark.full
@pytest.mark.parametrize("rule", ["rowwise_adagrad", "adagrad"])
def test_slots_of_torchrec(rule):
    shapes = {"t1": (20, 4), "t2": (7, 8)}
    optimizer = getattr(te.optimizers, rule)(0.1)
    layer = make_layer(shapes, optimizer)
    optimizer = te.Optimizer(layer, optax.sgd(0.1))
    source = open_tables(FILES / "torchrec" / f"{rule}.safetensors")
    report = import_tables(source, layer, optimizer)
    assert report.slots == dict.fromkeys(shapes, {"accumulators": "momentum1"})
    for name in shapes:
        table = source.tables[name]
        np.testing.assert_array_equal(layer.embedding_tables()[name], table.values)
        np.testing.assert_array_equal(
            optimizer.slot_values()[name]["accumulators"], table.slots["momentum1"]
        )


@pytest.mark.full
def test_slots_of_another_rule_are_dropped():
    layer = make_layer(rule=te.optimizers.adam(0.1))
    optimizer = te.Optimizer(layer, optax.sgd(0.1))
    before = optimizer.slot_values()
    source = arrays_of_adagrad()
    report = import_tables(source, layer, optimizer)
    assert report.slots == {"a": {}, "deep/b.c": {}}
    assert sorted(report.dropped) == ["a/accumulators", "deep/b.c/accumulators"]
    assert "momenta [4], velocities [4] per row" in report.dropped["a/accumulators"]
    for name, shape in SHAPES.items():
        np.testing.assert_array_equal(
            layer.embedding_tables()[name], values(name, shape)
        )
        for slot, array in optimizer.slot_values()[name].items():
            np.testing.assert_array_equal(array, before[name][slot])
    # A caller who knows better says so.
    report = import_tables(
        source, layer, optimizer, slots={"velocities": "accumulators"}
    )
    np.testing.assert_array_equal(
        optimizer.slot_values()["a"]["velocities"], values("a/accumulators", (20, 4))
    )
    assert not report.dropped


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        pytest.param({}, "no optimizer was given", marks=pytest.mark.full),
        ({"slots": "none"}, "slots='none'"),
    ],
)
def test_slots_without_optimizer(options, reason):
    layer = make_layer({"a": (20, 4)}, te.optimizers.adagrad(0.1))
    report = import_tables(arrays_of_adagrad(), layer, **options)
    assert report.dropped == {"a/accumulators": reason}
    assert report.unused == ("deep/b.c",)


def test_rowwise_slots_are_no_elementwise_ones():
    layer = make_layer({"a": (20, 4)}, te.optimizers.rowwise_adagrad(0.1))
    optimizer = te.Optimizer(layer, optax.sgd(0.1))
    source = arrays_of_adagrad()
    report = import_tables(source, layer, optimizer)
    assert "accumulators [] per row" in report.dropped["a/accumulators"]
    with pytest.raises(ValueError, match=r"has shape \(20, 4\), the optimizer takes"):
        import_tables(source, layer, optimizer, slots={"accumulators": "accumulators"})


@pytest.mark.full
def test_narrow_and_integer_slots():
    rule = te.optimizers.with_slot_storage(te.optimizers.adam(0.1), jnp.bfloat16)
    counting = te.optimizers.frequency_aware_adagrad(0.1)
    features_of = {
        name: te.FeatureConfig(
            table=te.TableConfig(vocabulary_size=20, dim=4, name=name, optimizer=own)
        )
        for name, own in {"a": rule, "b": counting}.items()
    }
    layer = te.TPUEmbedding(features_of, mesh=mesh_of(2), rngs=nnx.Rngs(0))
    optimizer = te.Optimizer(layer, optax.sgd(0.1))
    arrays = {
        name: values(name, (20, 4)) for name in ("a", "a/momenta", "a/velocities")
    }
    arrays |= {name: values(name, (20, 4)) for name in ("b", "b/accumulators")}
    arrays["b/counters"] = np.arange(20, dtype=np.uint8)
    report = import_tables(arrays, layer, optimizer)
    assert not report.dropped
    for table, slots in optimizer.slot_values().items():
        for slot, array in slots.items():
            np.testing.assert_array_equal(array, arrays[f"{table}/{slot}"])
    # Integers are not made of other numbers.
    arrays["b/counters"] = np.arange(20.0)
    report = import_tables(arrays, layer, optimizer)
    assert sorted(report.dropped) == ["b/accumulators", "b/counters"]


@pytest.mark.parametrize("dtype", quick_cases(["bfloat16", "float16", "int8"], "int8"))
def test_narrow_tables_are_rounded_like_set_values(dtype):
    table = np.random.default_rng(0).normal(size=(20, 5)).astype(np.float32)
    layer = make_layer({"a": (20, 5)}, num_devices=2, dtype=dtype)
    import_tables({"a": table}, layer)
    imported = layer.embedding_tables()["a"]
    layer.set_embedding_tables({"a": table})
    np.testing.assert_array_equal(imported, layer.embedding_tables()["a"])


@pytest.mark.parametrize(
    ("exported", "own"),
    quick_cases(
        matrix(["float32", "bfloat16", "int8"], ["float32", "float16", "int8"]),
        "int8-int8",
    ),
)
def test_exported_tables_come_back(tmp_path, exported, own):
    table = np.random.default_rng(0).normal(size=(20, 5)).astype(np.float32)
    layer = make_layer({"a": (20, 5)}, num_devices=2, dtype=own)
    layer.set_embedding_tables({"a": table})
    te.export.save_tables(layer, tmp_path / "tables", dtype=exported)
    expected = layer.embedding_tables()["a"]
    if exported == "bfloat16":
        expected = expected.astype(jnp.bfloat16)
    elif exported == "int8" and own != "int8":
        (stored,) = open_tables(tmp_path / "tables").tables.values()
        expected = decode_int8(np.asarray(stored.values))
    layer.set_embedding_tables({"a": expected})
    wanted = layer.embedding_tables()["a"]
    layer.set_embedding_tables({"a": np.zeros((20, 5))})
    import_tables(tmp_path / "tables", layer)
    np.testing.assert_array_equal(layer.embedding_tables()["a"], wanted)


def test_numbers_beyond_the_range_leave_the_model():
    layer = make_layer({"a": (20, 5)}, num_devices=2, dtype=jnp.float16)
    before = layer.embedding_tables()["a"]
    table = np.zeros((20, 5), np.float32)
    table[17, 3] = 1e5
    with pytest.raises(ValueError, match="table 'a' must lie within .* row 17"):
        import_tables({"a": table}, layer)
    np.testing.assert_array_equal(layer.embedding_tables()["a"], before)
    layer = make_layer({"a": (20, 5)}, num_devices=2)
    with pytest.raises(ValueError, match="dtype float32, got 1e.39 in row 17"):
        import_tables({"a": table.astype(np.float64) * 1e34}, layer)


def test_a_damaged_source_leaves_the_model():
    layer = make_layer({"a": (20, 5), "b": (20, 5)}, num_devices=2)
    before = layer.embedding_tables()

    def fail():
        raise CheckpointError("file is damaged")

    def read(start, num_rows):
        return np.zeros((num_rows, 5), np.float32)

    whole = RowArray((20, 5), np.dtype(np.float32), read)
    damaged = RowArray((20, 5), np.dtype(np.float32), read, fail)
    source = TableSource(
        origin="test",
        tables={"a": SourceTable(values=whole), "b": SourceTable(values=damaged)},
    )
    with pytest.raises(CheckpointError, match="damaged"):
        import_tables(source, layer)
    for name, table in layer.embedding_tables().items():
        np.testing.assert_array_equal(table, before[name])


def test_a_table_is_read_block_by_block(monkeypatch):
    monkeypatch.setattr(row_windows, "_MIN_BLOCK_BYTES", 256)
    table = values("a", (100, 4))
    ranges = []

    def read(start, num_rows):
        ranges.append((start, num_rows))
        return table[start : start + num_rows]

    array = RowArray(table.shape, table.dtype, read)
    source = TableSource(origin="test", tables={"a": SourceTable(values=array)})
    layer = make_layer({"a": (100, 4)}, num_devices=2)
    import_tables(source, layer)
    assert sorted(ranges) == [(i, min(16, 100 - i)) for i in range(0, 100, 16)]
    np.testing.assert_array_equal(layer.embedding_tables()["a"], table)


def test_names_ranges_and_layers():
    class Model(nnx.Module):
        def __init__(self):
            self.user = make_layer({"a": (20, 4), "b": (5, 4)}, num_devices=2)
            self.item = make_layer({"a": (30, 4)}, num_devices=2)

    model = Model()
    before = model.item.embedding_tables()["a"]
    source = {"x": values("x", (25, 4)), "b": values("b", (5, 4))}
    report = import_tables(
        source,
        model,
        rename={"user/a": "x", "item/a": "x"},
        tables=["user/a", "item/a"],
        rows="shared",
    )
    np.testing.assert_array_equal(model.user.embedding_tables()["a"], source["x"][:20])
    after = model.item.embedding_tables()["a"]
    np.testing.assert_array_equal(after[:25], source["x"])
    np.testing.assert_array_equal(after[25:], before[25:])
    assert report.tables == {"user/a": "x", "item/a": "x"}
    assert (report.kept, report.unused) == (("user/b",), ("b",))
    assert "item/a of x: values" in str(report)


def test_stacks_without_a_layer():
    plan = te.make_plan(
        features({"a": (20, 4)}), mesh_of(2), optimizer=te.optimizers.adagrad(0.1)
    )
    stacks = te.functional.init_tables(plan, jax.random.key(0))
    states = te.functional.init_slots(stacks, plan)
    stacks, states, report = import_into_stacks(
        arrays_of_adagrad(), stacks, states, plan
    )
    np.testing.assert_array_equal(
        te.functional.unstack_tables(stacks, plan)["a"], values("a", (20, 4))
    )
    np.testing.assert_array_equal(
        te.functional.slot_values(states, plan)["a"]["accumulators"],
        values("a/accumulators", (20, 4)),
    )
    assert report.slots == {"a": {"accumulators": "accumulators"}}


def test_parts_of_stacks():
    plan = te.make_plan(features({"a": (20, 4), "b": (7, 4)}), mesh_of(2))
    stacks = te.functional.init_tables(plan, jax.random.key(0))
    before = te.functional.unstack_tables(stacks, plan)
    source = {"x": values("x", (15, 4)), "b": values("b", (7, 4))}
    options = dict(tables=["a"], rename={"a": "x"}, rows="shared")
    stacks, _, report = import_into_stacks(source, stacks, {}, plan, **options)
    after = te.functional.unstack_tables(stacks, plan)
    np.testing.assert_array_equal(after["a"][:15], source["x"])
    np.testing.assert_array_equal(after["a"][15:], before["a"][15:])
    np.testing.assert_array_equal(after["b"], before["b"])
    assert (report.tables, report.kept) == ({"a": "x"}, ("b",))


def test_refuses_models_without_tables_and_foreign_optimizers():
    with pytest.raises(ValueError, match="needs a model with TPUEmbedding layers"):
        import_tables({"a": np.zeros((2, 2))}, nnx.Linear(2, 2, rngs=nnx.Rngs(0)))

    class Model(nnx.Module):
        def __init__(self):
            rule = te.optimizers.sgd(0.1)
            self.layer = make_layer({"a": (20, 4)}, rule, num_devices=1)

    model = Model()
    optimizer = te.Optimizer(model, optax.sgd(0.1))
    with pytest.raises(ValueError, match="the optimizer that was made for the model"):
        import_tables({"a": np.zeros((20, 4))}, model.layer, optimizer)
