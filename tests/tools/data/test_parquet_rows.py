"""Tests the reader of Parquet files against their rows, and damaged files."""

import dataclasses
import pickle
import re
import sys

import numpy as np
import pytest

from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.pyarrow_modules import MissingPyarrowError
from tpu_embedding.tools.train import ParquetFeature, ParquetSource

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

SOURCE = ParquetSource(
    features=(
        ParquetFeature(name="user", vocabulary_size=100, column="user id"),
        ParquetFeature(name="seen", vocabulary_size=1000, expected_valence=1.5),
    ),
    label="click",
    dense=("age", "row"),
    weight="weight",
    num_evaluation_samples=5,
    num_streams=2,
)
LISTS = {0: [], 1: [7, 7], 2: None, 3: [999], 4: [1, 2, 3]}


def row(number):
    """Returns the columns of a row; each column has a type of its own."""
    return {
        "user id": number % 100,
        "seen": LISTS[number % 5],
        "click": number % 2 == 0,
        "age": number / 7,
        "row": number,
        "weight": 1 + number % 3,
        "unread": f"text {number}",
    }


TYPES = {
    "user id": pa.uint8(),
    "seen": pa.large_list(pa.int16()),
    "click": pa.bool_(),
    "age": pa.float64(),
    "row": pa.int64(),
    "weight": pa.int8(),
    "unread": pa.string(),
}


def write(path, numbers, changes=None, types=None, rows_per_group=4):
    """Writes rows; `changes` maps (row, column) to another value."""
    rows = [row(number) for number in numbers]
    for (number, column), value in (changes or {}).items():
        rows[list(numbers).index(number)][column] = value
    schema = pa.schema(list((TYPES | (types or {})).items()))
    table = pa.Table.from_pylist(rows, schema)
    pq.write_table(table, path, row_group_size=rows_per_group, write_page_checksum=True)
    return path


def open_source(directory, **changes):
    source = dataclasses.replace(SOURCE, **changes)
    return source.open(directory, batch_size=6, seed=3)


def rows_of(batch):
    return np.rint(batch.dense[:, 1]).astype(int).tolist()


def check_batch(batch):
    """Asserts that the batch has the values of the rows that it names."""
    seen = batch.features["seen"]
    for sample, number in enumerate(rows_of(batch)):
        expected = row(number)
        first, end = seen.row_splits[sample : sample + 2]
        assert seen.values[first:end].tolist() == (expected["seen"] or [])
        assert batch.features["user"][sample] == expected["user id"]
        assert batch.labels[sample] == expected["click"]
        assert batch.dense[sample, 0] == np.float32(expected["age"])
        assert batch.weights[sample] in (expected["weight"], 0)
    assert {a.dtype for a in (batch.dense, batch.labels, batch.weights)} == {
        np.dtype(np.float32)
    }
    assert seen.values.dtype == batch.features["user"].dtype == np.int32


def test_rows_of_several_files(tmp_path):
    write(tmp_path / "b.parquet", range(11, 30), rows_per_group=7)
    write(tmp_path / "a.parquet", range(11))
    write(tmp_path / "empty.parquet", range(0))
    (tmp_path / "readme.txt").write_text("no Parquet file")
    data = open_source(tmp_path)
    assert (data.num_train_samples, data.num_evaluation_samples) == (25, 5)
    assert data.vocabulary_sizes == {"user": 100, "seen": 1000}
    seen = []
    for step in range(25):
        batch = data.train_batch(step)
        check_batch(batch)
        seen += rows_of(batch)
        place = batch.origin(2)
        number = rows_of(batch)[2]
        name, first = ("a", 0) if number < 11 else ("b", 11)
        assert place == f"{tmp_path / name}.parquet, row {number - first}"
    for epoch in range(6):
        assert sorted(seen[25 * epoch : 25 * (epoch + 1)]) == list(range(25))
    (batch,) = data.evaluation_batches()
    check_batch(batch)
    assert rows_of(batch) == [25, 26, 27, 28, 29, 29]
    assert batch.weights.tolist() == [2, 3, 1, 2, 3, 0]
    part = pickle.loads(pickle.dumps(data._reader)).read(np.array([12, 3, 4]))
    check_batch(part)


