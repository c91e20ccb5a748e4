"""Tests the reader of Parquet files against the rows that were written."""

import dataclasses
import sys

import jax
import numpy as np
import pytest

from tests.rejections import rejects
from tests.tiers import each_once
from tests.tools.data.damage import cut, flip, samples_of_steps
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.train import ParquetFeature, ParquetSource
from tpu_embedding.types import PADDING_ROW_ID

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

SOURCE = ParquetSource(
    features=(
        ParquetFeature(name="user", vocabulary_size=1000, column="uid"),
        ParquetFeature(name="watched", vocabulary_size=50, expected_valence=2),
    ),
    label="row",
    dense=("age", "hour"),
    weight="weight",
    num_evaluation_samples=20,
    num_streams=3,
)


def rows_of(start, stop):
    return [
        {
            "uid": row * 7 % 1000,
            "watched": None if row % 5 == 0 else list(range(row % 4)),
            "age": row / 2,
            "hour": row % 24,
            "weight": 1 + row % 2,
            "row": row,
            "unused": "text",
        }
        for row in range(start, stop)
    ]


def write(path, rows, rows_per_group=16, **options):
    table = pa.Table.from_pylist(rows)
    for name in ("uid", "hour", "row"):
        if pa.types.is_integer(table.schema.field(name).type):
            index = table.schema.names.index(name)
            table = table.set_column(index, name, table[name].cast(pa.int32()))
    pq.write_table(table, path, row_group_size=rows_per_group, **options)
    return path


@pytest.fixture
def directory(tmp_path):
    write(tmp_path / "a.parquet", rows_of(0, 70))
    write(tmp_path / "b.parquet", rows_of(70, 120), 50)
    return tmp_path


def open_source(directory, batch_size=10, seed=0, **changes):
    source = dataclasses.replace(SOURCE, **changes)
    return source.open(directory, batch_size=batch_size, seed=seed)


def check_rows(batch):
    rows = batch.labels.astype(int)
    expected = [rows_of(row, row + 1)[0] for row in rows]
    assert batch.features["user"].tolist() == [row["uid"] for row in expected]
    assert batch.features["user"].dtype == np.int32
    lists = [row["watched"] or [] for row in expected]
    watched = batch.features["watched"]
    assert watched.values.tolist() == sum(lists, [])
    assert np.diff(watched.row_splits).tolist() == [len(ids) for ids in lists]
    dense = [[row["age"], row["hour"]] for row in expected]
    np.testing.assert_array_equal(batch.dense, np.array(dense, np.float32))
    assert batch.labels.dtype == batch.dense.dtype == np.float32
    return rows, expected


def test_an_epoch_has_each_row_once(directory):
    data = open_source(directory)
    assert (data.num_train_samples, data.num_dense) == (100, 2)
    for step in range(10):
        batch = data.train_batch(step)
        _, expected = check_rows(batch)
        assert batch.weights.tolist() == [row["weight"] for row in expected]
    first, second = samples_of_steps(data, 20).reshape(2, 100)
    assert sorted(first) == sorted(second) == list(range(100))
    assert first.tolist() != second.tolist()
    held_out = list(data.evaluation_batches())
    assert np.concatenate([b.labels for b in held_out]).tolist() == [*range(100, 120)]
    check_rows(held_out[0])


def test_evaluation_files(directory):
    changes = {"evaluation_files": "b*.parquet", "num_evaluation_samples": None}
    data = open_source(directory, **changes)
    assert (data.num_train_samples, data.num_evaluation_samples) == (70, 50)
    with rejects(DataError, fix="evaluation_files="):
        open_source(directory, files="b*", **changes)
    with rejects(DataError, fix="'c*'"):
        open_source(directory, files="c*")


def test_outline_has_the_shapes_of_the_data(directory):
    outline = SOURCE.outline(batch_size=10, seed=0)
    data = open_source(directory)
    assert outline.vocabulary_sizes == data.vocabulary_sizes
    one, other = outline.train_batch(0), data.train_batch(0)
    assert len(one.features["watched"].values) == 20
    assert one.dense.shape == other.dense.shape
    assert jax.tree.structure(one) == jax.tree.structure(other)


def open_ids(path, arrays, rows_per_group, valence=None, **options):
    """Opens files of an array each, as the ids of a feature."""
    for name, array in arrays.items():
        table = pa.table({"row": range(len(array)), "uid": array})
        file = path / f"{name}.parquet"
        pq.write_table(table, file, row_group_size=rows_per_group)
    feature = ParquetFeature(name="uid", expected_valence=valence, **options)
    changes = {"features": (feature,), "dense": (), "weight": None}
    return open_source(path, 4, num_evaluation_samples=4, **changes)


