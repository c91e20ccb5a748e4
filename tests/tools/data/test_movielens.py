"""Tests the reader of MovieLens-100K on the real files, if they are there."""

import shutil

import pytest

from tests.tools.data.test_synthetic_sources import checksum
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.train import MovieLensSource

SOURCE = MovieLensSource(max_history=100)


def test_batches_are_the_recorded_ones(movielens_dir):
    data = SOURCE.open(movielens_dir, batch_size=1000, seed=3)
    assert checksum(data.train_batch(0)) == "89cf8885"
    assert checksum(data.train_batch(1000)) == "448b140c"
    assert checksum(next(data.evaluation_batches())) == "99de2de7"
    weights = [batch.weights.sum() for batch in data.evaluation_batches()]
    assert sum(weights) == data.num_evaluation_samples == 20_000


def test_damaged_files_are_named(movielens_dir, tmp_path):
    with pytest.raises(DataError, match=r"reads MovieLens-100K, .*--data-dir"):
        SOURCE.open(None, batch_size=4, seed=0)
    with pytest.raises(DataError, match="u1.base.*unpack ml-100k.zip"):
        SOURCE.open(tmp_path, batch_size=4, seed=0)
    for name in ("u1.test", "u.user", "u.item", "u.occupation"):
        shutil.copy(movielens_dir / name, tmp_path)
    for line, message in (
        (
            "1\t2000\t3\t4",
            "u1.base, line 2: a user must be 1 to 943, a movie 1 to 1682",
        ),
        ("1\t2\t6\t4", "u1.base, line 2: .* a rating 1 to 5"),
        ("1\tx\t3\t4", "u1.base: could not convert string 'x'"),
        ("1\t2", "u1.base: the number of columns changed"),
    ):
        (tmp_path / "u1.base").write_text(f"1\t1\t5\t0\n{line}\n")
        with pytest.raises(DataError, match=message):
            SOURCE.open(tmp_path, batch_size=4, seed=0)