def test_only_the_row_groups_of_the_batches_are_kept(tmp_path):
    write(tmp_path / "a.parquet", range(200))
    data = open_source(tmp_path)
    for step in range(40):
        data.train_batch(step)
        assert len(data._reader._kept) <= 3  # One per stream, and one more.


def test_held_out_files(tmp_path):
    write(tmp_path / "train-0.parquet", range(9))
    write(tmp_path / "train-1.parquet", range(9, 12))
    write(tmp_path / "test.parquet", range(50, 53))
    data = open_source(tmp_path, evaluation_files="test*", num_evaluation_samples=None)
    assert (data.num_train_samples, data.num_evaluation_samples) == (12, 3)
    data = open_source(
        tmp_path,
        files="train-?.parquet",
        evaluation_files="test.parquet",
        num_evaluation_samples=2,
    )
    (batch,) = data.evaluation_batches()
    assert rows_of(batch)[:3] == [51, 52, 52]
    assert open_source(tmp_path / "train-0.parquet").num_train_samples == 4


def test_evaluation_files_leave_a_training_file(tmp_path):
    path = write(tmp_path / "a.parquet", range(9))
    write(tmp_path / "b.parquet", range(9))
    for data_dir, pattern in (
        (path, "b.parquet"),  # One file matches any pattern.
        (tmp_path, "*.parquet"),
        (tmp_path, "[ab]*"),
    ):
        message = (
            f"{data_dir} must hold a training file: evaluation_files={pattern!r} takes "
            "every file of files='*.parquet'. Pass a directory"
        )
        with pytest.raises(DataError, match=re.escape(message)):
            open_source(data_dir, evaluation_files=pattern)


def test_plain_columns_and_lists_of_fixed_size(tmp_path):
    write(tmp_path / "a.parquet", range(20), types={"weight": pa.float16()})
    types = {"seen": pa.list_(pa.int64(), 2), "row": pa.float32()}
    changes = {(n, "seen"): [n, n + 1] if n % 3 else None for n in range(20)}
    write(tmp_path / "b.parquet", range(20), changes, types)
    data = open_source(tmp_path / "b.parquet", weight=None, dense=("row",))
    batch = data.train_batch(0)
    seen = batch.features["seen"]
    for sample, number in enumerate(batch.dense[:, 0].astype(int).tolist()):
        first, end = seen.row_splits[sample : sample + 2]
        expected = [number, number + 1] if number % 3 else []
        assert seen.values[first:end].tolist() == expected
    assert batch.weights.tolist() == [1] * 6
    assert open_source(tmp_path / "a.parquet", dense=()).train_batch(0).dense is None


BAD_VALUES = {
    "null_id": ((6, "user id"), None, "'user id': a value must not be null"),
    "null_dense": ((6, "age"), None, "'age': a value must not be null"),
    "null_label": ((6, "click"), None, "'click': a value must not be null"),
    "null_weight": ((6, "weight"), None, "'weight': a value must not be null"),
    "null_in_list": ((6, "seen"), [1, None], "'seen': an id in a list must not"),
    "large_id": (
        (6, "user id"),
        100,
        r"'user' must lie in \[0, 100\), got 100, and 1 such .*out_of_range to 'keep'",
    ),
    "negative_in_list": ((6, "seen"), [3, -1], r"\[0, 1000\), got -1"),
}


@pytest.mark.parametrize(
    ("place", "value", "message"), BAD_VALUES.values(), ids=BAD_VALUES.keys()
)
def test_wrong_values_name_their_row(tmp_path, place, value, message):
    path = write(tmp_path / "a.parquet", range(20), {place: value})
    data = open_source(tmp_path)
    with pytest.raises(
        DataError, match=rf"{path}, row 6 \(row group 1\), column .*{message}"
    ):
        for step in range(3):
            data.train_batch(step)


def test_ids_out_of_range_are_kept_on_request(tmp_path):
    write(tmp_path / "a.parquet", range(8), {(6, "seen"): [3, -1]}, rows_per_group=9)
    keep = dataclasses.replace(SOURCE.features[1], out_of_range="keep")
    data = open_source(
        tmp_path, features=(SOURCE.features[0], keep), num_evaluation_samples=1
    )
    values = data.train_batch(0).features["seen"].values
    values = np.append(values, data.train_batch(1).features["seen"].values)
    assert -1 in values


