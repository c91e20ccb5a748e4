"""TensorFlow checkpoints, beside those that TensorFlow and TFRS wrote."""

import json
import pathlib
import shutil

import numpy as np
import pytest

from tests.checkpoint.imports.fixtures.values import values
from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.opening import open_tables

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
    with pytest.raises(CheckpointError, match="ckpt-1.index"):
        open_tables(tmp_path / "moved")


def test_a_saved_model():
    source = open_tables(FILES / "saved_model", "tensorflow")
    assert {n: t.values.shape for n, t in source.tables.items()} == {
        "a": (20, 4),
        "b": (7, 4),
    }


def test_a_stack_that_is_missing(tmp_path):
    name = "sparse_core_two_same"
    shutil.copytree(FILES / name, tmp_path / name)
    prefix = tmp_path / name / "ckpt-1"
    (file,) = prefix.parent.glob("*.data-*")
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="is truncated"):
        open_tables(prefix)


def test_a_checkpoint_without_tables(tmp_path):
    for file in (FILES / "serving_sgd").glob("ckpt-1*"):
        shutil.copy(file, tmp_path)
    index = tmp_path / "ckpt-1.index"
    index.write_bytes(index.read_bytes()[:20])
    with pytest.raises(CheckpointError, match="index cannot be read"):
        open_tables(tmp_path / "ckpt-1")
