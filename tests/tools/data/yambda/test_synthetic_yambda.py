"""Tests the synthetic log: its files, its teacher and its shape."""

import functools

import numpy as np
import pytest

from tests.tools.data.yambda.test_yambda_files import assert_equal_logs
from tpu_embedding.tools.data.yambda.event_batches import EventBatches
from tpu_embedding.tools.data.yambda.event_log import LISTENED, SKIPPED
from tpu_embedding.tools.data.yambda.event_samples import EventSamples
from tpu_embedding.tools.data.yambda.exact_auc import exact_auc
from tpu_embedding.tools.data.yambda.synthetic_yambda import (
    SMALL_HISTORY,
    SMALL_TABLE_SIZES,
    SyntheticYambda,
)
from tpu_embedding.tools.data.yambda.yambda_files import YambdaFiles, read_yambda


@functools.cache
def default_log():
    return SyntheticYambda()


@functools.cache
def default_batches():
    samples = EventSamples(
        default_log().log, table_sizes=SMALL_TABLE_SIZES, settings=SMALL_HISTORY
    )
    return EventBatches(samples, batch_size=64, whole_window="last")


def small(**changes):
    return SyntheticYambda(**({"num_users": 30, "events_per_user": 60} | changes))


def test_the_reader_gets_the_same_log_from_its_files(tmp_path):
    pytest.importorskip("pyarrow")
    data = small()
    data.write(tmp_path)
    assert_equal_logs(read_yambda(YambdaFiles.find(tmp_path)), data.log)


def test_a_seed_gives_one_log():
    one, same, other = small(), small(), small(seed=1)
    assert_equal_logs(one.log, same.log)
    np.testing.assert_array_equal(one.probabilities, same.probabilities)
    assert one.probabilities.tolist() != other.probabilities.tolist()


def test_the_default_log_suits_the_small_tables():
    data, batches = default_log(), default_batches()
    log = data.log
    is_listen = np.isin(log.actions, (LISTENED, SKIPPED))
    assert 0.95 < is_listen.mean() < 0.98
    # Some users have no anchor, and most have.
    has_anchor = np.diff(log.user_bounds) > SMALL_HISTORY.min_history
    assert 0.9 < has_anchor.mean() < 1
    assert batches.num_train_steps > 3_000
    assert batches.num_evaluation_samples == 12_499  # As the docstring says.
    assert abs(len(log.times) - 375_000) < 500
    batch = batches.train_batch(batches.num_train_steps - 1)
    assert batch["history_length"].max() <= SMALL_HISTORY.width == 126
    assert 80 < batch["history_length"].mean()
    for name, ids in batch["features"].items():
        size = SMALL_TABLE_SIZES[name]
        assert 1_000 <= size <= 50_000
        values = (
            [ids]
            if name not in ("item_id", "artist_id", "album_id")
            else [
                ids["history"].values,
                ids["candidate"],
            ]
        )
        assert all(0 <= v.min() and v.max() < size for v in values)


def test_the_probabilities_are_those_of_the_labels():
    data = default_log()
    is_listen = np.isin(data.log.actions, (LISTENED, SKIPPED))
    labels = data.log.actions[is_listen] == LISTENED
    probabilities = data.probabilities[is_listen]
    tenths = np.floor(probabilities * 10)
    for tenth in range(10):
        chosen = tenths == tenth
        error = labels[chosen].mean() - probabilities[chosen].mean()
        # Five standard errors of a mean of labels.
        assert abs(error) < 2.5 / np.sqrt(chosen.sum())


def test_no_part_of_the_teacher_reaches_its_area():
    data, batches = default_log(), default_batches()
    area = data.teacher_auc(batches)
    assert abs(area - 0.905) < 0.001  # As the docstring says.
    anchors = batches.evaluation_anchors.astype(np.int64)
    labels = np.concatenate(
        [batch["label"][batch["weight"] > 0] for batch in batches.evaluation_batches()]
    )
    assert exact_auc(labels, data.probabilities[anchors]) == area
    # Rates of users and items before the evaluation are worse, and better than chance.
    log = data.log
    users = np.repeat(log.users, np.diff(log.user_bounds))
    start = log.times[anchors].min()
    is_known = np.isin(log.actions, (LISTENED, SKIPPED)) & (log.times < start)
    is_listened = log.actions == LISTENED
    mean = is_listened[is_known].mean()
    artists = log.item_artists[log.items]
    rates = []
    for keys in (users, log.items, users * 1_000 + artists):
        size = keys.max() + 1
        listens = np.bincount(keys[is_known], is_listened[is_known], size)
        events = np.bincount(keys[is_known], minlength=size)
        rates.append(((listens + mean) / (events + 1))[keys[anchors]])
        assert 0.55 < exact_auc(labels, rates[-1]) < area - 0.08
    # Their sum is the baseline that a good model has to beat.
    assert abs(exact_auc(labels, sum(rates)) - 0.7215) < 0.001


def test_days_and_items_have_a_structure():
    data = default_log()
    log = data.log
    users = np.repeat(np.arange(len(log.users)), np.diff(log.user_bounds))
    hours = log.times / 3_600 % 24 * (2 * np.pi / 24)
    counts = np.diff(log.user_bounds)
    direction = np.bincount(users, np.cos(hours)) + 1j * np.bincount(
        users, np.sin(hours)
    )
    assert np.mean(abs(direction) / counts) > 0.6  # 0.05 for times without a structure.
    popularity = np.sort(np.bincount(log.items))[::-1]
    assert popularity[:50].sum() > 0.3 * popularity.sum()
    pairs = users * 10_000 + log.items
    assert len(np.unique(pairs)) < 0.55 * len(pairs)
    # An album has one artist.
    pairs = log.item_albums * 10_000 + log.item_artists
    assert len(np.unique(pairs)) == len(np.unique(log.item_albums))
    assert log.item_artists.min() >= 1 and log.item_albums.min() >= 1


def test_wrong_sizes_are_refused():
    for sizes, message in (
        ({"num_users": 0}, "SyntheticYambda.num_users must be an int of at least 1"),
        ({"num_days": 1}, "num_days must be at least 2, as the last day is the test"),
        ({"seed": -1}, "SyntheticYambda.seed must be an int of at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            small(**sizes)
