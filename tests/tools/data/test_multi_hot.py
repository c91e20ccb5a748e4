"""Tests the reader of MLPerf's multi-hot arrays against the rows that were written."""

import dataclasses

import numpy as np
import pytest

from tests.tools.data.damage import cut, samples_of_steps
from tpu_embedding.tools.data import multi_hot
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.train import MultiHotClicksSource

SOURCE = MultiHotClicksSource(
    vocabulary_sizes=(7, 300, 40), valences=(1, 20, 3), num_evaluation_samples=30
)


def arrays_of(day, num_rows):
    generator = np.random.default_rng(day)
    dense = generator.random((num_rows, 13)).astype(np.float32)
    labels = np.arange(num_rows, dtype=np.int32)[:, None] + 1000 * day
    ids = [
        generator.integers(0, 2 * size, (num_rows, valence), np.int32)
        for size, valence in zip(SOURCE.vocabulary_sizes, SOURCE.valences, strict=True)
    ]
    return dense, labels, ids


def write_day(directory, day, num_rows, **changes):
    dense, labels, ids = arrays_of(day, num_rows)
    arrays = {"dense": dense, "labels": labels, "ids": ids} | changes
    np.save(directory / f"day_{day}_dense.npy", arrays["dense"])
    np.save(directory / f"day_{day}_labels.npy", arrays["labels"])
    by_name = {str(i): array for i, array in enumerate(arrays["ids"])}
    np.savez(directory / f"day_{day}_sparse_multi_hot.npz", **by_name)


def open_source(directory, **changes):
    source = dataclasses.replace(SOURCE, **changes)
    return source.open(directory, batch_size=25, seed=0)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(multi_hot, "BLOCK_SIZE", 8)


def check_rows(batch, num_rows=100):
    for sample, label in enumerate(batch.labels.tolist()):
        day, row = divmod(int(label), 1000)
        dense, _, ids = arrays_of(day, num_rows)
        np.testing.assert_array_equal(batch.dense[sample], dense[row])
        for number, size in enumerate(SOURCE.vocabulary_sizes):
            found = batch.features[f"cat_{number:02d}"][sample]
            np.testing.assert_array_equal(np.atleast_1d(found), ids[number][row] % size)


def test_the_last_day_is_held_out(tmp_path, small_blocks):
    for day in range(3):
        write_day(tmp_path, day, 100)
    data = open_source(tmp_path)
    assert (data.num_train_samples, data.num_evaluation_samples) == (200, 30)
    assert data.vocabulary_sizes == {"cat_00": 7, "cat_01": 300, "cat_02": 40}
    rows = samples_of_steps(data, 8)
    assert sorted(rows) == [*range(100), *range(1000, 1100)]
    check_rows(data.train_batch(3))
    assert len({*(data.train_batch(0).labels // 8)}) > 3
    held_out = list(data.evaluation_batches())
    assert [batch.weights.sum() for batch in held_out] == [25, 5]
    assert held_out[0].labels.tolist() == list(range(2000, 2025))
    check_rows(held_out[0])
    again = open_source(tmp_path)
    part = again.train_part(11, range(4, 9)).labels
    assert part.tolist() == data.train_batch(11).labels[4:9].tolist()


def test_the_end_of_one_day_is_held_out(tmp_path):
    write_day(tmp_path, 4, 100)
    data = open_source(tmp_path, max_valence=2, max_vocabulary_size=5)
    assert next(data.evaluation_batches()).labels.tolist() == list(range(4070, 4095))
    assert data.vocabulary_sizes == {"cat_00": 5, "cat_01": 5, "cat_02": 5}
    assert data.train_batch(0).features["cat_01"].shape == (25, 2)
    assert data.train_batch(0).features["cat_01"].max() < 5
    synthetic = open_source(None, max_valence=2)
    assert synthetic.train_batch(0).features["cat_01"].shape == (25, 2)


DENSE, LABELS, IDS = arrays_of(0, 100)
DAMAGE = {
    "dense_integers": ({"dense": np.ones((100, 13), int)}, "dense must .* of a kind"),
    "dense_width": ({"dense": DENSE[:, :12]}, r"dense must have the shape \[100, 13\]"),
    "labels_short": ({"labels": LABELS[:99]}, r"day_0_labels must .* \[100, 1\]"),
    "ids_short": (
        {"ids": [IDS[0], IDS[1][:5], IDS[2]]},
        r"array 1 must .* \[100, 20\]",
    ),
    "features": ({"ids": IDS[:2]}, "must have an array for each of 3 features, got 2"),
    "too_few_rows": (
        {"dense": DENSE[:9], "labels": LABELS[:9], "ids": [x[:9] for x in IDS]},
        "day_0 has 9 samples, too few to hold out",
    ),
}


@pytest.mark.parametrize(("changes", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_wrong_arrays_are_named(tmp_path, changes, message):
    write_day(tmp_path, 0, 100, **changes)
    with pytest.raises(DataError, match=message):
        open_source(tmp_path)


def test_damaged_files_are_named(tmp_path):
    with pytest.raises(
        DataError, match="day_N_dense.npy of consecutive days, .* \\[\\]"
    ):
        open_source(tmp_path)
    write_day(tmp_path, 0, 100)
    archive = tmp_path / "day_0_sparse_multi_hot.npz"
    np.savez_compressed(archive, **{"0": np.ones(3)})
    with pytest.raises(
        DataError, match=r"day_0_sparse_.*compressed; write it by numpy"
    ):
        open_source(tmp_path)
    cut(archive, 100)
    with pytest.raises(DataError, match="day_0_sparse_multi_hot.npz cannot be mapped"):
        open_source(tmp_path)
    cut(tmp_path / "day_0_labels.npy", 200)
    with pytest.raises(DataError, match="day_0_labels.npy is missing or no whole"):
        open_source(tmp_path)
    write_day(tmp_path, 2, 100)
    with pytest.raises(DataError, match=r"consecutive days, got days \[0, 2\]"):
        open_source(tmp_path)
