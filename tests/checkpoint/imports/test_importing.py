"""Imports into models: values and slots arrive bit for bit, under any plan."""

import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.checkpoint.imports.fixtures.values import values
from tests.checkpoint.states import make_layer
from tests.rejections import ANY, rejects
from tests.tiers import quick_cases
from tpu_embedding.checkpoint.imports.importing import import_tables
from tpu_embedding.checkpoint.imports.opening import open_tables
from tpu_embedding.checkpoint.imports.source import RowArray, SourceTable, TableSource
from tpu_embedding.checkpoint.records import CheckpointError
from tpu_embedding.rows.file_rows import decode_int8
from tpu_embedding.tables import line_exchange

SHAPES = {"a": (20, 4), "deep/b.c": (7, 8)}


def arrays_of_adagrad():
    """Returns tables of SHAPES with the slot variables of Adagrad."""
    return {
        f"{name}{part}": values(f"{name}{part}", shape)
        for name, shape in SHAPES.items()
        for part in ("", "/accumulators")
    }


def with_optimizer(layer):
    return layer, te.Optimizer(layer, optax.sgd(0.1))


def by_layer(source, layer, optimizer):
    report = import_tables(source, layer, optimizer)
    return layer.embedding_tables(), optimizer.slot_values(), report


def by_stacks(source, layer, optimizer):
    state = layer.tables.get_value(), optimizer.slots.get_value()[""], layer.plan
    *new, report = te.checkpoint.import_into_stacks(source, *state)
    tables = te.functional.unstack_tables(new[0], layer.plan)
    return tables, te.functional.slot_values(new[1], layer.plan), report


@pytest.mark.parametrize("import_by", [by_layer, by_stacks])
def test_values_and_slots_arrive(import_by):
    layer, optimizer = with_optimizer(make_layer(SHAPES, te.optimizers.adagrad(0.1)))
    arrays = arrays_of_adagrad()
    tables, slots, report = import_by(arrays, layer, optimizer)
    assert report.slots == {x: {"accumulators": f"{x}/accumulators"} for x in SHAPES}
    for name in SHAPES:
        np.testing.assert_array_equal(tables[name], arrays[name])
        wanted = arrays[f"{name}/accumulators"]
        np.testing.assert_array_equal(slots[name]["accumulators"], wanted)


def test_slots_are_never_guessed():
    """Adam's slots have the shape of Adagrad's, and one has the name of momentum's."""
    layer, optimizer = with_optimizer(make_layer(SHAPES, te.optimizers.adam(0.1)))
    source = arrays_of_adagrad()
    fix = "rename={'a/momenta': 'array of the source', 'a/velocities': 'array"
    with rejects(ValueError, field="accumulators", fix=fix) as raised:
        import_tables(source, layer, optimizer)
    assert "a: float32[20, 4], accumulators float32[20, 4]" in str(raised.value)
    momentum = {"a": source["a"], "a/momenta": source["a"]}
    with rejects(ValueError, field="velocities", value="a/velocities"):
        import_tables(momentum, layer, optimizer)
    before = optimizer.slot_values()["a"]["momenta"]
    # A caller who knows better says so.
    rename = {f"{name}/velocities": f"{name}/accumulators" for name in SHAPES}
    assert not import_tables(source, layer, optimizer, rename=rename).dropped
    slots = optimizer.slot_values()["a"]
    np.testing.assert_array_equal(slots["velocities"], source["a/accumulators"])
    np.testing.assert_array_equal(slots["momenta"], before)
    report = import_tables(source, layer)
    assert report.slots == {"a": {}, "deep/b.c": {}}
    assert report.dropped == ("a/accumulators", "deep/b.c/accumulators")


@pytest.mark.parametrize(
    ("source", "dtype"),
    quick_cases(
        [("f4", "bfloat16"), ("f4", "int8"), ("f2", "float32"), ("f2", "bfloat16")],
        *("f4-int8", "f2-bfloat16"),
    ),
)
def test_narrow_tables_are_rounded_like_set_values(source, dtype):
    """FBGEMM stores float16."""
    table = np.random.default_rng(0).normal(size=(20, 5)).astype(source)
    layer = make_layer({"a": (20, 5)}, dtype=dtype)
    import_tables({"a": table}, layer)
    imported = layer.embedding_tables()["a"]
    layer.set_embedding_tables({"a": np.float32(table)})
    np.testing.assert_array_equal(imported, layer.embedding_tables()["a"])


