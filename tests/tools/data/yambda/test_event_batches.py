"""Tests windows, ranks and batches against runs of MLPerf's reference."""

import jax
import numpy as np
import pytest

from tests.tools.data.yambda.test_event_samples import (
    VARIANTS,
    golden,
    golden_log,
    golden_samples,
)
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.yambda.event_batches import EventBatches
from tpu_embedding.tools.data.yambda.event_samples import EventSamples, HistorySettings


def open_batches(variant="benchmark", **changes):
    return EventBatches(golden_samples(variant), **({"batch_size": 6} | changes))


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert jax.tree.structure(one) == jax.tree.structure(other)


@pytest.mark.parametrize("variant", VARIANTS)
def test_windows_are_those_of_the_reference(variant):
    arrays = golden()
    data = open_batches(variant)
    assert data.num_windows == arrays[f"{variant}/num_windows"]
    windows = [data.window_anchors(window) for window in range(data.num_windows)]
    sizes = arrays[f"{variant}/window_sizes"]
    assert [len(window) for window in windows] == sizes.tolist()
    anchors = arrays[f"{variant}/anchor_positions"]
    expected = anchors[arrays[f"{variant}/window_anchors"]]
    np.testing.assert_array_equal(np.concatenate(windows), expected)
    assert data.num_evaluation_samples == sizes[-1]
    assert data.num_train_steps == sum(sizes[:-1] // 6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_are_those_of_the_reference(variant):
    arrays = golden()
    samples = golden_samples(variant)
    data = open_batches(variant, batch_size=3, num_ranks=3)
    anchors = arrays[f"{variant}/anchor_positions"]
    for rank in range(3):
        sizes = arrays[f"{variant}/rank{rank}_of_3.sizes"]
        starts = np.concatenate([[0], np.cumsum(sizes)])
        expected = anchors[arrays[f"{variant}/rank{rank}_of_3.anchors"]]
        for step in range(data.num_train_steps):
            window, position = data.place_of_step(step)
            assert data.num_batches(window) == sizes[window]
            anchor = expected[starts[window] + position]
            part = data.train_part(step, range(rank, rank + 1))
            del part["weight"]
            assert_same(part, samples.read(np.array([anchor])))


def test_a_step_has_the_same_anchors_for_any_number_of_ranks():
    one, two = open_batches(), open_batches(num_ranks=2)
    order = [0, 2, 4, 1, 3, 5]
    for step in range(one.num_train_steps):
        batch, dealt = one.train_batch(step), two.train_batch(step)
        for name in ("query_time", "action_timestamp", "label", "weight"):
            np.testing.assert_array_equal(batch[name][order], dealt[name])


def test_runs_resume_by_window_and_position():
    data, again = open_batches(), open_batches()
    steps = range(2 * data.num_train_steps)
    places = [data.place_of_step(step) for step in steps]
    half = len(places) // 2
    assert places[:half] == places[half:] == sorted(set(places))
    assert {window for window, _ in places} == set(range(data.num_windows - 1))
    for step in (half - 1, 4, 0):
        assert again.step_of_place(*places[step]) == step
        assert_same(data.train_batch(step), again.train_batch(step + half))
        assert_same(
            data.train_part(step, range(2, 5)),
            data._read(
                data.window_anchors(places[step][0])[
                    6 * places[step][1] + np.arange(2, 5)
                ]
            ),
        )
    with pytest.raises(ValueError, match="window must be from 0 to 3, got 4; the last"):
        data.step_of_place(4, 0)
    with pytest.raises(ValueError, match="position must be less than 2, .* got 2"):
        data.step_of_place(0, 2)


def test_the_evaluation_has_each_anchor_of_the_last_window_once():
    data = open_batches("no_minimum", batch_size=8)
    batches = list(data.evaluation_batches())
    weights = np.concatenate([batch["weight"] for batch in batches])
    assert weights.tolist() == [1] * 45 + [0] * 3
    labels = np.concatenate([batch["label"] for batch in batches])
    expected = golden()["no_minimum/candidate.item_action_weight"]
    number = golden()["no_minimum/window_anchors"][-45:]
    assert labels.tolist() == expected[number].tolist() + [labels[44]] * 3
    assert {len(batch["query_time"]) for batch in batches} == {8}


def test_too_few_samples_are_refused():
    for sizes in ({"batch_size": 40}, {"window_seconds": 10**7}):
        with pytest.raises(DataError, match="a window before the last must have"):
            open_batches(**sizes)
    with pytest.raises(ValueError, match="num_ranks must divide batch_size 6, got 4"):
        open_batches(num_ranks=4)
    with pytest.raises(ValueError, match="batch_size must be an int of at least 1"):
        open_batches(batch_size=0)


def test_windows_without_an_anchor_have_no_batch():
    settings = HistorySettings(history_length=9, min_history=0)
    data = EventBatches(
        EventSamples(golden_log(), settings=settings), batch_size=6, window_seconds=600
    )
    sizes = [len(data.window_anchors(window)) for window in range(data.num_windows)]
    assert 0 in sizes and sum(sizes) == 262
    for step in range(data.num_train_steps):
        window, position = data.place_of_step(step)
        assert sizes[window] >= 6 * (position + 1)
        assert data.step_of_place(window, position) == step


def test_windows_from_the_last_anchor_back():
    samples = golden_samples("no_minimum")
    times = golden_log().times
    one, other = (
        open_batches("no_minimum"),
        open_batches("no_minimum", whole_window="last"),
    )
    windows = [other.window_anchors(window) for window in range(other.num_windows)]
    assert sorted(np.concatenate(windows)) == samples.anchors.tolist()
    end = times[samples.anchors].max()
    for window, anchors in enumerate(windows):
        assert (anchors[1:] > anchors[:-1]).all()
        days = (end - times[anchors]) // 86_400
        assert set(days) == {other.num_windows - 1 - window}
    first = times[one.evaluation_anchors]
    assert np.ptp(first) < np.ptp(times[other.evaluation_anchors]) < 86_400
    with pytest.raises(ValueError, match="whole_window must be 'first' or 'last', got"):
        open_batches(whole_window="middle")
