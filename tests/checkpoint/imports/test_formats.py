"""Formats of other libraries, beside files that these libraries wrote."""

import json
import pathlib

import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

import tpu_embedding as te
from tests.checkpoint.imports.fixtures.values import values
from tests.rejections import rejects
from tpu_embedding.checkpoint.imports.opening import open_stacked_tables, open_tables
from tpu_embedding.checkpoint.records import CheckpointError

FILES = pathlib.Path(__file__).parent / "fixtures"


def arrays_in(directory):
    arrays = {name: values(name, (20, 4)) for name in ("movie", "movie/m")}
    (directory / "deep").mkdir()
    safetensors.numpy.save_file(arrays, directory / "deep" / "some.safetensors")
    safetensors.numpy.save_file(
        {"user": values("user", (7, 2))}, directory / "more.safetensors"
    )
    return directory


def npz_in(directory):
    arrays = {"movie": (20, 4), "movie/m": (20, 4), "user": (7, 2)}
    np.savez(directory / "a.npz", **{k: values(k, x) for k, x in arrays.items()})
    return np.load(directory / "a.npz")


def orbax_in(directory):
    tree = {"movie": values("movie", (20, 4)), "user": values("user", (7, 2))}
    tree["bias"] = np.float32(3)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "step" / "item", tree)
    return directory / "step"


@pytest.mark.parametrize("write", [arrays_in, npz_in, orbax_in])
def test_arrays_by_name(tmp_path, write):
    source = open_tables(write(tmp_path))
    assert source.tables.keys() == {"movie", "user"}
    for name, table in source.tables.items():
        expected = values(name, table.values.shape)
        np.testing.assert_array_equal(np.asarray(table.values), expected)
        np.testing.assert_array_equal(table.values.read(3, 2), expected[3:5])
    if write is not orbax_in:
        assert source.tables["movie"].slots.keys() == {"m"}


UNREADABLE = {
    "nothing": lambda path: None,
    "unknown": lambda path: path.write_text("x"),
    "directory": lambda path: path.mkdir(),
    ".npz": lambda path: path.write_bytes(b"PK"),
    ".safetensors": lambda path: path.write_bytes(b"\1" * 9),
    ".pt": lambda path: path.touch(),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_cannot_be_read(tmp_path, kind):
    path = tmp_path / f"file{kind if kind.startswith('.') else ''}"
    UNREADABLE[kind](path)
    with rejects(CheckpointError, fix=f"{path}"):
        open_tables(path)


@pytest.mark.parametrize("rule", ["rowwise_adagrad", "adagrad"])
def test_a_file_of_torchrec(rule):
    source = open_tables(FILES / "torchrec" / f"{rule}.safetensors")
    assert source.origin.startswith("TorchRec state dict")
    shapes = {"t1": (20, 4), "t2": (7, 8)}
    assert source.tables.keys() == shapes.keys()
    for name, shape in shapes.items():
        table = source.tables[name]
        # One row was trained before the file was saved.
        changed = (np.asarray(table.values) != values(name, shape)).any(axis=1)
        assert changed.sum() <= 2
        is_rowwise = rule != "adagrad"
        assert table.slots["momentum1"].shape == (shape[:1] if is_rowwise else shape)


def test_names_of_torchrec():
    arrays = {
        "a.embedding_bags.t.weight": np.ones((5, 2)),
        "b.embedding_bags.t.weight": np.ones((6, 2)),
        "b.embedding_bags.t.momentum1": np.ones((6, 1)),
        "a.embedding_bags.t.momentum1": np.ones(5),
        "module.ec.embeddings.t2.weight": np.ones((6, 2)),
        "t2.momentum1": np.ones((6, 2)),
        "t2.momentum2": np.ones((6, 2)),
        "over.linear.weight": np.ones((6, 2)),
    }
    tables = open_tables(arrays).tables
    both = {f"{x}.embedding_bags.t.weight" for x in "ab"}
    assert tables.keys() == both | {"t2"}
    for key in both:
        assert tables[key].slots["momentum1"].shape == arrays[key].shape[:1]
    assert tables["t2"].slots.keys() == {"momentum1", "momentum2"}


SHAPES = {"a": (100, 8), "b": (37, 6), "c": (5, 16)}
CONFIGS = [
    te.TableConfig(vocabulary_size=rows, dim=dim, name=name)
    for name, (rows, dim) in SHAPES.items()
]
STACKS = {"a_b": ["a", "b"], "c": ["c"]}
STACKED = {
    "jax_tpu_embedding/adagrad": (8, 4, ["accumulator"]),
    "jax_tpu_embedding/adam": (8, 4, ["momentum", "velocity"]),
    "keras_rs/stacked": (4, 2, ["accumulator"]),
}


@pytest.mark.parametrize("file", STACKED)
def test_stacks_of_sparse_cores(unpacked, file):
    num_sparse_cores, rotation, slots = STACKED[file]
    source = open_stacked_tables(
        unpacked(file),
        CONFIGS,
        stacks=STACKS,
        num_sparse_cores=num_sparse_cores,
        rotation=rotation,
    )
    for name, shape in SHAPES.items():
        table = source.tables[name]
        table.values.check()
        np.testing.assert_array_equal(np.asarray(table.values), values(name, shape))
        assert sorted(table.slots) == slots
        for slot in slots:
            expected = values(f"{name}/{slot}", shape)
            np.testing.assert_array_equal(np.asarray(table.slots[slot]), expected)


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"num_sparse_cores": 16}, "a_b", [192, 8]),
        ({"tables": CONFIGS[:1]}, "stacks", "a_b"),
        ({"stacks": {"x": ["a"]}}, "stacks", "x"),
        ({"stacks": {"a_b": ["a"]}}, "a_b", [192, 8]),
    ],
)
def test_stacks_that_do_not_fit(unpacked, change, field, value):
    options = {
        "tables": CONFIGS,
        "stacks": STACKS,
        "num_sparse_cores": 4,
        "rotation": 2,
    }
    with rejects(CheckpointError, field=field, value=value):
        open_stacked_tables(unpacked("keras_rs/stacked"), **(options | change))


def test_damaged_checkpoints_of_orbax(tmp_path):
    path = orbax_in(tmp_path)
    for file in (path / "item").rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with rejects(CheckpointError, fix="item"):
        open_tables(path).tables["movie"].values.check()
    (path / "item" / "_METADATA").write_text('{"tree_metadata": 3}')
    with rejects(CheckpointError, fix="_METADATA"):
        open_tables(path)


def test_an_array_of_orbax_that_declares_huge_chunks(tmp_path):
    """A read of one row would take 16 GB for a file of a few bytes."""
    key = {"key": "movie", "key_type": 2}
    leaf = {"key_metadata": [key], "value_metadata": {"value_type": "jax.Array"}}
    metadata = {"tree_metadata": {"('movie',)": leaf}}
    (tmp_path / "_METADATA").write_text(json.dumps(metadata))
    array = {"zarr_format": 2, "shape": [2**40, 4], "chunks": [2**30, 4]}
    array |= {"dtype": "<f4", "compressor": None, "fill_value": 0, "order": "C"}
    array |= {"filters": None, "dimension_separator": "."}
    (tmp_path / "movie").mkdir()
    (tmp_path / "movie" / ".zarray").write_text(json.dumps(array))
    with rejects(CheckpointError, fix="(1073741824, 4)"):
        open_tables(tmp_path)
