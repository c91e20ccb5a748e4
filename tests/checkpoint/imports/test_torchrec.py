"""State dicts of TorchRec, beside files that TorchRec wrote."""

import pathlib

import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import tpu_embedding as te
from tests.checkpoint.imports.fixtures.values import values
from tests.conftest import mesh_of
from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.importing import import_tables
from tpu_embedding.checkpoint.imports.opening import open_tables

FILES = pathlib.Path(__file__).parent / "fixtures" / "torchrec"


@pytest.mark.parametrize("rule", ["rowwise_adagrad", "adagrad"])
def test_reads_a_file_of_torchrec(rule):
    source = open_tables(FILES / f"{rule}.safetensors")
    assert source.origin.startswith("TorchRec state dict")
    shapes = {"t1": (20, 4), "t2": (7, 8)}
    assert source.tables.keys() == shapes.keys()
    for name, shape in shapes.items():
        table = source.tables[name]
        read = np.asarray(table.values)
        # One row was trained before the file was saved.
        assert (read != values(name, shape)).any(axis=1).sum() <= 2
        assert read.shape == shape
        accumulators = np.asarray(table.slots["momentum1"])
        assert accumulators.shape == (shape[:1] if rule != "adagrad" else shape)
        assert accumulators.any()


def test_names_of_a_sharded_model():
    prefix = "module.sparse.ebc.embedding_bags"
    arrays = {
        f"{prefix}.t.1.weight": np.ones((5, 2)),
        f"{prefix}.t.1.momentum1": np.ones((5, 1)),
        "t2.momentum1": np.ones((6, 2)),
        "t2.momentum2": np.ones((6, 2)),
        "module.ec.embeddings.t2.weight": np.ones((6, 2)),
        "module.over.linear.bias": np.ones(6),
    }
    source = open_tables(arrays)
    assert sorted(source.tables) == ["t.1", "t2"]
    # A column of one value per row is a row-wise slot.
    assert source.tables["t.1"].slots["momentum1"].shape == (5,)
    np.testing.assert_array_equal(
        source.tables["t.1"].slots["momentum1"].read(1, 2), np.ones(2)
    )
    assert sorted(source.tables["t2"].slots) == ["momentum1", "momentum2"]


def test_tables_of_one_name_keep_the_names_of_their_tensors():
    arrays = {
        "a.embedding_bags.t.weight": np.ones((5, 2)),
        "b.embedding_bags.t.weight": np.ones((6, 2)),
        "b.embedding_bags.t.momentum1": np.ones(6),
        "a.embedding_bags.t.momentum1": np.ones(5),
    }
    source = open_tables(arrays)
    assert source.tables.keys() == {k for k in arrays if k.endswith("weight")}
    for key, table in source.tables.items():
        assert table.slots["momentum1"].shape == arrays[key].shape[:1]


def test_matrices_of_no_collection_are_tables():
    arrays = {
        "ec.embeddings.movie.weight": np.ones((5, 2)),
        "ec.embeddings.user.weight": np.ones((6, 2)),
        "user": np.ones((7, 2)),
        "genre": np.ones((8, 2)),
        "genre/accumulators": np.ones((8, 2)),
        "linear.weight": np.ones((3, 4)),
        "linear.weight.momentum_1": np.ones((3, 4)),
    }
    tables = open_tables(arrays).tables
    shapes = {name: table.values.shape for name, table in tables.items()}
    assert shapes == {
        "movie": (5, 2),
        "ec.embeddings.user.weight": (6, 2),
        "user": (7, 2),
        "genre": (8, 2),
        "linear.weight": (3, 4),
    }
    assert tables["genre"].slots.keys() == {"accumulators"}


NO_ID = np.iinfo(np.int64).max
MODULES = "sparse.mc_ebc._managed_collision_collection._managed_collision_modules"
WEIGHT = "sparse.mc_ebc._embedding_module.embedding_bags.user.weight"


