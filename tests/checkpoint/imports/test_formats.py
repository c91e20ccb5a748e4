"""Formats of other libraries, beside files that these libraries wrote."""

import json
import pathlib
import shutil

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


def unpacked(name, directory):
    shutil.unpack_archive(FILES / f"{name}.zip", directory)
    return directory


SAVED = {"movie": (20, 4), "movie/m": (20, 4), "user": (7, 2)}
SAVED = {name: values(name, shape) for name, shape in SAVED.items()}


def safetensors_in(directory):
    (directory / "deep").mkdir()
    for path, name in (("deep/some", "movie"), ("more", "user")):
        arrays = {key: x for key, x in SAVED.items() if key.startswith(name)}
        safetensors.numpy.save_file(arrays, directory / f"{path}.safetensors")
    return directory


def npz_in(directory):
    np.savez(directory / "a.npz", **SAVED)
    return np.load(directory / "a.npz")


def orbax_in(directory):
    tree = {name: SAVED[name] for name in ("movie", "user")} | {"bias": np.float32(3)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory / "step" / "item", tree)
    return directory / "step"


@pytest.mark.parametrize("write", [safetensors_in, npz_in, orbax_in])
def test_arrays_by_name(tmp_path, write):
    source = open_tables(write(tmp_path))
    assert source.tables.keys() == {"movie", "user"}
    slots = [] if write is orbax_in else ["m"]
    assert list(source.tables["movie"].slots) == slots
    for name, array in source.arrays.items():
        np.testing.assert_array_equal(np.asarray(array), SAVED[name])
        np.testing.assert_array_equal(array.read(3, 2), SAVED[name][3:5])


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
def test_stacks_of_sparse_cores(file, tmp_path):
    num_sparse_cores, rotation, slots = STACKED[file]
    options = {"num_sparse_cores": num_sparse_cores, "rotation": rotation}
    source = open_stacked_tables(
        unpacked(file, tmp_path), CONFIGS, stacks=STACKS, **options
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
def test_stacks_that_do_not_fit(change, field, value, tmp_path):
    options = {
        "tables": CONFIGS,
        "stacks": STACKS,
        "num_sparse_cores": 4,
        "rotation": 2,
    }
    with rejects(CheckpointError, field=field, value=value):
        open_stacked_tables(
            unpacked("keras_rs/stacked", tmp_path), **(options | change)
        )


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
