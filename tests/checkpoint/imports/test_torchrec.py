"""State dicts of TorchRec, beside files that TorchRec wrote."""

import pathlib

import numpy as np
import pytest

from tests.checkpoint.imports.fixtures.values import values
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