def test_lists_of_a_fixed_size_are_a_matrix_with_padding_for_nulls(tmp_path):
    lists = [None if row % 20 == 3 else [row, row + 1] for row in range(60)]
    array = pa.array(lists, pa.list_(pa.int16(), 2))
    data = open_ids(tmp_path, {"a": array}, 8, 2, vocabulary_size=80)
    for step in range(14):
        batch = data.train_batch(step)
        expected = [lists[int(row)] or [PADDING_ROW_ID] * 2 for row in batch.labels]
        assert batch.features["uid"].tolist() == expected
        assert batch.features["uid"].dtype == np.int32


@pytest.mark.parametrize("kind", ["int", "uint"])
@pytest.mark.parametrize(
    ("bits", "mode", "valence"),
    each_once([8, 16, 32, 64], ["modulo", "keep"], [None, 1]),
)
def test_ids_of_every_width(tmp_path, bits, kind, mode, valence):
    limits, size = np.iinfo(f"{kind}{bits}"), 50_000
    ids = [5, 6, int(limits.min), int(limits.max), 7, 8, int(limits.max) - 1, 100]
    if bits == 64:
        ids[4] = 2**53 + 1
    array_type = getattr(pa, f"{kind}{bits}")()
    values = [[x] for x in ids] if valence else ids
    array = pa.array(values, pa.list_(array_type) if valence else array_type)
    options = {"vocabulary_size": size, "out_of_range": mode}
    data = open_ids(tmp_path, {"a": array}, 2, valence, **options)
    (held_out,) = data.evaluation_batches()
    for batch in (data.train_batch(0), data.train_batch(1), held_out):
        found = batch.features["uid"]
        found = found.values if valence else found
        expected = [ids[int(row)] for row in batch.labels]
        if mode == "modulo":
            expected = [x % size for x in expected]
        assert found.tolist() == expected
        wide = np.uint64 if limits.max == 2**64 - 1 else np.int64
        assert found.dtype == (np.int32 if mode == "modulo" else wide)


INT = pa.int64()


@pytest.mark.parametrize(
    "types",
    [
        (INT, pa.uint64()),
        (pa.list_(INT), pa.list_(pa.uint64())),
        (pa.list_(INT), pa.list_(INT, 1)),
        (pa.list_(INT, 1), pa.list_(INT, 2)),
    ],
    ids=["ids", "lists", "sizes", "fixed sizes"],
)
def test_a_column_of_two_types(tmp_path, types):
    arrays = {}
    for name, array_type in zip("ab", types, strict=True):
        valence = 1 if hasattr(array_type, "value_type") else None
        ids = [1] * getattr(array_type, "list_size", 1) if valence else 1
        arrays[name] = pa.array([ids] * 20, array_type)
    options = {"vocabulary_size": 9, "out_of_range": "keep"}
    data = open_ids(tmp_path, arrays, 20, valence, **options)
    with rejects(DataError, field="column 'uid'"):
        samples_of_steps(data, 4)


# A value of row 21, or of all rows.
BAD = {
    "null": (21, "uid", None),
    "null_in_a_list": (21, "watched", [1, None]),
    "null_number": (21, "age", None),
    "outside": (21, "uid", 1000),
    "outside_in_a_list": (21, "watched", [3, -1]),
    "text": (None, "uid", "a"),
    "list_of_ids": (None, "uid", [1]),
    "ids_without_list": (None, "watched", 1),
    "text_as_number": (None, "age", "a"),
}


@pytest.mark.parametrize(("row", "column", "value"), BAD.values(), ids=BAD)
def test_a_wrong_value_names_its_row(tmp_path, row, column, value):
    rows = rows_of(0, 40)
    for wrong in rows if row is None else [rows[row]]:
        wrong[column] = value
    data = open_source(write(tmp_path / "a.parquet", rows))
    place = "a.parquet, row " if row is None else "a.parquet, row 21 (row group 1),"
    with rejects(DataError, field=f"column '{column}'", fix=place):
        samples_of_steps(data, 2)


def test_damaged_files(directory, tmp_path):
    for path, changes, name in (
        (directory, {"dense": ("price",)}, "'price'"),
        (None, {}, "--data-dir"),
        (tmp_path / "absent", {}, "absent"),
    ):
        with rejects(DataError, fix=name):
            open_source(path, **changes)
    empty = write(tmp_path / "empty", rows_of(0, 9))
    pq.write_table(pq.read_table(empty).slice(0, 0), empty)
    with rejects(DataError, fix=str(empty)):
        open_source(empty)
    path = write(tmp_path / "c", rows_of(0, 40), write_page_checksum=True)
    flip(path, 20)
    data = open_source(path)
    with rejects(DataError, fix=f"{path}, row group 0"):
        samples_of_steps(data, 4)
    cut(path, 100)
    with rejects(DataError, fix=str(path)):
        open_source(path)


def test_missing_pyarrow_names_the_extra(directory, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with rejects(DataError, fix=".[parquet]"):
        open_source(directory)
