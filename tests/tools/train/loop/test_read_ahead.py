"""Tests that batches are prepared early and metrics are read late."""

import itertools
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.tools.data.batch import Batch, DataError
from tpu_embedding.tools.train.loop.input_wait import InputWait
from tpu_embedding.tools.train.loop.read_ahead import (
    MAX_SKIPPED_IN_A_ROW,
    StepMeter,
    TrainingDivergedError,
    train_batches,
)
from tpu_embedding.tools.train.loop.step import StepMetrics


class Counter:
    """A data set whose ids equal the number of the step."""

    batch_size = 2

    def __init__(self, damaged_step=None):
        self.damaged_step = damaged_step

    def train_part(self, step, samples):
        assert samples == range(2)
        if step == self.damaged_step:
            raise DataError(f"file, line {step}: damaged")
        return Batch(
            features={"id": np.full(2, step, np.int32)},
            labels=np.zeros(2, np.float32),
            weights=np.ones(2, np.float32),
        )


def make_plan():
    table = te.TableConfig(vocabulary_size=5, dim=2, name="id")
    return te.make_plan({"id": te.FeatureConfig(table=table)}, mesh_of(2))


def metrics_of(loss, rounds=1, out_of_range=0, is_finite=None, **ratios):
    return StepMetrics(
        loss=jnp.float32(loss),
        is_finite=jnp.isfinite(loss) if is_finite is None else jnp.array(is_finite),
        rounds=jnp.int32(rounds),
        out_of_range=jnp.int32(out_of_range),
        **{name: jnp.float32(ratio) for name, ratio in ratios.items()},
    )


def test_batches_come_in_order():
    batches = list(train_batches(Counter(), make_plan(), range(1, 5)))
    assert [step for step, _ in batches] == [1, 2, 3, 4]
    assert [int(batch.features["id"][0]) for _, batch in batches] == [1, 2, 3, 4]
    assert list(train_batches(Counter(), make_plan(), range(0))) == []


def test_errors_of_the_thread_reach_the_loop():
    batches = train_batches(Counter(damaged_step=2), make_plan(), range(5))
    assert next(batches)[0] == 0
    assert next(batches)[0] == 1
    with pytest.raises(DataError, match="line 2: damaged"):
        next(batches)


def test_ids_outside_their_table_name_the_batch():
    with pytest.raises(DataError, match=r"Training batch 5: .*'id'.*\[0, 5\)"):
        list(train_batches(Counter(), make_plan(), range(4, 6)))


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


def test_the_clock_runs_while_the_loop_waits_for_a_batch():
    release = threading.Event()

    class Slow(Counter):
        def train_part(self, step, samples):
            if step:
                assert release.wait(timeout=60)
            return super().train_part(step, samples)

    wait = InputWait()
    batches = train_batches(Slow(), make_plan(), range(2), input_wait=wait)
    next(batches)
    wait.take()
    threading.Timer(0.2, release.set).start()
    next(batches)
    assert 0.1 < wait.take() < 60  # The timer may start before the loop asks.


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
    with pytest.raises(TrainingDivergedError, match="gradients of step 1 are not fin"):
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
