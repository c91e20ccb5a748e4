"""Data sources: which data set they open, and when they refuse."""

import pytest

from tpu_embedding.data.batch import DataError
from tpu_embedding.data.criteo import Criteo, SyntheticCriteo, write_criteo_sample
from tpu_embedding.training import (
    CriteoSource,
    MovieLensSource,
    SyntheticClicksSource,
)

CRITEO = CriteoSource(vocabulary_size=50, num_evaluation_samples=20)


def open_source(source, data_dir):
    return source.open(data_dir, batch_size=10, seed=3)


def test_criteo_is_a_file_or_made_up(tmp_path):
    path = tmp_path / "train.txt"
    write_criteo_sample(path, 100)
    for data_dir in (path, tmp_path):
        data = open_source(CRITEO, data_dir)
        assert isinstance(data, Criteo)
        assert (data.num_train_samples, data.seed) == (80, 3)
    data = open_source(CRITEO, None)
    assert isinstance(data, SyntheticCriteo)
    assert (data.num_evaluation_samples, data.batch_size) == (20, 10)


def test_synthetic_clicks():
    source = SyntheticClicksSource(num_evaluation_samples=30, valence=2)
    data = open_source(source, None)
    assert (data.num_evaluation_samples, data.valence, data.seed) == (30, 2, 3)


def test_movielens(movielens_dir):
    data = open_source(MovieLensSource(max_history=7), movielens_dir)
    assert (data.config.max_history, data.config.seed) == (7, 3)


@pytest.mark.parametrize(
    ("source", "has_path", "message"),
    [
        (MovieLensSource(max_history=7), False, "grouplens.org.*--data-dir"),
        (MovieLensSource(max_history=7), True, "u.occupation"),
        (CRITEO, True, "train.txt is not a file"),
        (SyntheticClicksSource(num_evaluation_samples=30), True, "--data-dir out"),
    ],
)
def test_refusals(source, has_path, message, tmp_path):
    with pytest.raises(DataError, match=message):
        open_source(source, tmp_path if has_path else None)
