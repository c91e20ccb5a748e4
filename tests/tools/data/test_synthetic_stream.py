"""Tests the log whose ids come and go: births, life times, identity and teacher."""

import chex
import numpy as np
import pytest

from tpu_embedding.tools.data.synthetic_stream import SyntheticStream
from tpu_embedding.tools.data.teacher import cross_entropy


def small(**changes):
    arguments = {
        "batch_size": 2048,
        "live_ids": {"user": 40, "item": 20},
        "life_steps": 10,
        "evaluation_step": 30,
        "num_evaluation_samples": 20_000,
        "zipf_exponent": 0.5,
    }
    return SyntheticStream(**(arguments | changes))


def test_batch_depends_on_seed_and_step_alone():
    data = small()
    first = data.train_batch(5)
    data.train_batch(6)
    chex.assert_trees_all_equal(first, small().train_batch(5))
    other = small(seed=1).train_batch(5).features["user"]
    assert not set(first.features["user"]) & set(other)


def test_ids_live_for_the_life_time_and_never_return():
    data = small()
    seen = [set(data.train_batch(step).features["user"]) for step in range(41)]
    for step in range(30):
        assert len(seen[step]) == 40
        deaths = len(seen[step] - seen[step + 1])
        assert 3 <= deaths <= 5, "births are spread evenly"
        in_a_life_time = set().union(*seen[step : step + 11])
        assert len(in_a_life_time) == 2 * 40, "each place changes once"
        assert not seen[step] & seen[step + 10]


@pytest.mark.parametrize("name", ["user", "item"])
def test_numbers_name_the_ids(name):
    hashed, numbered = small(), small(vocabulary="unlimited")
    number_of = {}
    for step in range(25):
        left, right = hashed.train_batch(step), numbered.train_batch(step)
        np.testing.assert_array_equal(left.labels, right.labels)
        for key, number in zip(left.features[name], right.features[name], strict=True):
            assert number_of.setdefault(key, number) == number
    assert len(set(number_of.values())) == len(number_of)
    assert 0 <= min(number_of.values())
    assert max(number_of.values()) < numbered.num_ids(name, 25)


@pytest.mark.parametrize("name", ["user", "item"])
def test_a_hashed_table_is_as_large_as_a_dynamic_one(name):
    wide, hashed = small(), small(vocabulary="hashed")
    rows = hashed.vocabulary_sizes[name]
    assert rows == wide.vocabulary_sizes[name].num_places * (128 + 16) // 128
    left, right = wide.train_batch(25), hashed.train_batch(25)
    np.testing.assert_array_equal(left.labels, right.labels)
    row_of = dict(zip(left.features[name], right.features[name], strict=True))
    for key, row in zip(left.features[name], right.features[name], strict=True):
        assert row_of[key] == row
    assert 0 <= min(row_of.values()) and max(row_of.values()) < rows
    # As throwing balls into bins at random does.
    expected = rows * (1 - (1 - 1 / rows) ** len(row_of))
    assert abs(len(set(row_of.values())) / expected - 1) < 0.15


def test_capacity_follows_the_living_ids():
    sizes = small(capacity_ratio=1.25).vocabulary_sizes
    assert (sizes["user"].capacity, sizes["item"].capacity) == (50, 25)


def test_teacher_is_better_than_a_constant():
    data = small()
    labels = np.concatenate([b.labels for b in data.evaluation_batches()])[:20_000]
    assert abs(labels.mean() - 0.3) < 0.02
    constant = np.mean(cross_entropy(labels, np.full(labels.shape, labels.mean())))
    assert data.teacher_log_loss() < 0.9 * constant


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="life_steps") as caught:
        small(life_steps=0, live_ids={"user": 0}, vocabulary="any", capacity_ratio=0.5)
    for part in ("live_ids must name", "vocabulary must be one", "capacity_ratio must"):
        assert part in str(caught.value)