def test_arrays_of_a_checkpoint(tmp_path):
    """They are arrays of orbax, which a model of another dtype and rule takes."""
    saved = with_optimizer(make_layer(SHAPES, te.optimizers.adagrad(0.1)))
    import_tables(arrays_of_adagrad(), *saved)
    te.save(tmp_path / "a", saved)
    rule = te.optimizers.adam(0.1)
    layer, optimizer = with_optimizer(make_layer({"x": (20, 4)}, rule))
    rename = {"x": "tables/a/values", "x/velocities": "tables/a/slots/accumulators"}
    import_tables(tmp_path / "a", layer, optimizer, rename=rename)
    source, slots = arrays_of_adagrad(), optimizer.slot_values()["x"]
    np.testing.assert_array_equal(layer.embedding_tables()["x"], source["a"])
    np.testing.assert_array_equal(slots["velocities"], source["a/accumulators"])


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
REFUSED = {
    "dim": ({"a": np.zeros((20, 5))}, {}, "shape", [20, 5]),
    "rows": ({"b": np.zeros((9, 4))}, {}, "shape", [9, 4]),
    "axes": ({"a": np.zeros(20)}, {}, "shape", [20]),
    "integers": ({"a": np.zeros((20, 4), int)}, {}, "dtype", "int64"),
    "names": ({"x": np.zeros((20, 4))}, {}, "source", ["x"]),
    "tables": (WHOLE, {"tables": ["c"]}, "tables", "c"),
    "rename": (WHOLE, {"rename": {"a": "x"}}, "rename", "x"),
    "slot shape": (WHOLE, {}, "accumulators", "a/accumulators"),
    "count": (WHOLE, {"rename": {"a/count": "x"}}, "rename", "a/count"),
    "slot": (WHOLE, {"rename": {"a/m": "a/accumulators"}}, "rename", "a/m"),
    "array": (WHOLE, {"rename": {"a/accumulators": "v"}}, "accumulators", "v"),
    "ids": (WHOLE, {"ids": {"b": np.arange(7)}, "tables": ["b"]}, "ids", np.arange(7)),
    "damage": (TableSource(origin="x", tables={"a": READ}), {}, None, ANY),
}


@pytest.fixture(scope="module")
def whole_model():
    layer = make_layer({"a": (20, 4), "b": (7, 4)}, te.optimizers.adagrad(0.1))
    return with_optimizer(layer)


@pytest.mark.parametrize(
    ("source", "options", "field", "value"), REFUSED.values(), ids=REFUSED
)
def test_mismatches_leave_the_model(whole_model, source, options, field, value):
    layer, optimizer = whole_model
    before = layer.embedding_tables()
    with (
        pytest.raises(ValueError)
        if field is None
        else rejects(field=field, value=value)
    ):
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
    with pytest.warns(UserWarning, match="hold 2, the first in row 3"):
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
    shapes = {"user": (te.Dynamic(capacity=capacity), 4)}
    return with_optimizer(make_layer(shapes, te.optimizers.adagrad(0.1), num_devices))


IDS = np.random.default_rng(1).integers(-(2**63), 2**63, 100)
ROWS = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)


def looked_up(layer, ids):
    return np.asarray(layer(layer.prepare({"user": ids}))["user"])


@pytest.mark.parametrize(
    ("num_devices", "with_slots"),
    quick_cases([(1, True), (1, False), (8, True)]),
)
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


BAD_IDS = {
    "none": None,
    "too few": IDS[:99],
    "no id": np.r_[-1, IDS[1:]],
    "twice": np.r_[IDS[1], IDS[1:]],
    "float": IDS.astype(np.float64),
    "no place": IDS,
}


def test_ids_that_do_not_fit():
    """A bucket has 64 places."""
    layer, optimizer = dynamic(capacity=64)
    for name, ids in BAD_IDS.items():
        given = {} if ids is None else {"user": ids}
        value = 36 if name == "no place" else ANY
        with rejects(CheckpointError, field="ids", value=value):
            import_tables({"user": ROWS}, layer, optimizer, ids=given)
    names = np.array([f"user {i}" for i in range(64)])
    import_tables({"user": ROWS[:64]}, layer, optimizer, ids={"user": names})
    found = te.functional.dynamic_rows(layer.tables.get_value(), layer.plan)["user"]
    order = np.argsort(te.inputs.fingerprint_ids(names))
    rows = layer.embedding_tables()["user"][found.rows]
    np.testing.assert_array_equal(rows, ROWS[:64][order])
