"""Imports into dynamic tables: rows lie with their ids, and training goes on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports import import_into_stacks, import_tables

functional = te.functional
NUM_ROWS = 100


def feature(name="user", capacity=320, dim=4, **dynamic):
    vocabulary = te.Dynamic(capacity=capacity, **dynamic) if capacity else NUM_ROWS
    table = te.TableConfig(vocabulary_size=vocabulary, dim=dim, name=name)
    return te.FeatureConfig(table=table)


def make(num_devices=1, **options):
    """Returns a model with a dynamic table, and its optimizer."""
    layer = te.TPUEmbedding(
        {"user": feature(**options)},
        te.optimizers.adagrad(0.1),
        mesh=mesh_of(num_devices),
        rngs=nnx.Rngs(0),
    )
    return layer, te.Optimizer(layer, optax.sgd(0.1))


def rows_and_slots():
    random = np.random.default_rng(0)
    rows, slots = random.normal(size=(2, NUM_ROWS, 4)).astype(np.float32)
    return {"user": rows, "user/accumulators": slots**2}


def wide(num_ids=NUM_ROWS):
    random = np.random.default_rng(1)
    return random.integers(-(2**63), 2**63, num_ids)


def looked_up(layer, ids):
    return np.asarray(layer(layer.prepare({"user": ids}))["user"])


def slots_by_id(layer, optimizer):
    """Returns the ids of the table, and their accumulators."""
    found = functional.dynamic_rows(layer.tables.get_value(), layer.plan)["user"]
    slots = optimizer.slot_values()["user"]["accumulators"]
    return dict(zip(found.ids.tolist(), slots[found.rows], strict=True))


@nnx.jit
def train(layer, optimizer, ids):
    rows = optimizer.insert_ids(layer, ids)
    loss = te.value_and_grad(lambda m: jnp.sum(m(rows)["user"] ** 2))
    _, gradients = loss(layer)
    optimizer.update(layer, gradients)


IDS = {
    "int64": wide(),
    "uint64": wide().view(np.uint64),
    "int32": np.arange(-101, -1, dtype=np.int32),
    "strings": np.array([f"user {i}" for i in range(NUM_ROWS)]),
    "objects": np.array([f"user {i}" for i in range(NUM_ROWS)], object),
}


@pytest.mark.parametrize(
    ("kind", "num_devices"), [*((kind, 1) for kind in IDS), ("int64", 8)]
)
def test_rows_get_ids(kind, num_devices):
    ids, source = IDS[kind], rows_and_slots()
    layer, optimizer = make(num_devices)
    report = import_tables(source, layer, optimizer, ids={"user": ids})
    assert report.slots == {"user": {"accumulators": "accumulators"}}
    assert report.without_place == {}
    np.testing.assert_array_equal(looked_up(layer, ids), source["user"])
    unknown = np.array([17, 18]) if kind != "int32" else np.array([1017])
    if kind in ("strings", "objects"):
        unknown = np.array(["no one"])
    assert not looked_up(layer, unknown).any()
    slots = slots_by_id(layer, optimizer)
    words = np.asarray(layer.prepare({"user": ids})["user"].to_numpy())
    np.testing.assert_array_equal(
        [slots[word] for word in words.tolist()], source["user/accumulators"]
    )


@pytest.mark.parametrize("num_devices", [1, 8])
def test_training_goes_on_as_in_a_static_table(num_devices):
    source, ids = rows_and_slots(), wide()
    layer, optimizer = make(num_devices)
    import_tables(source, layer, optimizer, ids={"user": ids})
    static, of_static = make(num_devices, capacity=None)
    import_tables(source, static, of_static)
    chosen = np.arange(0, 64)
    train(layer, optimizer, layer.prepare({"user": ids[chosen]}))
    _, gradients = te.value_and_grad(
        lambda m: jnp.sum(m(static.prepare({"user": chosen}))["user"] ** 2)
    )(static)
    of_static.update(static, gradients)
    np.testing.assert_allclose(
        looked_up(layer, ids), static.embedding_tables()["user"], rtol=1e-6
    )
    # New ids find room beside the imported ones.
    train(layer, optimizer, layer.prepare({"user": np.arange(8)}))
    assert looked_up(layer, np.arange(8)).any()
    assert int(layer.dynamic_stats.get_value()["user"].used_rows) == NUM_ROWS + 8


def test_the_table_has_the_imported_ids_only():
    layer, optimizer = make(3)
    train(layer, optimizer, layer.prepare({"user": np.arange(64)}))
    source, ids = rows_and_slots(), wide()
    import_tables(source, layer, optimizer, slots="none", ids={"user": ids})
    assert not looked_up(layer, np.arange(64)).any()
    # Slot variables that are not imported start as new.
    slots = slots_by_id(layer, optimizer)
    assert set(np.unique(list(slots.values()))) == {np.float32(0.1)}
    found = functional.dynamic_rows(layer.tables.get_value(), layer.plan)["user"]
    assert set(found.ids) == set(ids.view(np.uint64))
    assert set(found.last_used) == {2} and set(found.counts) == {1}


def test_a_learned_default_row_stays():
    layer, optimizer = make(3, default_row="learned")
    before = looked_up(layer, np.array([5]))
    import_tables(rows_and_slots(), layer, optimizer, ids={"user": wide()})
    np.testing.assert_array_equal(looked_up(layer, np.array([5])), before)


def test_a_checkpoint_of_a_static_table_gets_ids(tmp_path):
    static, of_static = make(3, capacity=None)
    import_tables(rows_and_slots(), static, of_static)
    te.save(tmp_path / "c", (static, of_static))
    layer, optimizer = make(1)
    ids = wide()
    report = import_tables(tmp_path / "c", layer, optimizer, ids={"user": ids})
    assert report.slots == {"user": {"accumulators": "accumulators"}}
    np.testing.assert_array_equal(looked_up(layer, ids), rows_and_slots()["user"])
    # And that of a dynamic table has them.
    te.save(tmp_path / "d", (layer, optimizer))
    other, of_other = make(8, capacity=1000)
    import_tables(tmp_path / "d", other, of_other)
    np.testing.assert_array_equal(looked_up(other, ids), rows_and_slots()["user"])
    assert "user: float32[100, 4], rows by id" in str(
        te.checkpoint.open_tables(tmp_path / "d")
    )


def test_the_latest_checkpoint_of_a_run_is_opened(tmp_path):
    static, of_static = make(3, capacity=None)
    checkpoints = te.checkpoint.RunCheckpoints(tmp_path / "run", kept=None)
    for step in (9, 10):
        rows = {"user": np.full((NUM_ROWS, 4), step, np.float32)}
        import_tables(rows, static, of_static)
        checkpoints.save(step, (static, of_static), {})
    checkpoints.close()
    for path, step in (("run", 10), ("run/9", 9), ("run/9/state", 9)):
        source = te.checkpoint.open_tables(tmp_path / path)
        assert set(np.asarray(source.tables["user"].values).ravel()) == {step}


def test_ids_without_a_place_are_refused_or_counted():
    layer, optimizer = make(3, capacity=64)
    source, ids = rows_and_slots(), wide()
    with pytest.raises(CheckpointError, match="36 of 100 ids; give te.Dynamic a large"):
        import_tables(source, layer, optimizer, ids={"user": ids})
    assert not looked_up(layer, ids).any()
    report = import_tables(source, layer, optimizer, rows="shared", ids={"user": ids})
    assert report.without_place == {"user": 36}
    assert "full:\n  user: 36" in str(report)
    kept = looked_up(layer, ids).any(axis=1)
    assert kept.sum() == 64
    np.testing.assert_array_equal(looked_up(layer, ids)[kept], source["user"][kept])


def ids_with(position, value):
    ids = wide()
    ids[position] = value
    return ids


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (None, r"has a te.Dynamic vocabulary.*by ids=\{'user': array\}"),
        (wide(99), "one id for each of the 100 rows .* got shape \\(99,\\)"),
        (wide().reshape(-1, 1), r"got shape \(100, 1\)"),
        (ids_with(3, -1), "must not be 2.*64 - 1 .* got it for row 3 and 1 rows"),
        (ids_with(3, wide()[7]), "must be distinct, got .* row 3 and .* for row 7"),
        (np.array(["a"] * 100), "must be distinct, got 'a' .* and 99 repeats"),
        (wide().astype(np.float64), "integers of at most 64 bits, or strings, got"),
        (np.array([2**64, *range(99)], object), "got dtype object"),
    ],
)
def test_ids_that_do_not_fit(ids, message):
    layer, optimizer = make()
    given = None if ids is None else {"user": ids}
    with pytest.raises(CheckpointError, match=message):
        import_tables(rows_and_slots(), layer, optimizer, ids=given)


def test_tables_that_do_not_fit():
    layer, optimizer = make(dim=8)
    with pytest.raises(CheckpointError, match="has dim 4, the model 8"):
        import_tables(rows_and_slots(), layer, optimizer, ids={"user": wide()})
    with pytest.raises(CheckpointError, match="ids names 'film'; the model has"):
        import_tables(rows_and_slots(), layer, optimizer, ids={"film": wide()})
    with pytest.raises(TypeError, match="ids must be a dict of arrays by the names"):
        import_tables(rows_and_slots(), layer, optimizer, ids=wide())
    static, of_static = make(capacity=None)
    with pytest.raises(CheckpointError, match="fixed vocabulary of 100 rows; set Tabl"):
        import_tables(rows_and_slots(), static, of_static, ids={"user": wide()})


def test_stacks_without_a_layer_take_ids():
    features = {name: feature(name) for name in ("user", "item")}
    plan = te.make_plan(features, mesh_of(3), optimizer="adagrad")
    tables = functional.init_tables(plan, jax.random.key(0))
    slots = functional.init_slots(tables, plan)
    source, ids = rows_and_slots(), wide()
    tables, slots, report = import_into_stacks(
        source, tables, slots, plan, ids={"user": ids}
    )
    assert report.kept == ("item",)
    found = functional.dynamic_rows(tables, plan)
    assert len(found["user"].ids) == NUM_ROWS and not len(found["item"].ids)
    words = functional.Ids64.of_array(ids)
    looked = functional.lookup(tables, {"user": words, "item": words}, plan)
    np.testing.assert_array_equal(looked.activations["user"], source["user"])
    assert not np.asarray(looked.activations["item"]).any()
