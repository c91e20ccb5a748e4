"""Tests Criteo's synthetic rows: shapes, teacher and memory, and a sample as a file."""

import math
import tracemalloc

import chex
import numpy as np
import pytest

from tpu_embedding.tools.data.criteo import Criteo
from tpu_embedding.tools.data.criteo_format import CATEGORY_NAMES
from tpu_embedding.tools.data.synthetic_criteo import (
    SyntheticCriteo,
    write_criteo_sample,
)
from tpu_embedding.tools.data.teacher import cross_entropy

MULTI_HOT = {"vocabulary_sizes": [100, 3], "valences": [5, 1]}
BAD = {
    "batch_size": ({"batch_size": 0}, r"\.batch_size .* got 0"),
    "seed": ({"seed": -1}, "seed .* got -1"),
    "size_1": ({"vocabulary_sizes": 1}, "from 2 .* got 1; row 0 stands for an empty"),
    "size_of_one": ({"vocabulary_sizes": [9] * 25 + [0]}, "from 2 .* got 0"),
    "sizes_27": ({"vocabulary_sizes": [9] * 27}, "at most 26, got 27 and 27"),
    "size_float": ({"vocabulary_sizes": 9.0}, r"must be ints .* got 9\.0"),
    "valence": ({"valences": 0}, r"valences\['cat_00'\] must be .* got 0"),
    "valences": ({"valences": [1, 2]}, "must be of one length.* got 26 and 2"),
    "click_rate": (
        {"click_rate": 1.0},
        r"click_rate must be between 0 and 1, got 1\.0",
    ),
    "zipf_exponent": ({"zipf_exponent": -1.0}, "exponent must be a finite number"),
    "evaluation": ({"num_evaluation_samples": 0}, "num_evaluation_samples .* got 0"),
    "all_at_once": ({"batch_size": 0, "vocabulary_sizes": 1}, "batch.*vocabulary"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        SyntheticCriteo(**({"batch_size": 4, "vocabulary_sizes": 9} | arguments))


def test_rows_have_the_shape_of_the_log():
    sizes = [2 + 7 * n for n in range(26)]
    data = SyntheticCriteo(batch_size=512, vocabulary_sizes=sizes)
    batch = data.train_batch(3)
    assert list(batch.features) == list(CATEGORY_NAMES)
    assert data.vocabulary_sizes == dict(zip(CATEGORY_NAMES, sizes, strict=True))
    for ids, size in zip(batch.features.values(), sizes, strict=True):
        assert ids.shape == (512,) and ids.dtype == np.int32
        assert ids.min() >= 0 and size // 2 <= ids.max() < size
    assert batch.dense.shape == (512, 13) and batch.dense.dtype == np.float32
    assert batch.dense.min() == 0 and np.isfinite(batch.dense).all()
    assert batch.labels.shape == (512,) and set(batch.labels) == {0.0, 1.0}


def test_multi_hot_rows():
    data = SyntheticCriteo(batch_size=64, **MULTI_HOT)
    batch = data.train_batch(0)
    assert {name: ids.shape for name, ids in batch.features.items()} == {
        "cat_00": (64, 5),
        "cat_01": (64,),
    }
    for name, size in data.vocabulary_sizes.items():
        ids = batch.features[name]
        assert ids.dtype == np.int32 and 0 <= ids.min() <= ids.max() < size


def test_memory_does_not_grow_with_the_vocabulary():
    largest = 2**31 - 2
    data = SyntheticCriteo(
        batch_size=64,
        vocabulary_sizes=[largest, largest],
        valences=[5, 1],
        zipf_exponent=0.0,
    )
    tracemalloc.start()
    batch = data.train_batch(0)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Calibrating the click rate draws 16,384 samples of six ids.
    assert peak_bytes < 16e6
    assert batch.features["cat_00"].max() > largest // 2


def test_labels_are_drawn_from_the_true_probabilities():
    data = SyntheticCriteo(batch_size=4000, num_evaluation_samples=1000, **MULTI_HOT)
    samples, p = data._held_out
    for row in range(50):
        many, one = (ids[row] for ids in samples.features.values())
        logit = data._bias + samples.dense[row] @ data._dense_weights
        logit += 0.3 * sum(_effect(data, 0, i) for i in many) / math.sqrt(5)
        logit += 0.3 * _effect(data, 1, one)
        assert p[row] == pytest.approx(1 / (1 + math.exp(-logit)), rel=1e-9)
    error = (samples.labels - p).sum()
    # Tolerance: five standard deviations of a sum of independent draws.
    assert abs(error) < 5 * np.sqrt((p * (1 - p)).sum())
    rate = np.mean(samples.labels, dtype=np.float64)
    assert data.teacher_log_loss() < cross_entropy(rate, rate)


def _effect(data, feature, row_id):
    """Returns an id's effect, by splitmix64 in Python's integers; its variance is 1."""
    mask = 2**64 - 1
    key = ((feature + 1) * 2**32 + int(row_id)) ^ int(data._salt)
    x = (key + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return math.sqrt(3) * ((x ^ (x >> 31)) / 2**63 - 1)


def test_effects_have_mean_0_and_deviation_1():
    data = SyntheticCriteo(
        batch_size=1,
        vocabulary_sizes=[10**9, 10**9],
        valences=[4, 1],
        zipf_exponent=0.0,
    )
    inputs = data._draw_inputs(np.random.default_rng(0), 50_000)
    logits = inputs.logits - inputs.dense @ data._dense_weights
    # The logit is a sum of two effects with a standard deviation of 0.3.
    # Tolerance: five standard errors of 50,000 draws.
    assert abs(logits.mean()) < 5 * 0.3 * math.sqrt(2 / 50_000)
    assert logits.std() == pytest.approx(0.3 * math.sqrt(2), rel=0.02)


def test_batches_depend_on_seed_and_step_alone():
    first, again, reseeded = (
        SyntheticCriteo(batch_size=64, vocabulary_sizes=50, seed=seed)
        for seed in (0, 0, 1)
    )
    again.train_batch(1)
    expected = first.train_batch(2)
    chex.assert_trees_all_equal(again.train_batch(2), expected)
    assert (reseeded.train_batch(2).dense != expected.dense).any()
    assert (first.train_batch(1).dense != expected.dense).any()


def test_teacher_depends_on_the_seed():
    effects = []
    for seed in (0, 1):
        data = SyntheticCriteo(batch_size=1, vocabulary_sizes=1000, seed=seed)
        # Both teachers label the same samples.
        inputs = data._draw_inputs(np.random.Generator(np.random.Philox(5)), 5000)
        effects.append(inputs.logits - inputs.dense @ data._dense_weights)
    assert abs(np.corrcoef(effects)[0, 1]) < 0.6
    # The logit is a sum of 26 independent effects with a standard deviation of 0.3.
    # Hot ids make the estimate vary by a few percent.
    assert effects[0].std() == pytest.approx(0.3 * math.sqrt(26), rel=0.15)


def test_labels_can_be_learned():
    data = SyntheticCriteo(
        batch_size=40_000, vocabulary_sizes=200, num_evaluation_samples=10_000
    )
    rate = np.mean(data._held_out[0].labels, dtype=np.float64)
    assert data.teacher_log_loss() < 0.8 * cross_entropy(rate, rate)
    train, (evaluation,) = data.train_batch(0), data.evaluation_batches()
    score = np.zeros(40_000)
    for name in CATEGORY_NAMES:
        shown = np.bincount(train.features[name], minlength=200)
        clicked = np.bincount(train.features[name], train.labels, minlength=200)
        score += ((clicked + 2) / (shown + 8))[evaluation.features[name]]
    used_mask = evaluation.weights == 1
    # Without a common teacher, the correlation would be 0 within 0.01.
    assert np.corrcoef(score[used_mask], evaluation.labels[used_mask])[0, 1] > 0.3


def test_written_sample_is_read_back(tmp_path):
    path = tmp_path / "sample.txt"
    write_criteo_sample(path, num_rows=5000, seed=2)
    assert path.read_bytes().count(b"\n") == 5000
    data = Criteo(
        path,
        batch_size=4096,
        evaluation_path=path,
        vocabulary_sizes=2**30,
        block_size=7,
    )
    batch = next(data.evaluation_batches())
    source = SyntheticCriteo(batch_size=4096, vocabulary_sizes=1000, seed=2)
    expected = source.train_batch(0)
    np.testing.assert_array_equal(batch.labels, expected.labels)
    np.testing.assert_array_equal(batch.dense, expected.dense)
    for name in CATEGORY_NAMES:
        ids, rows = expected.features[name], batch.features[name]
        assert ((ids == 0) == (rows == 0)).all() and (ids == 0).any()
        # Equal ids map to equal rows, and different ids to different rows.
        pairs = np.unique(np.stack([ids, rows]), axis=1)
        assert pairs.shape[1] == len(np.unique(ids)) == len(np.unique(rows))
    forms = {line.split("\t")[1] for line in path.read_text().splitlines()}
    assert {"", "-1", "0"} < forms


def test_written_sample_has_exactly_the_rows_asked_for(tmp_path):
    for num_rows in (1, 4096, 4097):
        write_criteo_sample(tmp_path / "sample.txt", num_rows=num_rows)
        assert (tmp_path / "sample.txt").read_bytes().count(b"\n") == num_rows
    with pytest.raises(ValueError, match="num_rows .* got 0"):
        write_criteo_sample(tmp_path / "sample.txt", num_rows=0)