def managed(kind, num_rows=96):
    """Returns a state dict with a managed collision module, its ids and their rows."""
    random = np.random.default_rng(0)
    table = random.normal(size=(num_rows, 4)).astype(np.float32)
    rows = np.sort(random.permutation(num_rows - 1)[:60])
    ids = random.integers(-(2**62), 2**62, 60)
    state = {WEIGHT: table, f"{WEIGHT.removesuffix('.weight')}.momentum1": table**2}
    if kind == "hashed":
        identities = np.full((num_rows, 1), -1)
        hours = np.full((num_rows, 1), -1, np.int32)
        identities[rows, 0], hours[rows, 0] = ids, 490_000 + rows % 9
        buffers = {"_hash_zch_identities": identities, "_hash_zch_metadata": hours}
        used = rows % 9 - (rows % 9).min() + 1
    else:
        # Sorted ids, and the places without an id behind them.
        order = np.argsort(ids)
        free = np.setdiff1d(np.arange(num_rows), rows)
        row_of = np.concatenate([rows[order], free])
        buffers = {
            "_mch_sorted_raw_ids": np.concatenate(
                [ids[order], np.full(len(free), NO_ID)]
            ),
            "_mch_remapped_ids_mapping": row_of,
            "_mch_last_access_iter": row_of % 9 + 1,
            "_mch_counts": np.where(row_of == num_rows - 1, NO_ID, row_of + 5),
            "_current_iter_tensor": np.array([20], np.int32),
        }
        used = rows % 9 + 1
    state |= {f"{MODULES}.user.{name}": array for name, array in buffers.items()}
    return state, ids, rows, used


def dynamic_layer(num_devices):
    table = te.TableConfig(vocabulary_size=te.Dynamic(capacity=640), dim=4, name="user")
    features = {"user": te.FeatureConfig(table=table)}
    layer = te.TPUEmbedding(
        features,
        te.optimizers.adagrad(0.1),
        mesh=mesh_of(num_devices),
        rngs=nnx.Rngs(0),
    )
    return layer, te.Optimizer(layer, te.optimizers.sgd(0.1))


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("kind", ["hashed", "sorted"])
def test_managed_ids_become_those_of_a_dynamic_table(kind, num_devices, tmp_path):
    state, ids, rows, used = managed(kind)
    safetensors.numpy.save_file(state, tmp_path / "state.safetensors")
    source = open_tables(tmp_path / "state.safetensors")
    assert source.tables.keys() == {"user"}
    layer, optimizer = dynamic_layer(num_devices)
    report = import_tables(source, layer, optimizer)
    assert report.slots == {"user": {"accumulators": "momentum1"}}
    np.testing.assert_array_equal(
        layer(layer.prepare({"user": ids}))["user"], state[WEIGHT][rows]
    )
    found = te.functional.dynamic_rows(layer.tables.get_value(), layer.plan)["user"]
    assert len(found.ids) == len(ids)
    at = np.searchsorted(found.ids, ids.view(np.uint64))
    np.testing.assert_array_equal(found.last_used[at], used)
    np.testing.assert_array_equal(
        found.counts[at], rows + 5 if kind == "sorted" else np.ones(60)
    )
    slots = optimizer.slot_values()["user"]["accumulators"]
    np.testing.assert_array_equal(slots[found.rows[at]], state[WEIGHT][rows] ** 2)


def test_a_fixed_vocabulary_has_no_managed_ids():
    state, *_ = managed("hashed")
    table = te.TableConfig(vocabulary_size=96, dim=4, name="user")
    layer = te.TPUEmbedding(
        te.FeatureConfig(table=table), mesh=mesh_of(1), rngs=nnx.Rngs(0)
    )
    with pytest.raises(CheckpointError, match="'user' of the source has ids of rows"):
        import_tables(state, layer)


@pytest.mark.parametrize(
    ("kind", "buffer", "change", "message"),
    [
        ("hashed", "_hash_zch_identities", lambda x: x[:-1], "each of its 96 rows"),
        ("hashed", "_hash_zch_metadata", lambda x: x[:-1], "and 95 hours"),
        ("hashed", "_hash_zch_identities", lambda x: x * 0, "ids must be distinct"),
        ("sorted", "_mch_remapped_ids_mapping", lambda x: x[:-1], "got 95; save"),
        ("sorted", "_mch_remapped_ids_mapping", lambda x: x % 48, "distinct rows"),
        ("sorted", "_mch_remapped_ids_mapping", lambda x: x + 50, "rows below 96"),
    ],
)
def test_managed_ids_that_contradict_their_table(kind, buffer, change, message):
    state, *_ = managed(kind)
    name = f"{MODULES}.user.{buffer}"
    with pytest.raises(CheckpointError, match=message):
        open_tables(state | {name: change(state[name])})
