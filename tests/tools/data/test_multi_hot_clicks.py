"""Tests the reader of MLPerf's multi-hot files."""

import dataclasses

import numpy as np
import pytest

from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.multi_hot_clicks import MultiHotClicks
from tpu_embedding.tools.train import MultiHotClicksSource

SIZES = {"cat_00": 50, "cat_01": 7, "cat_02": 1000}
VALENCES = {"cat_00": 3, "cat_01": 1, "cat_02": 2}


def write_day(directory, day, num_rows=10):
    """Writes a day whose first dense input is the number of the row."""
    random = np.random.default_rng(day)
    dense = random.random((num_rows, 13), np.float32)
    dense[:, 0] = 100 * day + np.arange(num_rows)
    ids = {
        str(number): random.integers(0, 2000, (num_rows, valence), np.int32)
        for number, valence in enumerate(VALENCES.values())
    }
    labels = (np.arange(num_rows, dtype=np.int32) % 2)[:, None]
    np.save(directory / f"day_{day}_dense.npy", dense)
    np.save(directory / f"day_{day}_labels.npy", labels)
    np.savez(directory / f"day_{day}_sparse_multi_hot.npz", **ids)
    return dense, labels, ids


def read(directory, **changes):
    arguments = {"batch_size": 4, "num_evaluation_samples": 3, "block_size": 2}
    return MultiHotClicks(
        directory,
        vocabulary_sizes=SIZES,
        valences=VALENCES,
        **(arguments | changes),
    )


