"""Tests the synthetic click log: its shapes, its teacher and its labels."""

import math

import chex
import jax
import numpy as np
import pytest

from tpu_embedding.tools.data.synthetic_clicks import (
    DEFAULT_VOCABULARY_SIZES,
    SyntheticClicks,
)
from tpu_embedding.tools.data.teacher import cross_entropy
from tpu_embedding.types import PADDING_ROW_ID

ONE_HOT = ["user", "item", "category", "device"]


def small(**changes):
    arguments = {"batch_size": 64, "num_evaluation_samples": 1000, "seed": 3}
    return SyntheticClicks(**(arguments | changes))


def assert_same(left, right):
    chex.assert_trees_all_equal(left, right)


def held_out(data):
    """Returns all evaluation samples of weight 1 as one batch."""
    batches = list(data.evaluation_batches())
    whole = jax.tree.map(lambda *parts: np.concatenate(parts), *batches)
    return jax.tree.map(lambda leaf: leaf[whole.weights == 1], whole)


def test_shapes_dtypes_and_ranges():
    data = SyntheticClicks(batch_size=4096, valence=5)
    batch = data.train_batch(0)
    assert set(batch.features) == {*ONE_HOT, "tags"} == set(data.vocabulary_sizes)
    assert batch.dense is None
    assert batch.labels.shape == (4096,) and batch.labels.dtype == np.float32
    assert set(np.unique(batch.labels)) == {0.0, 1.0}
    assert batch.weights.dtype == np.float32 and (batch.weights == 1).all()
    for name in ONE_HOT:
        ids = batch.features[name]
        assert ids.shape == (4096,) and ids.dtype == np.int32
        assert ids.min() >= 0 and ids.max() < data.vocabulary_sizes[name]
    tags = batch.features["tags"]
    assert tags.shape == (4096, 5) and tags.dtype == np.int32
    used_mask = tags != PADDING_ROW_ID
    assert tags.min() >= 0 and tags[used_mask].max() < data.vocabulary_sizes["tags"]
    assert (used_mask[:, :-1] >= used_mask[:, 1:]).all(), "not filled from the left"
    assert set(used_mask.sum(axis=1)) == {0, 1, 2, 3, 4, 5}


def test_train_batch_depends_on_seed_and_step_alone():
    data, other = small(), small()
    first = data.train_batch(5)
    data.train_batch(6)
    list(data.evaluation_batches())
    assert_same(data.train_batch(5), first)
    assert_same(other.train_batch(5), first)


@pytest.mark.parametrize("name", [*ONE_HOT, "tags"])
def test_steps_seeds_and_evaluation_share_no_random_numbers(name):
    data = small()
    parts = [
        data.train_batch(0),
        data.train_batch(1),
        next(data.evaluation_batches()),
        small(seed=4).train_batch(0),
    ]
    ids = [part.features[name] for part in parts]
    for place, left in enumerate(ids):
        for right in ids[place + 1 :]:
            assert (left != right).any()


@pytest.mark.parametrize("batch_size", [1, 7, 250, 999, 1000, 1001, 4096])
def test_evaluation_is_the_same_for_every_batch_size(batch_size):
    data = small(batch_size=batch_size)
    batches = list(data.evaluation_batches())
    assert len(batches) == math.ceil(1000 / batch_size)
    for batch in batches:
        assert batch.features["tags"].shape == (batch_size, 8)
        assert batch.labels.shape == batch.weights.shape == (batch_size,)
        assert batch.weights.dtype == np.float32
    assert sum(batch.weights.sum() for batch in batches) == 1000
    assert_same(held_out(data), held_out(small()))
    assert data.teacher_log_loss() == small().teacher_log_loss()


def test_evaluation_can_be_repeated():
    data = small()
    assert_same(list(data.evaluation_batches()), list(data.evaluation_batches()))


def teacher_probabilities(data, samples):
    """Returns the probabilities of the class docstring's formula, sample by sample."""
    effects, ids = data._effects, samples.features
    probabilities = []
    for row in range(len(samples.labels)):
        logit = data._bias + sum(effects[name][ids[name][row]] for name in ONE_HOT)
        tags = [tag for tag in ids["tags"][row] if tag != PADDING_ROW_ID]
        if tags:
            logit += sum(effects["tags"][tag] for tag in tags) / len(tags)
        user, item = ids["user"][row], ids["item"][row]
        logit += data._user_factors[user] @ data._item_factors[item]
        probabilities.append(1 / (1 + math.exp(-logit)))
    return np.array(probabilities)


