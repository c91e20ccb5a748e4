"""Tests the distribution of synthetic item choices, and the minimum loss on them."""

import math
import tracemalloc

import chex
import numpy as np
import pytest

from tpu_embedding.tools.data.interactions import Interactions
from tpu_embedding.types import PADDING_ROW_ID


def small(**changes):
    arguments = {
        "batch_size": 64,
        "seed": 3,
        "num_users": 50,
        "num_items": 40,
        "history_length": 5,
        "num_groups": 4,
        "num_evaluation_samples": 100,
    }
    return Interactions(**(arguments | changes))


def test_shapes_dtypes_and_ranges():
    data = small(batch_size=2000)
    batch = data.train_batch(0)
    sizes = data.vocabulary_sizes | {"history": 40}
    assert batch.features.keys() == sizes.keys()
    for name, ids in batch.features.items():
        assert ids.dtype == np.int32
        assert ids.shape == ((2000, 5) if name == "history" else (2000,))
        used = ids[ids != PADDING_ROW_ID]
        assert used.min() >= 0 and used.max() < sizes[name]
    used_mask = batch.features["history"] != PADDING_ROW_ID
    assert (used_mask[:, :-1] >= used_mask[:, 1:]).all(), "not filled from the left"
    assert set(used_mask.sum(axis=1)) == {0, 1, 2, 3, 4, 5}
    assert batch.dense.shape == (2000, 1) and batch.dense.dtype == np.float32
    assert (batch.labels == 1).all() and (batch.weights == 1).all()


def test_items_are_as_frequent_as_their_probability_says():
    batch = small(batch_size=200_000, noise=0.3).train_batch(0)
    items = batch.features["item"]
    counts = np.bincount(items, minlength=40)
    p = np.zeros(40)
    p[items] = np.exp(batch.dense[:, 0])
    assert p.sum() == pytest.approx(1, abs=1e-5)
    # Tolerance: five standard deviations of a binomial count.
    assert (np.abs(counts - 200_000 * p) < 5 * np.sqrt(200_000 * p * (1 - p))).all()


def test_users_and_histories_choose_their_group():
    batch = small(batch_size=100_000, noise=0.3).train_batch(0)
    groups = {name: batch.features[name] % 4 for name in ("user", "item", "history")}
    used_mask = batch.features["history"] != PADDING_ROW_ID
    earlier = (groups["history"] == groups["user"][:, None])[used_mask]
    wanted = 0.7 + 0.3 / 4
    assert (groups["item"] == groups["user"]).mean() == pytest.approx(wanted, abs=0.01)
    assert earlier.mean() == pytest.approx(wanted, abs=0.01)


def test_attributes_belong_to_their_row():
    features = small(batch_size=1000).train_batch(0).features
    for row, attribute in (("user", "country"), ("item", "category")):
        values = {}
        for i, value in zip(features[row], features[attribute], strict=True):
            assert values.setdefault(i, value) == value
        assert len(set(values.values())) > 10


@pytest.mark.parametrize("batch_size", [1, 64, 100, 128])
def test_teacher_log_loss_is_the_softmax_of_the_true_scores(batch_size):
    data = small(batch_size=batch_size)
    losses, weights = [], []
    for batch in data.evaluation_batches():
        users, items = batch.features["user"], batch.features["item"]
        p = np.where(users[:, None] % 4 == items[None, :] % 4, 0.8 + 0.2 / 4, 0.2 / 4)
        # An item's popularity within its group cancels against its own probability.
        shares = p / p.sum(axis=1, keepdims=True)
        losses.append(-np.log(np.diag(shares)))
        weights.append(batch.weights)
    losses, weights = np.concatenate(losses), np.concatenate(weights)
    assert weights.sum() == 100
    wanted = np.sum(losses * weights) / 100
    assert data.teacher_log_loss() == pytest.approx(wanted, rel=1e-6, abs=1e-12)
    assert wanted <= math.log(batch_size)


def test_batches_depend_on_seed_and_step_alone():
    data = small()
    first = data.train_batch(5)
    list(data.evaluation_batches())
    chex.assert_trees_all_equal(small().train_batch(5), first)
    others = [
        data.train_batch(6),
        small(seed=4).train_batch(5),
        next(data.evaluation_batches()),
    ]
    for other in others:
        assert (other.features["user"] != first.features["user"]).any()


def test_memory_does_not_grow_with_the_vocabulary():
    data = small(num_users=2**31 - 2, num_items=2**31 - 2, zipf_exponent=0.0)
    tracemalloc.start()
    batch = data.train_batch(0)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1e6
    assert batch.features["user"].max() > 2**30
    assert batch.dense[:, 0] == pytest.approx(-31 * math.log(2), abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0, "history_length": 0, "seed": -1}, "batch.*history.*seed"),
        ({"num_users": 3}, "at most num_users and num_items, 3 and 40, got 4"),
        ({"num_items": 0}, "num_items must be an int of at least 1, got 0"),
        ({"noise": 0.0}, "noise must be between 0 and 1, got 0.0"),
        ({"noise": 1.0}, "noise must be between 0 and 1, got 1.0"),
        ({"num_evaluation_samples": True}, "num_evaluation_samples .* got True"),
        ({"zipf_exponent": -1.0}, "exponent must be a finite number"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)
