"""TensorFlow checkpoints, which TensorFlow and TFRS wrote and TensorFlow reads."""

import json
import pathlib
import shutil

import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.checkpoint.imports.fixtures.values import values
from tests.checkpoint.imports.test_importing import SHAPES, make_layer
from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports import import_tables, open_tables, tensorflow
from tpu_embedding.checkpoint.imports.tensorflow_reader import TensorFlowReader

tf = pytest.importorskip("tensorflow", reason="the extra `tf` is not installed")

FILES = pathlib.Path(__file__).parent / "fixtures" / "tensorflow"

SLOTS = {
    "adagrad": ["accumulators"],
    "adagrad_momentum": ["accumulators", "momenta"],
    "ftrl": ["accumulators", "linears"],
    "adam": ["momenta", "velocities"],
    "sgd": [],
}


def assert_arrays(source, expected):
    found = {}
    for name, table in source.tables.items():
        found[name] = table.values
        found |= {f"{name}/{slot}": array for slot, array in table.slots.items()}
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(found[name]), array)


@pytest.mark.parametrize("rule", SLOTS)
def test_tables_of_tpu_embedding(rule):
    expected = {}
    for name, shape in {"a": (20, 4), "deep/b.c": (7, 8)}.items():
        for array in (name, *(f"{name}/{slot}" for slot in SLOTS[rule])):
            expected[array] = values(array, shape)
    assert_arrays(open_tables(FILES / f"serving_{rule}"), expected)


@pytest.mark.parametrize("rule", ["adam", "adagrad", "ftrl"])
def test_tables_of_tfrs(rule):
    with np.load(FILES / f"tfrs_{rule}" / "expected.npz") as arrays:
        assert_arrays(open_tables(FILES / f"tfrs_{rule}"), dict(arrays))


@pytest.mark.parametrize("name", ["two_same", "padded"])
def test_stacks_of_sparse_core(name):
    shapes = json.loads((FILES / f"sparse_core_{name}" / "tables.json").read_text())
    expected = {
        array: values(array, shape)
        for table, shape in shapes.items()
        for array in (table, f"{table}/accumulators")
    }
    assert_arrays(open_tables(FILES / f"sparse_core_{name}"), expected)


RULES = {
    "adagrad": (te.optimizers.adagrad(0.1), ["accumulators"]),
    "adagrad_momentum": (
        te.optimizers.adagrad_momentum(0.1),
        ["accumulators", "momenta"],
    ),
    "ftrl": (te.optimizers.ftrl(0.1), ["accumulators", "linears"]),
    "adam": (te.optimizers.adam(0.1), ["momenta", "velocities"]),
    "sgd": (te.optimizers.sgd(0.1), []),
}


@pytest.mark.parametrize("rule", RULES)
def test_import_of_tpu_embedding(rule):
    row_optimizer, slots = RULES[rule]
    layer = make_layer(rule=row_optimizer)
    optimizer = te.Optimizer(layer, optax.sgd(0.1))
    report = import_tables(FILES / f"serving_{rule}", layer, optimizer)
    tables, slot_values = layer.embedding_tables(), optimizer.slot_values()
    for name, shape in SHAPES.items():
        np.testing.assert_array_equal(tables[name], values(name, shape))
        assert sorted(slot_values[name]) == slots
        for slot in slots:
            expected = values(f"{name}/{slot}", shape)
            np.testing.assert_array_equal(slot_values[name][slot], expected)
    assert report.tables == {name: name for name in SHAPES}
    assert report.slots == {name: {s: s for s in slots} for name in SHAPES}
    assert (report.dropped, report.kept, report.unused) == ({}, (), ())


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        ("adam", {"momenta": "m", "velocities": "v"}),
        ("adagrad", {"accumulators": "accumulator"}),
        ("ftrl", {"accumulators": "accumulator", "linears": "linear"}),
    ],
)
def test_import_of_keras_slots(rule, names):
    layer = make_layer({"a": (20, 4), "b": (7, 4)}, RULES[rule][0])
    optimizer = te.Optimizer(layer, optax.sgd(0.1))
    report = import_tables(FILES / f"tfrs_{rule}", layer, optimizer)
    assert report.slots == {"a": names, "b": names}
    with np.load(FILES / f"tfrs_{rule}" / "expected.npz") as expected:
        for name, table in layer.embedding_tables().items():
            np.testing.assert_array_equal(table, expected[name])
            for own, other in names.items():
                np.testing.assert_array_equal(
                    optimizer.slot_values()[name][own], expected[f"{name}/{other}"]
                )


