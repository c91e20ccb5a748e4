"""Tests that metrics are read late, and the clock of the time without input."""

import dataclasses
import itertools
import time

import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embedding.tools.train import TrainingDivergedError
from tpu_embedding.tools.train.loop.step import StepMetrics
from tpu_embedding.tools.train.loop.step_meter import (
    MAX_SKIPPED_IN_A_ROW,
    InputWait,
    StepMeter,
)
from tpu_embedding.types import DynamicStats


def metrics_of(loss, rounds=1, out_of_range=0, is_finite=None, **ratios):
    return StepMetrics(
        loss=jnp.float32(loss),
        is_finite=jnp.isfinite(loss) if is_finite is None else jnp.array(is_finite),
        rounds=jnp.int32(rounds),
        out_of_range=jnp.int32(out_of_range),
        **{name: jnp.float32(ratio) for name, ratio in ratios.items()},
    )


def test_meter_sums_up():
    records = []
    meter = StepMeter(10, 2, records.append)
    for step, loss in enumerate([1.0, 2.0, 3.0, 5.0, 8.0], start=1):
        meter.add(step, metrics_of(loss, rounds=step, out_of_range=1))
    assert [r["step"] for r in records] == [2]  # steps 4 and 5 may still be running
    meter.finish(5)
    assert [r["step"] for r in records] == [2, 4, 5]
    assert [r["loss"] for r in records] == [1.5, 4.0, 8.0]
    assert [r["rounds"] for r in records] == [2, 4, 5]
    assert [r["out_of_range"] for r in records] == [2, 2, 1]
    rate = records[1]["steps_per_second"]
    assert records[1]["samples_per_second"] == pytest.approx(10 * rate)


def test_records_have_the_share_of_time_without_input(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    records = []
    meter = StepMeter(10, 3, records.append)
    # Each step takes 10 seconds, and its metrics are read two steps later.
    for step, waited in enumerate([9.0, 2.0, 5.0, 0.0, 0.0, 10.0, 0.0, 0.0], start=1):
        meter.input_wait.poll()
        now += waited
        meter.input_wait.stop()
        now += 10.0 - waited
        meter.add(step, metrics_of(1.0))
    # The first step is not timed, so its wait is left out, too.
    assert [r["input_wait"] for r in records] == [(2 + 5) / 20, 10 / 30]


def test_meter_averages_ratios():
    records = []
    meter = StepMeter(10, 2, records.append)
    for step, ratio in enumerate([0.25, 0.75], start=1):
        ratios = dict(unique_ratio=ratio, hottest_shard_over_mean=1 + 2 * ratio)
        meter.add(step, metrics_of(1.0, **ratios))
    meter.add(3, metrics_of(1.0))
    meter.finish(3)
    assert [r["unique_ratio"] for r in records] == [0.5, None]
    assert [r["hottest_shard_over_mean"] for r in records] == [2.0, None]


def test_meter_adds_up_the_counts_of_dynamic_tables():
    records = []
    meter = StepMeter(10, 2, records.append, places={"user": 128})
    for step in (1, 2, 3):
        stats = DynamicStats(
            ids=jnp.int32(10),
            hits=jnp.int32(2 * step),
            inserts=jnp.int32(3),
            evictions=jnp.int32(step - 1),
            not_admitted=jnp.int32(0),
            no_place=jnp.int32(1),
            used_rows=jnp.int32(32 * step),
        )
        metrics = metrics_of(1.0)
        meter.add(step, dataclasses.replace(metrics, dynamic_tables={"user": stats}))
    meter.finish(3)
    assert [r["dynamic_tables"] for r in records] == [
        {
            "user": {
                "ids": 20,
                "hits": 6,
                "inserts": 6,
                "evictions": 1,
                "not_admitted": 0,
                "no_place": 2,
                "load": 0.5,
            }
        },
        {
            "user": {
                "ids": 10,
                "hits": 6,
                "inserts": 3,
                "evictions": 2,
                "not_admitted": 0,
                "no_place": 1,
                "load": 0.75,
            }
        },
    ]


def test_first_step_after_a_pause_is_not_timed():
    records = []
    meter = StepMeter(10, 1, records.append)
    for step in (1, 2):
        meter.add(step, metrics_of(1.0))
        meter.flush()
    assert [r["steps_per_second"] for r in records] == [None, None]


@pytest.mark.parametrize("loss", [np.nan, np.inf])
def test_divergence_is_an_error(loss):
    meter = StepMeter(10, 100, lambda record: None)
    meter.add(1, metrics_of(1.0))
    meter.add(2, metrics_of(loss))
    with pytest.raises(TrainingDivergedError, match="step 2 is (nan|inf)"):
        meter.flush()


def test_gradients_that_are_not_finite_are_an_error():
    meter = StepMeter(10, 100, lambda record: None)
    meter.add(1, metrics_of(1.0, is_finite=False))
    with pytest.raises(
        TrainingDivergedError, match="gradients of step 1, or a learning rate"
    ):
        meter.flush()


def skipping_meter(records):
    return StepMeter(10, 4, records.append, non_finite="skip_step")


def test_skipped_steps_are_counted():
    records = []
    meter = skipping_meter(records)
    for step, loss in enumerate([1.0, np.nan, 3.0, np.inf, np.nan], start=1):
        meter.add(step, metrics_of(loss))
    meter.finish(5)
    assert [r["skipped"] for r in records] == [2, 1]
    assert [r["loss"] for r in records] == [2.0, None]


def test_too_many_skipped_steps_in_a_row_are_an_error():
    meter = skipping_meter([])
    steps = itertools.count(1)

    def add(loss, num_steps):
        for _ in range(num_steps):
            meter.add(next(steps), metrics_of(loss))
        meter.flush()

    add(np.nan, MAX_SKIPPED_IN_A_ROW - 1)
    add(1.0, 1)
    add(np.nan, MAX_SKIPPED_IN_A_ROW - 1)
    message = f"step {2 * MAX_SKIPPED_IN_A_ROW} is nan, and so were those of the 9"
    with pytest.raises(TrainingDivergedError, match=message):
        add(np.nan, 1)


class Output:
    """Stands for an output of a step in flight."""

    is_complete = False

    def is_ready(self):
        return self.is_complete


def test_time_with_a_step_in_flight_is_left_out(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    wait, output = InputWait(), Output()
    wait.note_step(output)
    assert not wait.poll()
    now = 3.0
    assert not wait.poll()
    output.is_complete = True
    now = 4.0
    assert wait.poll()  # The devices have nothing to do from here on.
    now = 9.0
    assert wait.poll()
    wait.stop()
    assert (wait.take(), wait.take()) == (5.0, 0.0)


def test_a_batch_that_comes_in_time_costs_nothing(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    wait = InputWait()
    wait.note_step(Output())
    wait.poll()
    now = 7.0
    wait.stop()
    now = 8.0
    assert wait.take() == 0.0


def test_waits_add_up(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    wait = InputWait()
    for _ in range(3):  # No step was ever dispatched.
        assert wait.poll()
        now += 2.0
        wait.stop()
        now += 1.0
    assert wait.take() == 6.0
