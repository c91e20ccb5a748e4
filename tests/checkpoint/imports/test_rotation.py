"""The rotation of stacked tables is found, or said to be an assumption."""

import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import tpu_embedding as te
from tests.checkpoint.imports.test_stacked_orbax import CONFIGS, assert_arrays
from tests.tiers import quick_cases
from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports import import_tables
from tpu_embedding.checkpoint.imports.sparse_core import stack_in_order
from tpu_embedding.checkpoint.imports.stacked_orbax import open_stacked_tables

RECORDED = {
    "keras_rs/stacked": (".", 4, 2),
    "jax_tpu_embedding/adagrad": ("7/model", 8, 4),
}
"""Checkpoints of the libraries, with their SparseCores, and those per device."""


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_checkpoints(unpacked, name):
    place, num_cores, per_device = RECORDED[name]
    path = unpacked(name) / place
    options = {"tables": CONFIGS, "num_sparse_cores": num_cores}
    assert_arrays(open_stacked_tables(path, **options), ["accumulator"])
    for wrong in {1, 2, 4, 8} - {per_device}:
        message = (
            f"tables .*'b'.* contradict .*Give sparse_cores_per_device={per_device}"
        )
        if num_cores % wrong:
            message = "must divide num_sparse_cores"
        with pytest.raises(CheckpointError, match=message):
            open_stacked_tables(path, **options, sparse_cores_per_device=wrong)


def write_stack(path, tables, num_cores, per_device, padding):
    """Writes a stack as SparseCores hold it; returns its tables."""
    places = stack_in_order(
        "_".join(table.name for table in tables),
        tables,
        num_sparse_cores=num_cores,
        sparse_cores_per_device=per_device,
    )
    random = np.random.default_rng(0)
    end = places[-1].row_offset - (-places[-1].vocabulary_size // (8 * num_cores)) * 8
    stack = {
        "nan": np.full((num_cores, end, 4), np.nan, np.float32),
        "zeros": np.zeros((num_cores, end, 4), np.float32),
        "random": random.normal(size=(num_cores, end, 4)).astype(np.float32),
    }[padding]
    values = {}
    for place in places:
        rows = random.normal(size=(place.vocabulary_size, 4)).astype(np.float32)
        for row, numbers in enumerate(rows):
            shard, position = (row + place.rotation) % num_cores, row // num_cores
            stack[shard, place.row_offset + position] = numbers
        values[place.name] = rows
    with ocp.StandardCheckpointer() as checkpointer:
        name = f"var:{places[0].stack_name}:table"
        checkpointer.save(path, {name: stack.reshape(-1, 4)})
    return values


SIZES = {"one row less": 63, "shards are full": 64, "a row more": 65, "few": 3}


@pytest.mark.parametrize("padding", ["nan", "zeros", "random"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("per_device", quick_cases([1, 2, 4, 8], "4"))
def test_no_wrong_rows_without_a_word(tmp_path, per_device, size, padding):
    tables = [
        te.TableConfig(vocabulary_size=rows, dim=4, name=name)
        for name, rows in (("a", 64), ("b", size))
    ]
    wanted = write_stack(tmp_path / "ck", tables, 8, per_device, padding)
    can_tell = size % 8 and padding != "random"
    if can_tell:
        given = [None]
    else:
        with pytest.raises(CheckpointError, match="Give that of the TPU that trained"):
            open_stacked_tables(tmp_path / "ck", tables, num_sparse_cores=8)
        given = []
    for cores in (*given, 1, 2, 4, 8):
        try:
            source = open_stacked_tables(
                tmp_path / "ck",
                tables,
                num_sparse_cores=8,
                sparse_cores_per_device=cores,
            )
        except CheckpointError as error:
            assert can_tell and cores != per_device, error
            continue
        is_right = all(
            np.array_equal(np.asarray(source.tables[name].values), rows)
            for name, rows in wanted.items()
        )
        assert is_right or "b" in source.assumed
        assert bool(source.assumed) == (not can_tell)


@pytest.mark.full
def test_the_report_shows_three_rows(tmp_path):
    tables = [
        te.TableConfig(vocabulary_size=64, dim=4, name=name) for name in ("a", "b")
    ]
    wanted = write_stack(tmp_path / "ck", tables, 8, 4, "nan")
    source = open_stacked_tables(
        tmp_path / "ck", tables, num_sparse_cores=8, sparse_cores_per_device=2
    )
    layer = te.TPUEmbedding(
        [te.FeatureConfig(table=table) for table in tables], rngs=nnx.Rngs(0)
    )
    text = str(import_tables(source, layer))
    assert "as sparse_cores_per_device=2 says" in text
    assert text.count("Assumed, as nothing in the source tells:") == 1
    rows = layer.embedding_tables()["b"]
    for row in (0, 32, 63):
        assert f"row {row}: [{rows[row, 0]:.6g}, {rows[row, 1]:.6g}" in text
        assert not np.array_equal(rows[row], wanted["b"][row])


def test_one_table_per_stack_has_no_rotation(tmp_path):
    tables = [te.TableConfig(vocabulary_size=64, dim=4, name="a")]
    wanted = write_stack(tmp_path / "ck", tables, 8, 4, "random")
    source = open_stacked_tables(tmp_path / "ck", tables, num_sparse_cores=8)
    assert not source.assumed
    np.testing.assert_array_equal(np.asarray(source.tables["a"].values), wanted["a"])


def test_no_sparse_core(tmp_path):
    table = te.TableConfig(vocabulary_size=64, dim=4, name="a")
    write_stack(tmp_path / "ck", [table], 8, 4, "nan")
    with pytest.raises(ValueError, match="num_sparse_cores must be at least 1"):
        open_stacked_tables(tmp_path / "ck", [table], num_sparse_cores=0)
