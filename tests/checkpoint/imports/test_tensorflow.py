"""TensorFlow checkpoints, which TensorFlow and TFRS wrote and TensorFlow reads."""

import json
import pathlib
import shutil

import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.checkpoint.imports.fixtures.values import values
from tests.checkpoint.imports.test_importing import SHAPES
from tests.checkpoint.states import make_layer
from tests.rejections import rejects
from tpu_embedding.checkpoint.imports.importing import import_tables
from tpu_embedding.checkpoint.imports.opening import open_stacked_tables, open_tables
from tpu_embedding.checkpoint.records import CheckpointError

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
    found = source.arrays
    assert found.keys() >= expected.keys()  # Dense layers count as tables.
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(found[name]), array)


@pytest.mark.parametrize("rule", SLOTS)
def test_tables_of_tpu_embedding(rule):
    expected = {
        array: values(array, shape)
        for name, shape in SHAPES.items()
        for array in (name, *(f"{name}/{slot}" for slot in SLOTS[rule]))
    }
    assert_arrays(open_tables(FILES / f"serving_{rule}"), expected)


@pytest.mark.parametrize("rule", ["adam", "adagrad", "ftrl"])
def test_tables_of_tfrs(rule):
    with np.load(FILES / f"tfrs_{rule}" / "expected.npz") as arrays:
        assert_arrays(open_tables(FILES / f"tfrs_{rule}"), dict(arrays))


STACKS = {
    "two_same": (8, {"a_b": ["a", "b"]}),
    "padded": (4, {"t0_t2": ["t0", "t2"], "t1": ["t1"]}),
}


@pytest.mark.parametrize("name", STACKS)
def test_stacks_of_sparse_core(name):
    path = FILES / f"sparse_core_{name}"
    shapes = json.loads((path / "tables.json").read_text())
    num_sparse_cores, stacks = STACKS[name]
    configs = [
        te.TableConfig(vocabulary_size=rows, dim=dim, name=table)
        for table, (rows, dim) in shapes.items()
    ]
    source = open_stacked_tables(
        path, configs, stacks=stacks, num_sparse_cores=num_sparse_cores, rotation=4
    )
    expected = {
        array: values(array, shape)
        for table, shape in shapes.items()
        for array in (table, f"{table}/accumulators")
    }
    assert_arrays(source, expected)


TFRS = {"a": (20, 4), "b": (7, 4)}
IMPORTS = {
    "serving_adagrad_momentum": (SHAPES, te.optimizers.adagrad_momentum(0.1), {}),
    "serving_adam": (SHAPES, te.optimizers.adam(0.1), {}),
    "tfrs_adam": (TFRS, te.optimizers.adam(0.1), {"momenta": "m", "velocities": "v"}),
    "tfrs_ftrl": (
        *(TFRS, te.optimizers.ftrl(0.1)),
        {"accumulators": "accumulator", "linears": "linear"},
    ),
}


@pytest.mark.parametrize("file", IMPORTS)
def test_import_into_a_layer(file):
    shapes, rule, slots = IMPORTS[file]
    layer = make_layer(shapes, rule)
    optimizer = te.Optimizer(layer, optax.sgd(0.1))
    source = open_tables(FILES / file)
    arrays = source.arrays
    rename = {f"{x}/{own}": f"{x}/{slots[own]}" for x in shapes for own in slots}
    report = import_tables(source, layer, optimizer, rename=rename)
    assert (report.dropped, report.kept) == ((), ())
    for name, table in layer.embedding_tables().items():
        np.testing.assert_array_equal(table, arrays[name])
        for own, values_of_slot in optimizer.slot_values()[name].items():
            array = arrays[report.slots[name][own]]
            np.testing.assert_array_equal(values_of_slot, array)


PATHS = {
    "serving_sgd": SHAPES,
    "serving_sgd/ckpt-1": SHAPES,
    "serving_sgd/ckpt-1.index": SHAPES,
    "saved_model": TFRS,
}


@pytest.mark.parametrize("path", PATHS)
def test_paths_of_a_checkpoint(path):
    tables = open_tables(FILES / path).tables
    assert {name: table.values.shape for name, table in tables.items()} == PATHS[path]


def test_a_directory_that_was_moved(tmp_path):
    shutil.copytree(FILES / "serving_sgd", tmp_path / "moved")
    (tmp_path / "moved" / "checkpoint").write_text(
        'model_checkpoint_path: "/gone/ckpt-1"\n'
    )
    assert sorted(open_tables(tmp_path / "moved").tables) == ["a", "deep/b.c"]
    index = tmp_path / "moved" / "ckpt-1.index"
    for damaged in (index.read_bytes()[:47], b"", None):
        index.unlink() if damaged is None else index.write_bytes(damaged)
        with rejects(CheckpointError, fix="ckpt-1"):
            open_tables(tmp_path / "moved")


def copy(tmp_path, name):
    shutil.copytree(FILES / name, tmp_path / name)
    (data,) = (tmp_path / name).glob("*.data-*")
    return tmp_path / name, data


def test_a_flipped_bit_leaves_the_model(tmp_path):
    path, file = copy(tmp_path, "serving_adagrad")
    layer = make_layer(SHAPES, te.optimizers.adagrad(0.1))
    optimizer = te.Optimizer(layer, optax.sgd(0.1))
    before = layer.embedding_tables()
    data = file.read_bytes()
    for name in ("a", "deep/b.c/accumulators"):
        damaged = bytearray(data)
        shape = SHAPES[name.removesuffix("/accumulators")]
        damaged[data.index(values(name, shape).tobytes()) + 37] ^= 1
        file.write_bytes(damaged)
        with rejects(CheckpointError, fix="hecksum"):
            import_tables(path, layer, optimizer)
    for name, table in layer.embedding_tables().items():
        np.testing.assert_array_equal(table, before[name])
