"""Tests that batches are prepared early."""

import threading

import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.tools.data.batch import Batch, DataError
from tpu_embedding.tools.train.loop.read_ahead import train_batches
from tpu_embedding.tools.train.loop.step_meter import InputWait


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