BAD_FILES = {
    "no_column": ({}, {"label": "clicks"}, "has no column 'clicks'; it has user id, "),
    "text": ({}, {"dense": ("unread",)}, "'unread': .* booleans, got string"),
    "lists_for_ids": (
        {"user id": pa.list_(pa.int8())},
        {},
        "'user id': .* integers, as the feature has no expected_valence, got list",
    ),
    "floats_for_ids": ({"user id": pa.float32()}, {}, "must hold integers.*got float"),
    "ids_for_lists": (
        {"seen": pa.int32()},
        {},
        "'seen': .* lists of integers, as the feature has an expected_val.*got int32",
    ),
    "lists_of_floats": ({"seen": pa.list_(pa.float32())}, {}, "lists of integers"),
}


@pytest.mark.parametrize(
    ("types", "changes", "message"), BAD_FILES.values(), ids=BAD_FILES.keys()
)
def test_wrong_columns_are_refused(tmp_path, types, changes, message):
    write(tmp_path / "a.parquet", range(3))
    null = {(n, column): None for n in range(3) for column in types}
    write(tmp_path / "b.parquet", range(3), null, types)
    with pytest.raises(DataError, match=f"[ab].parquet.*{message}"):
        open_source(tmp_path, **changes)


def test_damaged_files_are_named(tmp_path):
    path = write(tmp_path / "a.parquet", range(20))
    whole = path.read_bytes()
    for data in (whole[:-1], whole[:100], b"", b"a,b\n1,2\n" * 10):
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"a\.parquet is damaged or no Parquet"):
            open_source(tmp_path)
    group = pq.read_metadata(write(path, range(20))).row_group(2)
    offset = group.column(4).data_page_offset
    path.write_bytes(whole[: offset + 30] + b"\xff" * 9 + whole[offset + 39 :])
    data = open_source(tmp_path)
    with pytest.raises(
        DataError, match=r"a\.parquet, row group 2 from row 8 on, is damaged"
    ):
        for step in range(3):
            data.train_batch(step)


def test_missing_files_and_library(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"must hold files '\*\.parquet', got none"):
        open_source(tmp_path)
    with pytest.raises(DataError, match="pass their directory with --data-dir"):
        open_source(None)
    write(tmp_path / "a.parquet", range(0))
    with pytest.raises(DataError, match="must hold a row, got none"):
        open_source(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingPyarrowError, match=r"tpu-embedding\[parquet\]"):
        open_source(tmp_path)


def test_outline_has_the_shapes_of_the_rows(tmp_path):
    write(tmp_path / "a.parquet", range(20))
    batch = open_source(tmp_path).train_batch(0)
    outline = SOURCE.outline(batch_size=6, seed=3)
    assert outline.vocabulary_sizes == {"user": 100, "seen": 1000}
    drawn = outline.train_batch(0)
    assert drawn.dense.shape == batch.dense.shape == (6, 2)
    assert drawn.features["user"].shape == (6,)
    seen = drawn.features["seen"]
    assert seen.row_splits.shape == (7,) and len(seen.values) == 6 * 1.5
    assert list(outline.evaluation_batches()) == []


BAD_DECLARATIONS = {
    "vocabulary": ({"vocabulary_size": 0}, r"vocabulary_size must lie in .* got 0"),
    "valence": ({"expected_valence": 0.0}, "expected_valence must be positive"),
    "policy": ({"out_of_range": "drop"}, "must be 'error' or 'keep', got 'drop'"),
}


@pytest.mark.parametrize(
    ("fields", "message"), BAD_DECLARATIONS.values(), ids=BAD_DECLARATIONS.keys()
)
def test_wrong_declarations(fields, message):
    with pytest.raises(ValueError, match=rf"{message}.*\(feature 'x'\)"):
        ParquetFeature(**({"name": "x", "vocabulary_size": 5} | fields))
    with pytest.raises(ValueError, match="different names, got"):
        dataclasses.replace(SOURCE, features=SOURCE.features[:1] * 2)
