"""Tests the data sources: the data sets that they open, and their errors."""

import dataclasses

import jax
import numpy as np
import pytest

import tpu_embedding as te
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.criteo import Criteo
from tpu_embedding.tools.data.synthetic_criteo import (
    SyntheticCriteo,
    write_criteo_sample,
)
from tpu_embedding.tools.data.yambda.event_samples import HistorySettings
from tpu_embedding.tools.data.yambda.synthetic_yambda import (
    SMALL_TABLE_SIZES,
    SyntheticYambda,
)
from tpu_embedding.tools.train import (
    CriteoSource,
    InteractionsSource,
    MovieLensSource,
    MultiHotClicksSource,
    SyntheticClicksSource,
    SyntheticStreamSource,
    SyntheticYambdaSource,
    YambdaSource,
)

CRITEO = CriteoSource(vocabulary_size=50, num_evaluation_samples=20)

MULTI_HOT = MultiHotClicksSource(
    vocabulary_sizes=(7, 300, 2), valences=(1, 20, 3), num_evaluation_samples=30
)
INTERACTIONS = InteractionsSource(
    num_users=500, num_items=400, history_length=5, num_evaluation_samples=30
)
HISTORY = HistorySettings(history_length=9, min_history=3)
EVENTS = SyntheticYambdaSource(
    table_sizes=dict(SMALL_TABLE_SIZES), history=HISTORY, num_users=40, num_days=5
)


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


def test_synthetic_stream():
    source = SyntheticStreamSource(
        num_users=40,
        num_items=20,
        life_steps=5,
        evaluation_step=9,
        num_evaluation_samples=30,
    )
    data = open_source(source, None)
    assert (data.live_ids, data.seed) == ({"user": 40, "item": 20}, 3)
    assert data.vocabulary_sizes["user"] == te.Dynamic(capacity=52)
    source = dataclasses.replace(source, vocabulary="unlimited")
    assert open_source(source, None).vocabulary_sizes == {"user": 120, "item": 60}


def test_movielens(movielens_dir):
    data = open_source(MovieLensSource(max_history=7), movielens_dir)
    assert (data.max_history, data.seed) == (7, 3)


def test_multi_hot_clicks_are_cut_on_request():
    data = open_source(MULTI_HOT, None)
    assert data.vocabulary_sizes == {"cat_00": 7, "cat_01": 300, "cat_02": 2}
    assert data.valences == {"cat_00": 1, "cat_01": 20, "cat_02": 3}
    assert (data.num_dense, data.seed, data.num_evaluation_samples) == (13, 3, 30)
    small = dataclasses.replace(MULTI_HOT, max_vocabulary_size=10, max_valence=2)
    data = open_source(small, None)
    assert data.vocabulary_sizes == {"cat_00": 7, "cat_01": 10, "cat_02": 2}
    assert data.valences == {"cat_00": 1, "cat_01": 2, "cat_02": 2}


def test_interactions():
    data = open_source(INTERACTIONS, None)
    assert data.vocabulary_sizes["user"] == 500
    assert data.vocabulary_sizes["item"] == 400
    assert (data.history_length, data.seed, data.batch_size) == (5, 3, 10)


@pytest.mark.parametrize("is_dense", [False, True])
def test_yambda_files_hold_the_synthetic_log(is_dense, tmp_path):
    synthetic = open_source(EVENTS, None)
    SyntheticYambda(num_users=40, num_days=5, seed=3).write(tmp_path)
    source = YambdaSource(
        table_sizes=EVENTS.table_sizes, history=HISTORY, has_dense_ids=is_dense
    )
    data = open_source(source, tmp_path)
    assert data.digest and data.history_length == 9
    assert data.num_train_samples > 0
    items = data.train_batch(0).features["item_id"]["candidate"]
    assert items.max() < 5_000
    table_sizes = {**EVENTS.table_sizes, "item_id": 10}
    with pytest.raises(DataError, match="table 'item_id' of 10 rows"):
        open_source(dataclasses.replace(source, table_sizes=table_sizes), tmp_path)
    whole = open_source(dataclasses.replace(source, whole_window="last"), tmp_path)
    windows = (whole.batches, synthetic.batches)
    assert len({batches.num_evaluation_samples for batches in windows}) == 1
    assert data.batches.num_evaluation_samples != whole.batches.num_evaluation_samples
    assert synthetic.teacher_log_loss() < np.log(2)
    assert 0.6 < synthetic.teacher_auc() < 1


@pytest.mark.parametrize("source", [MULTI_HOT, INTERACTIONS])
def test_outlines_have_the_shapes_of_the_data(source):
    outline = source.outline(batch_size=10, seed=3).train_batch(0)
    batch = open_source(source, None).train_batch(4)
    assert jax.tree.map(np.shape, outline) == jax.tree.map(np.shape, batch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"valences": (1, 2)}, "of one length, at most 26, got 3 and 2"),
        ({"max_valence": 0, "max_vocabulary_size": 0}, "max_vocabulary.*max_valence"),
        (
            {"vocabulary_sizes": (1,) * 27, "valences": (1,) * 27},
            "at most 26, got 27 and 27",
        ),
    ],
)
def test_refused_multi_hot_clicks(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MULTI_HOT, **changes)


@pytest.mark.parametrize(
    ("source", "has_path", "message"),
    [
        (MovieLensSource(max_history=7), False, "grouplens.org.*--data-dir"),
        (MovieLensSource(max_history=7), True, "u.occupation"),
        (CRITEO, True, "holds no train.txt and no day_0.*1TB"),
        (SyntheticClicksSource(num_evaluation_samples=30), True, "--data-dir out"),
        (MULTI_HOT, True, "holds no day_0_dense.npy"),
        (INTERACTIONS, True, "--data-dir out"),
        (EVENTS, True, "--data-dir out"),
        (YambdaSource(table_sizes={}), False, "Parquet files; pass .* --data-dir DIR"),
    ],
)
def test_refusals(source, has_path, message, tmp_path):
    with pytest.raises(DataError, match=message):
        open_source(source, tmp_path if has_path else None)