def test_teacher_log_loss_is_that_of_the_true_probabilities():
    data = small()
    samples = held_out(data)
    p = teacher_probabilities(data, samples)
    losses = -np.where(samples.labels == 1, np.log(p), np.log(1 - p))
    assert data.teacher_log_loss() == pytest.approx(losses.mean(), rel=1e-9)


@pytest.mark.parametrize("stream", ["train", "evaluation"])
def test_labels_are_drawn_from_the_true_probabilities(stream):
    data = small(batch_size=4000, num_evaluation_samples=4000)
    samples = data.train_batch(9) if stream == "train" else held_out(data)
    p = teacher_probabilities(data, samples)
    for low, high in [(0, 0.05), (0.05, 0.2), (0.2, 0.5), (0.5, 1)]:
        inside = (p >= low) & (p < high)
        assert inside.sum() > 100
        error = (samples.labels[inside] - p[inside]).sum()
        # Tolerance: five standard deviations of a sum of independent draws.
        assert abs(error) < 5 * np.sqrt((p * (1 - p))[inside].sum())


@pytest.mark.parametrize("seed", range(4))
def test_default_teacher_is_worth_learning(seed):
    data = SyntheticClicks(seed=seed)
    samples, probabilities = data._held_out
    rate = np.mean(samples.labels, dtype=np.float64)
    assert data.teacher_log_loss() < 0.8 * cross_entropy(rate, rate)
    # Drawing 102,400 labels at random changes the loss by less than 1 %.
    entropy = cross_entropy(probabilities, probabilities).mean()
    assert data.teacher_log_loss() == pytest.approx(entropy, rel=0.02)


@pytest.mark.parametrize("click_rate", [0.02, 0.2, 0.7])
def test_click_rate(click_rate):
    data = small(click_rate=click_rate, batch_size=40_000)
    # Tolerance: the bias is fitted to 16,384 samples, and 40,000 labels are drawn.
    assert data.train_batch(0).labels.mean() == pytest.approx(click_rate, abs=0.015)


def test_training_clicks_tell_evaluation_clicks():
    data = small(batch_size=50_000, num_evaluation_samples=20_000)
    train, evaluation = data.train_batch(0), held_out(data)
    score = np.zeros(20_000)
    for name in ONE_HOT:
        size = data.vocabulary_sizes[name]
        shown = np.bincount(train.features[name], minlength=size)
        clicked = np.bincount(train.features[name], train.labels, minlength=size)
        score += ((clicked + 2) / (shown + 10))[evaluation.features[name]]
    # Without a common teacher, the correlation would be 0 within 0.007.
    assert np.corrcoef(score, evaluation.labels)[0, 1] > 0.3


def test_ids_follow_the_skew():
    uniform, skewed = (
        small(zipf_exponent=exponent, batch_size=20_000).train_batch(0)
        for exponent in (0.0, 1.2)
    )
    for name in ONE_HOT:
        counts = [np.bincount(b.features[name]).max() for b in (uniform, skewed)]
        assert counts[1] > 3 * counts[0]


BAD = {
    "batch_size": ({"batch_size": 0}, r"SyntheticClicks\.batch_size .* got 0"),
    "bool": ({"batch_size": True}, "batch_size .* got True"),
    "evaluation": ({"num_evaluation_samples": 0}, "num_evaluation_samples .* got 0"),
    "seed": ({"seed": -1}, "seed .* got -1"),
    "rate_0": ({"click_rate": 0.0}, r"click_rate must be between 0 and 1, got 0\.0"),
    "rate_nan": ({"click_rate": float("nan")}, "click_rate .* got nan"),
    "valence": ({"valence": 0}, "valence .* got 0"),
    "exponent": ({"zipf_exponent": -1.0}, r"zipf_exponent .* got -1\.0"),
    "feature": ({"vocabulary_sizes": {"user": 3}}, r"must name .* got \['user'\]"),
    "size": (
        {"vocabulary_sizes": {**DEFAULT_VOCABULARY_SIZES, "item": 0}},
        r"vocabulary_sizes\['item'\] must be an int of at least 1, got 0",
    ),
    "all_at_once": ({"batch_size": 0, "valence": 0, "seed": -1}, "batch.*seed.*valenc"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        small(**arguments)


def test_smallest_sizes():
    data = SyntheticClicks(
        batch_size=1,
        valence=1,
        num_evaluation_samples=1,
        vocabulary_sizes=dict.fromkeys(DEFAULT_VOCABULARY_SIZES, 1),
    )
    batch = data.train_batch(0)
    assert [int(batch.features[name][0]) for name in ONE_HOT] == [0, 0, 0, 0]
    assert data.teacher_log_loss() > 0
