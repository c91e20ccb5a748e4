"""Imports into models: values and slots arrive bit for bit, under any plan."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.checkpoint.imports.fixtures.values import values
from tests.conftest import mesh_of
from tpu_embedding.checkpoint.imports.importing import import_tables
from tpu_embedding.checkpoint.imports.opening import open_tables
from tpu_embedding.checkpoint.imports.source import RowArray, SourceTable, TableSource
from tpu_embedding.checkpoint.records import CheckpointError
from tpu_embedding.rows.file_rows import decode_int8
from tpu_embedding.tables import line_exchange

SHAPES = {"a": (20, 4), "deep/b.c": (7, 8)}


def make_layer(shapes=SHAPES, rule=None, num_devices=2, **options):
    features = {
        name: te.FeatureConfig(
            table=te.TableConfig(vocabulary_size=rows, dim=dim, name=name, **options)
        )
        for name, (rows, dim) in shapes.items()
    }
    mesh = mesh_of(num_devices)
    return te.TPUEmbedding(features, rule, mesh=mesh, rngs=nnx.Rngs(0))


def arrays_of_adagrad():
    """Returns tables of SHAPES with the slot variables of Adagrad."""
    return {
        f"{name}{part}": values(f"{name}{part}", shape)
        for name, shape in SHAPES.items()
        for part in ("", "/accumulators")
    }


def test_values_and_slots_arrive():
    layer = make_layer(rule=te.optimizers.adagrad(0.1))
    optimizer = te.Optimizer(layer, optax.sgd(0.1))
    arrays = arrays_of_adagrad()
    report = import_tables(arrays, layer, optimizer)
    assert report.slots == dict.fromkeys(SHAPES, {"accumulators": "accumulators"})
    for name in SHAPES:
        np.testing.assert_array_equal(layer.embedding_tables()[name], arrays[name])
        slots = optimizer.slot_values()[name]
        np.testing.assert_array_equal(
            slots["accumulators"], arrays[f"{name}/accumulators"]
        )


def test_slots_of_another_rule_are_dropped():
    layer = make_layer(rule=te.optimizers.adam(0.1))
    optimizer = te.Optimizer(layer, optax.sgd(0.1))
    source = arrays_of_adagrad()
    report = import_tables(source, layer, optimizer)
    assert report.slots == {"a": {}, "deep/b.c": {}}
    assert report.dropped == ("a/accumulators", "deep/b.c/accumulators")
    assert not optimizer.slot_values()["a"]["velocities"].any()
    # A caller who knows better says so.
    slots = {"velocities": "accumulators"}
    assert not import_tables(source, layer, optimizer, slots=slots).dropped
    np.testing.assert_array_equal(
        optimizer.slot_values()["a"]["velocities"], source["a/accumulators"]
    )
    assert import_tables(source, layer).slots == {"a": {}, "deep/b.c": {}}


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_narrow_tables_are_rounded_like_set_values(dtype):
    table = np.random.default_rng(0).normal(size=(20, 5)).astype(np.float32)
    layer = make_layer({"a": (20, 5)}, dtype=dtype)
    import_tables({"a": table}, layer)
    imported = layer.embedding_tables()["a"]
    layer.set_embedding_tables({"a": table})
    np.testing.assert_array_equal(imported, layer.embedding_tables()["a"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float16_rows_become_those_of_the_table(dtype):
    """As FBGEMM stores FP16 tables."""
    table = np.random.default_rng(0).normal(size=(20, 5)).astype(np.float16)
    layer = make_layer({"a": (20, 5)}, dtype=dtype)
    import_tables({"a": table}, layer)
    wanted = table.astype(np.float32).astype(jnp.dtype(dtype)).astype(np.float32)
    np.testing.assert_array_equal(layer.embedding_tables()["a"], wanted)


def test_exported_int8_rows_come_back(tmp_path):
    table = np.random.default_rng(0).normal(size=(20, 5)).astype(np.float32)
    layer = make_layer({"a": (20, 5)}, dtype="int8")
    layer.set_embedding_tables({"a": table})
    te.export.save_tables(layer, tmp_path / "tables", dtype="int8")
    (stored,) = open_tables(tmp_path / "tables" / "tables").tables.values()
    layer.set_embedding_tables({"a": np.zeros((20, 5))})
    import_tables(tmp_path / "tables" / "tables", layer, rename={"a": "a"})
    wanted = decode_int8(np.asarray(stored.values))
    np.testing.assert_array_equal(layer.embedding_tables()["a"], wanted)


def damaged():
    raise CheckpointError("file is damaged")


READ = SourceTable(values=RowArray((20, 4), np.dtype("f4"), lambda *_: None, damaged))
WHOLE = {"a": np.zeros((20, 4)), "b": np.zeros((7, 4)), "a/accumulators": np.ones(20)}
SLOT = {"slots": {"accumulators": "accumulators"}}
REFUSED = {
    "dim": (
        {"a": np.zeros((20, 5))},
        {},
        "table 'a': .*20 rows of dim 5, .*20 .*dim 4",
    ),
    "rows": ({"b": np.zeros((9, 4))}, {}, "table 'b': .*9 rows of dim 4, .*7 of"),
    "axes": ({"a": np.zeros(20)}, {}, r"must be \[rows, dim\], got \(20,\)"),
    "integers": ({"a": np.zeros((20, 4), int)}, {}, "must be floating"),
    "names": ({"x": np.zeros((20, 4))}, {}, r"model, \['a', 'b'\].*rename="),
    "tables": (WHOLE, {"tables": ["c"]}, "tables names 'c'"),
    "rename": (WHOLE, {"rename": {"a": "x"}}, "table 'x'"),
    "slots": (WHOLE, SLOT | {"tables": ["a"]}, r"'accumulators': 'float64\[20\]'"),
    "slot": (WHOLE, {"slots": {"m": "v"}}, "must map a slot of the table"),
    "ids": (WHOLE, {"ids": {"a": np.arange(20)}}, "a static table takes none"),
    "damage": (TableSource(origin="x", tables={"a": READ}), {}, "file is damaged"),
}


@pytest.fixture(scope="module")
def whole_model():
    rule = te.optimizers.adagrad(0.1)
    layer = make_layer({"a": (20, 4), "b": (7, 4)}, rule)
    return layer, te.Optimizer(layer, optax.sgd(0.1))


@pytest.mark.parametrize(
    ("source", "options", "message"), REFUSED.values(), ids=REFUSED
)
def test_mismatches_leave_the_model(whole_model, source, options, message):
    layer, optimizer = whole_model
    before = layer.embedding_tables()
    with pytest.raises(ValueError, match=message):
        import_tables(source, layer, optimizer, **options)
    for name, table in layer.embedding_tables().items():
        np.testing.assert_array_equal(table, before[name])


def test_a_table_is_read_block_by_block(monkeypatch):
    monkeypatch.setattr(line_exchange, "_MIN_BLOCK_BYTES", 256)
    table, ranges = values("a", (100, 4)), []

    def read(start, num_rows):
        ranges.append((start, num_rows))
        return table[start : start + num_rows]

    array = RowArray(table.shape, table.dtype, read)
    source = TableSource(origin="test", tables={"a": SourceTable(values=array)})
    layer = make_layer({"a": (100, 4)})
    import_tables(source, layer)
    assert sorted(ranges) == [(i, min(16, 100 - i)) for i in range(0, 100, 16)]
    np.testing.assert_array_equal(layer.embedding_tables()["a"], table)


def test_numbers_that_are_not_finite_are_counted():
    layer, source = make_layer({"a": (20, 4)}), {"a": np.ones((20, 4), np.float32)}
    source["a"] = source["a"].astype(np.float64)
    source["a"][[3, 9], 1] = np.nan, 1e39  # beyond the range of float32
    with pytest.warns(UserWarning, match="'a' hold 2, the first in row 3"):
        import_tables(source, layer)


def test_names_and_layers():
    class Model(nnx.Module):
        def __init__(self):
            self.user = make_layer({"a": (20, 4), "b": (5, 4)})
            self.item = make_layer({"a": (20, 4)})

    model = Model()
    source = {"x": values("x", (20, 4)), "b": values("b", (5, 4))}
    names = {"user/a": "x", "item/a": "x"}
    report = import_tables(source, model, rename=names, tables=[*names])
    for layer in (model.user, model.item):
        np.testing.assert_array_equal(layer.embedding_tables()["a"], source["x"])
    assert report.tables == names
    assert (report.kept, report.unused) == (("user/b",), ("b",))
    assert "item/a of x: values" in str(report)


def dynamic(num_devices=1, capacity=320):
    table = te.TableConfig(
        vocabulary_size=te.Dynamic(capacity=capacity), dim=4, name="user"
    )
    layer = te.TPUEmbedding(
        {"user": te.FeatureConfig(table=table)},
        te.optimizers.adagrad(0.1),
        mesh=mesh_of(num_devices),
        rngs=nnx.Rngs(0),
    )
    return layer, te.Optimizer(layer, optax.sgd(0.1))


IDS = np.random.default_rng(1).integers(-(2**63), 2**63, 100)
ROWS = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)


def looked_up(layer, ids):
    return np.asarray(layer(layer.prepare({"user": ids}))["user"])


@pytest.mark.parametrize("num_devices", [1, pytest.param(8, marks=pytest.mark.full)])
@pytest.mark.parametrize("with_slots", [True, False])
def test_rows_lie_with_their_ids(num_devices, with_slots):
    layer, optimizer = dynamic(num_devices)
    old = layer.prepare({"user": np.array([5])})
    optimizer.insert_ids(layer, old)
    source = {"user": ROWS} | ({"user/accumulators": ROWS**2} if with_slots else {})
    import_tables(source, layer, optimizer, ids={"user": IDS})
    np.testing.assert_array_equal(looked_up(layer, IDS), ROWS)
    assert not looked_up(layer, np.array([5])).any()
    found = te.functional.dynamic_rows(layer.tables.get_value(), layer.plan)["user"]
    at = np.searchsorted(found.ids, IDS.view(np.uint64))
    slots = optimizer.slot_values()["user"]["accumulators"][found.rows[at]]
    np.testing.assert_array_equal(slots, ROWS**2 if with_slots else slots * 0 + 0.1)
    assert len(set(found.last_used)) == len(set(found.counts)) == 1
    # Training goes on: new ids get rows beside these.
    optimizer.insert_ids(layer, layer.prepare({"user": np.array([7])}))
    np.testing.assert_array_equal(looked_up(layer, IDS), ROWS)


def test_ids_without_a_place():
    layer, optimizer = dynamic(capacity=64)
    names = np.array([f"user {i}" for i in range(100)])
    with pytest.raises(CheckpointError, match="36 ids of table 'user' don't fit"):
        import_tables({"user": ROWS}, layer, optimizer, ids={"user": names})
    source = {"user": ROWS[:64]}
    import_tables(source, layer, optimizer, ids={"user": names[:64]})
    found = looked_up(layer, te.inputs.fingerprint_ids(names[:64]))
    np.testing.assert_array_equal(found, ROWS[:64])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (None, "te.Dynamic table needs ids"),
        (IDS[:99], r"100 rows, got shape \(99,\)"),
        (np.r_[-1, IDS[1:]], "distinct and not 2"),
        (np.r_[IDS[1], IDS[1:]], "distinct and not 2"),
        (IDS.astype(np.float64), "one integer or string .* dtype float64"),
    ],
)
def test_ids_that_do_not_fit(ids, message):
    layer, optimizer = dynamic()
    given = {} if ids is None else {"user": ids}
    with pytest.raises(CheckpointError, match=message):
        import_tables({"user": ROWS}, layer, optimizer, ids=given)


def test_stacks_without_a_layer():
    layer, optimizer = dynamic(2)
    tables, slots, report = te.checkpoint.import_into_stacks(
        {"user": ROWS},
        layer.tables.get_value(),
        optimizer.slots.get_value()[""],
        layer.plan,
        ids={"user": IDS},
    )
    assert report.tables == {"user": "user"}
    words = te.functional.Ids64.of_array(IDS)
    looked = te.functional.lookup(tables, {"user": words}, layer.plan)
    np.testing.assert_array_equal(looked.activations["user"], ROWS)
