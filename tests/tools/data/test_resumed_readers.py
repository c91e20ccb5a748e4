"""Tests that each sample is seen once, whatever processes a run resumes on."""

import pickle

import numpy as np
import pytest

from tests.tools.data.test_criteo import numbered_lines
from tpu_embedding.tools.data.criteo import Criteo
from tpu_embedding.tools.data.multi_hot_clicks import MultiHotClicks
from tpu_embedding.tools.train import ParquetFeature, ParquetSource
from tpu_embedding.tools.train.loop.loaders import split_samples

NUM_SAMPLES = 1000
BATCH_SIZE = 24
HELD_OUT = 10


def criteo(directory):
    """Writes two days, whose first integer is the number of the sample."""
    lines = numbered_lines(NUM_SAMPLES)
    for day, part in enumerate((lines[:300], lines[300:])):
        text = "\n".join(part).encode()
        path = directory / f"day_{day}"
        if not path.exists():
            path.write_bytes(text)
    return Criteo(
        [directory / "day_0", directory / "day_1"],
        batch_size=BATCH_SIZE,
        vocabulary_sizes=10,
        num_evaluation_samples=HELD_OUT,
        block_size=7,
    )


def arrays(directory):
    if not any(directory.iterdir()):
        dense = np.zeros((NUM_SAMPLES, 13), np.float32)
        dense[:, 0] = np.log1p(np.arange(NUM_SAMPLES))
        np.save(directory / "day_0_dense.npy", dense)
        np.save(directory / "day_0_labels.npy", np.zeros((NUM_SAMPLES, 1), np.int32))
        ids = {str(i): np.zeros((NUM_SAMPLES, 2), np.int32) for i in range(3)}
        np.savez(directory / "day_0_sparse_multi_hot.npz", **ids)
    names = ("a", "b", "c")
    return MultiHotClicks(
        directory,
        batch_size=BATCH_SIZE,
        vocabulary_sizes=dict.fromkeys(names, 5),
        valences=dict.fromkeys(names, 2),
        num_evaluation_samples=HELD_OUT,
        block_size=9,
    )


def parquet(directory):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    for part, numbers in enumerate((range(300), range(300, NUM_SAMPLES))):
        table = pa.table({"x": np.log1p(numbers), "id": [[1]] * len(numbers)})
        path = directory / f"{part}.parquet"
        if not path.exists():
            pq.write_table(table, path, row_group_size=64)
    source = ParquetSource(
        features=(ParquetFeature(name="id", vocabulary_size=5, expected_valence=1),),
        label="x",
        dense=("x",),
        num_evaluation_samples=HELD_OUT,
        num_streams=5,
    )
    return source.open(directory, batch_size=BATCH_SIZE, seed=1)


FORMATS = {
    "text": criteo,
    "arrays": arrays,
    "parquet": parquet,
}


def other_text(directory):
    lines = numbered_lines(NUM_SAMPLES)[::-1]
    (directory / "day_1").write_text("\n".join(lines[300:]))


def other_array(directory):
    labels = np.load(directory / "day_0_labels.npy")
    np.save(directory / "day_0_labels.npy", 1 - labels)


def other_parquet(directory):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"x": np.log1p(range(300)) + 1, "id": [[1]] * 300})
    pq.write_table(table, directory / "0.parquet", row_group_size=64)


OTHER_FILES = {
    "text": other_text,
    "arrays": other_array,
    "parquet": other_parquet,
}


@pytest.mark.parametrize("kind", FORMATS)
def test_other_samples_of_the_same_number_have_another_digest(tmp_path, kind):
    data = FORMATS[kind](tmp_path)
    again = pickle.loads(pickle.dumps(data))
    assert len(data.digest) == 8 and data.digest == again.digest
    OTHER_FILES[kind](tmp_path)
    other = FORMATS[kind](tmp_path)
    assert other.num_train_samples == data.num_train_samples
    assert other.digest != data.digest


@pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS.keys())
def test_resumed_on_4_2_and_3_processes(tmp_path, make):
    make(tmp_path)
    seen = []
    # The processes of a run, and its first step. Each opens the files anew.
    for num_processes, steps in (
        (4, range(13)),
        (2, range(13, 50)),
        (3, range(50, 90)),
    ):
        processes = [make(tmp_path) for _ in range(num_processes)]
        parts = split_samples(range(BATCH_SIZE), num_processes)
        for step in steps:
            for data, samples in zip(processes, parts, strict=True):
                batch = data.train_part(step, samples)
                numbers = np.rint(np.expm1(batch.dense[:, 0].astype(np.float64)))
                assert len(numbers) == len(samples)
                seen += numbers.astype(int).tolist()
    size = NUM_SAMPLES - HELD_OUT
    epochs = [seen[start : start + size] for start in range(0, len(seen), size)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(size))
    assert len(set(epochs[2])) == len(epochs[2]) > 0
    assert epochs[0] != epochs[1]
    whole = make(tmp_path)
    expected = whole.train_batch(60).dense[:, 0].astype(np.float64)
    begin = 60 * BATCH_SIZE
    assert np.rint(np.expm1(expected)).tolist() == seen[begin : begin + BATCH_SIZE]