@pytest.mark.parametrize(
    "path", ["serving_sgd", "serving_sgd/ckpt-1", "serving_sgd/ckpt-1.index"]
)
def test_paths_of_a_checkpoint(path):
    assert sorted(open_tables(FILES / path).tables) == ["a", "deep/b.c"]


def test_a_directory_that_was_moved(tmp_path):
    shutil.copytree(FILES / "serving_sgd", tmp_path / "moved")
    (tmp_path / "moved" / "checkpoint").write_text(
        'model_checkpoint_path: "/gone/ckpt-1"\n'
    )
    assert sorted(open_tables(tmp_path / "moved").tables) == ["a", "deep/b.c"]
    (tmp_path / "moved" / "ckpt-1.index").unlink()
    with pytest.raises(CheckpointError, match="any matching files for .*ckpt-1"):
        open_tables(tmp_path / "moved")


def test_a_saved_model():
    source = open_tables(FILES / "saved_model")
    assert {n: t.values.shape for n, t in source.tables.items()} == {
        "a": (20, 4),
        "b": (7, 4),
    }


def test_several_data_files_and_slices():
    arrays = TensorFlowReader(FILES / "two_files" / "model").arrays()
    expected = {
        "a": values("a", (6, 2), np.float16),
        "b": values("b", (9, 2)),
        "sliced": values("sliced", (100, 3)),
    }
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(arrays[name]), array)
    for start, size in ((0, 100), (39, 3), (40, 1), (41, 59), (7, 0)):
        np.testing.assert_array_equal(
            arrays["sliced"].read(start, size), expected["sliced"][start : start + size]
        )


def test_an_array_is_read_once_for_all_of_its_blocks(monkeypatch):
    keys = []
    read = TensorFlowReader.read

    def count(self, key):
        keys.append(key)
        return read(self, key)

    monkeypatch.setattr(TensorFlowReader, "read", count)
    arrays = TensorFlowReader(FILES / "two_files" / "model").arrays()
    assert not keys
    for name in ("sliced", "b"):
        arrays[name].check()
        for start in range(0, 9, 3):
            arrays[name].read(start, 3)
    assert keys == ["sliced", "b"]


def test_a_checkpoint_without_tables(tmp_path):
    tf.train.Checkpoint(bias=tf.Variable([1.0, 2.0])).save(tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match="has no tables: no variables of two"):
        open_tables(tmp_path)


def copy(tmp_path, name):
    shutil.copytree(FILES / name, tmp_path / name)
    (data,) = (tmp_path / name).glob("*.data-*")
    return tmp_path / name, data


def test_a_flipped_bit_leaves_the_model(tmp_path):
    path, file = copy(tmp_path, "serving_adagrad")
    layer = make_layer(rule=te.optimizers.adagrad(0.1))
    optimizer = te.Optimizer(layer, optax.sgd(0.1))
    before = layer.embedding_tables()
    data = file.read_bytes()
    for name in ("a", "a/accumulators", "deep/b.c", "deep/b.c/accumulators"):
        damaged = bytearray(data)
        shape = SHAPES[name.removesuffix("/accumulators")]
        damaged[data.index(values(name, shape).tobytes()) + 37] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="serving_adagrad/ckpt-1: .*hecksum"):
            import_tables(path, layer, optimizer)
    for name, table in layer.embedding_tables().items():
        np.testing.assert_array_equal(table, before[name])


@pytest.mark.parametrize("name", ["serving_sgd", "sparse_core_two_same"])
def test_missing_and_truncated_data_files(tmp_path, name):
    path, file = copy(tmp_path, name)
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(CheckpointError, match="TensorFlow cannot read .*ckpt-1"):
        for table in open_tables(path).tables.values():
            table.values.check()
    file.unlink()
    with pytest.raises(CheckpointError, match="TensorFlow cannot read .*ckpt-1"):
        for table in open_tables(path).tables.values():
            table.values.check()


@pytest.mark.parametrize("size", [0, 20, 47, 100])
def test_truncated_index(tmp_path, size):
    path, _ = copy(tmp_path, "serving_sgd")
    index = path / "ckpt-1.index"
    index.write_bytes(index.read_bytes()[:size])
    with pytest.raises(CheckpointError, match="TensorFlow cannot read .*ckpt-1"):
        open_tables(path)


def test_layouts_that_no_one_can_read():
    with pytest.raises(CheckpointError, match="^model: the layouts of its stacks"):
        tensorflow._layouts(b"\xff", "model")