def test_rows_have_the_values_of_the_files(tmp_path):
    files = [write_day(tmp_path, day) for day in range(3)]
    data = read(tmp_path)
    assert (data.num_train_samples, data.num_evaluation_samples) == (20, 3)
    seen = []
    for step in range(5):
        batch = data.train_batch(step)
        for sample, number in enumerate(batch.dense[:, 0].astype(int).tolist()):
            dense, labels, ids = files[number // 100]
            row = number % 100
            seen.append(number)
            assert (batch.dense[sample] == dense[row]).all()
            assert batch.labels[sample] == labels[row, 0]
            for feature, (name, size) in enumerate(SIZES.items()):
                expected = ids[str(feature)][row] % size
                assert (batch.features[name][sample] == expected).all()
            assert batch.origin(sample).endswith(f"day_{number // 100}_*, row {row}")
    assert sorted(seen) == [*range(10), *range(100, 110)]
    assert [ids.shape for ids in batch.features.values()] == [(4, 3), (4,), (4, 2)]
    assert {ids.dtype for ids in batch.features.values()} == {np.dtype(np.int32)}


def test_held_out_rows(tmp_path):
    write_day(tmp_path, 0)
    (batch,) = read(tmp_path).evaluation_batches()
    assert batch.dense[:, 0].tolist() == [7, 8, 9, 9]
    assert batch.weights.tolist() == [1, 1, 1, 0]
    write_day(tmp_path, 1)
    (batch,) = read(tmp_path).evaluation_batches()
    assert batch.dense[:, 0].tolist() == [100, 101, 102, 102]


def test_source_reads_files_or_draws_clicks(tmp_path):
    write_day(tmp_path, 0)
    source = MultiHotClicksSource(
        vocabulary_sizes=tuple(SIZES.values()),
        valences=tuple(VALENCES.values()),
        num_evaluation_samples=3,
        max_vocabulary_size=20,
        max_valence=2,
    )
    batches = [
        source.open(directory, batch_size=4, seed=1).train_batch(0)
        for directory in (tmp_path, None)
    ]
    for batch in batches:
        shapes = [ids.shape for ids in batch.features.values()]
        assert shapes == [(4, 2), (4,), (4, 2)]
        assert max(int(ids.max()) for ids in batch.features.values()) < 20
    assert batches[0].origin is not None and batches[1].origin is None
    outline = source.outline(batch_size=4, seed=1)
    assert (
        outline.vocabulary_sizes
        == source.open(tmp_path, batch_size=4, seed=1).vocabulary_sizes
    )
    with pytest.raises(DataError, match="too few to hold out 11"):
        dataclasses.replace(source, num_evaluation_samples=11).open(
            tmp_path, batch_size=4, seed=1
        )


def resave(name, change):
    """Returns a function that replaces an array in its file."""

    def damage(directory):
        path = directory / name
        np.save(path, change(np.load(path)))

    return damage


def resave_ids(**changes):
    def damage(directory):
        path = directory / "day_1_sparse_multi_hot.npz"
        arrays = dict(np.load(path))
        changed = {
            key.removeprefix("_"): change(arrays.get(key.removeprefix("_")))
            for key, change in changes.items()
        }
        arrays = {k: v for k, v in (arrays | changed).items() if v is not None}
        np.savez(path, **arrays)

    return damage


def remove(name):
    return lambda directory: (directory / name).unlink()


def truncate(name):
    def damage(directory):
        path = directory / name
        path.write_bytes(path.read_bytes()[:-30])

    return damage


DAMAGED = {
    "no_dense": (remove("day_1_dense.npy"), "days 0 to 2 without 1"),
    "no_labels": (remove("day_1_labels.npy"), r"day_1_labels\.npy is missing"),
    "no_ids": (remove("day_1_sparse_multi_hot.npz"), r"day_1_sparse.*npz is missing"),
    "dense_truncated": (truncate("day_1_dense.npy"), r"day_1_dense\.npy is truncated"),
    "ids_truncated": (
        truncate("day_1_sparse_multi_hot.npz"),
        r"day_1_sparse_multi_hot\.npz is damaged",
    ),
    "dense_dtype": (
        resave("day_1_dense.npy", lambda a: a.astype(int)),
        r"day_1_dense\.npy must have a floating-point dtype, got int64",
    ),
    "dense_columns": (
        resave("day_1_dense.npy", lambda a: a[:, :12]),
        r"day_1_dense\.npy must have the shape \[any, 13\] .*got \[10, 12\]",
    ),
    "fewer_labels": (
        resave("day_1_labels.npy", lambda a: a[:-1]),
        r"labels\.npy .* \[10, 1\] \(as many rows as day_1_dense\.npy\), got \[9, 1\]",
    ),
    "labels_flat": (
        resave("day_1_labels.npy", lambda a: a[:, 0]),
        r"day_1_labels\.npy must have the shape .*got \[10\]",
    ),
    "fewer_ids": (resave_ids(_1=lambda a: a[:-1]), r"array '1' must .*got \[9, 1\]"),
    "valence": (resave_ids(_0=lambda a: a[:, :2]), r"array '0' .*\[10, 3\].*\[10, 2\]"),
    "ids_dtype": (resave_ids(_2=lambda a: a * 1.0), "array '2' .* integer dtype"),
    "array_missing": (resave_ids(_1=lambda a: None), r"'0' to '2'.*without \['1'\]"),
    "array_more": (resave_ids(_9=lambda a: np.zeros(3)), r"with \['9'\] besides"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_files_are_named(tmp_path, damage, message):
    for day in range(3):
        write_day(tmp_path, day)
    damage(tmp_path)
    with pytest.raises(DataError, match=message):
        read(tmp_path)


def test_negative_ids_name_their_place(tmp_path):
    for day in range(3):
        write_day(tmp_path, day)

    def negative(ids):
        ids[4, 1] = -5
        return ids

    resave_ids(_2=negative)(tmp_path)
    data = read(tmp_path)
    message = r"day_1_.*npz, array '2', row 4, column 1: .* got -5 for .* 'cat_02'"
    with pytest.raises(DataError, match=message):
        for step in range(5):
            data.train_batch(step)


def test_no_files(tmp_path):
    with pytest.raises(DataError, match="holds no day_0_dense.npy.*recommendation_v2"):
        read(tmp_path)
    with pytest.raises(DataError, match="absent is not a directory"):
        read(tmp_path / "absent")
