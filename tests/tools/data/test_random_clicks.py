"""Tests synthetic clicks at full scale: shapes, teacher and memory."""

import math
import tracemalloc

import chex
import numpy as np
import pytest

from tpu_embedding.tools.data.random_clicks import RandomClicks


def small(**changes):
    arguments = {
        "batch_size": 64,
        "seed": 3,
        "vocabulary_sizes": {"a": 100, "b": 3},
        "valences": {"a": 5, "b": 1},
        "num_dense": 2,
        "num_evaluation_samples": 1000,
    }
    return RandomClicks(**(arguments | changes))


def test_shapes_dtypes_and_ranges():
    batch = small().train_batch(0)
    assert {name: ids.shape for name, ids in batch.features.items()} == {
        "a": (64, 5),
        "b": (64,),
    }
    for name, size in small().vocabulary_sizes.items():
        ids = batch.features[name]
        assert ids.dtype == np.int32
        assert ids.min() >= 0 and ids.max() < size
    assert batch.dense.shape == (64, 2) and batch.dense.dtype == np.float32
    assert batch.labels.dtype == np.float32 and set(batch.labels) == {0.0, 1.0}
    assert small(num_dense=0).train_batch(0).dense is None


def test_train_batch_depends_on_seed_and_step_alone():
    data = small()
    first = data.train_batch(5)
    data.train_batch(6)
    chex.assert_trees_all_equal(small().train_batch(5), first)
    for other in (data.train_batch(6), small(seed=4).train_batch(5)):
        assert (other.features["a"] != first.features["a"]).any()


def test_memory_does_not_grow_with_the_vocabulary():
    largest = 2**31 - 2
    data = small(vocabulary_sizes={"a": largest, "b": largest}, zipf_exponent=0.0)
    tracemalloc.start()
    batch = data.train_batch(0)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Calibrating the click rate draws 16,384 samples of six ids.
    assert peak_bytes < 16e6
    assert batch.features["a"].max() > largest // 2


def test_labels_are_drawn_from_the_true_probabilities():
    data = small(batch_size=4000, effect_scale=1.0)
    samples, p = data._held_out
    effects = {}
    for name, ids in samples.features.items():
        hashed = np.unique(ids)
        for value in hashed:
            effects[name, value] = _effect(data, name, value)
    for row in range(50):
        logit = data._bias + samples.dense[row] @ data._dense_weights
        logit += sum(effects["a", i] for i in samples.features["a"][row]) / math.sqrt(5)
        logit += effects["b", samples.features["b"][row]]
        assert p[row] == pytest.approx(1 / (1 + math.exp(-logit)), rel=1e-9)
    error = (samples.labels - p).sum()
    # Tolerance: five standard deviations of a sum of independent draws.
    assert abs(error) < 5 * np.sqrt((p * (1 - p)).sum())
    assert data.teacher_log_loss() < data.base_rate_log_loss()


def _effect(data, name, row_id):
    """Returns an id's effect, by splitmix64 in Python's integers; its variance is 1."""
    mask = 2**64 - 1
    x = ((int(row_id) ^ int(data._salts[name])) + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return math.sqrt(3) * ((x ^ (x >> 31)) / 2**63 - 1)


def test_effects_have_mean_0_and_deviation_1():
    data = small(
        batch_size=50_000,
        vocabulary_sizes={"a": 10**9, "b": 10**9},
        valences={"a": 4, "b": 1},
        num_dense=0,
        zipf_exponent=0.0,
    )
    logits = data._draw_inputs(np.random.default_rng(0), 50_000).logits
    # The logit is a sum of two effects with a standard deviation of 0.3.
    # Tolerance: five standard errors of 50,000 draws.
    assert abs(logits.mean()) < 5 * 0.3 * math.sqrt(2 / 50_000)
    assert logits.std() == pytest.approx(0.3 * math.sqrt(2), rel=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0, "seed": -1}, "batch_size.*seed"),
        ({"vocabulary_sizes": {"a": 0, "b": 1}}, r"vocabulary_sizes\['a'\] .* got 0"),
        ({"valences": {"a": 1, "b": 0}}, r"valences\['b'\] must be .* got 0"),
        ({"valences": {"a": 1}}, r"must name the features .* got \['a'\]"),
        ({"num_dense": -1}, "num_dense must be an int of at least 0, got -1"),
        ({"effect_scale": float("nan")}, "effect_scale must be a finite .* got nan"),
        ({"click_rate": 1.0}, "click_rate must be between 0 and 1, got 1.0"),
        ({"zipf_exponent": -1.0}, "exponent must be a finite number"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)
