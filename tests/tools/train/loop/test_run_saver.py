"""A save that does not end in time ends the run; others are reported."""

import threading

import jax.numpy as jnp
import pytest
from flax import nnx

from tpu_embedding.tools.train.loop import run_saver
from tpu_embedding.tools.train.loop.run_saver import RunSaver

STATE = nnx.State({0: nnx.State({"weight": nnx.Param(jnp.ones(2))})})


class SlowCheckpoints:
    """Checkpoints that stay incomplete until `end` is set."""

    def __init__(self, where):
        self.end = threading.Event()
        self._where = where

    def save(self, step, state, description):
        if self._where == "save":
            self.end.wait(timeout=60)

    def wait(self):
        if self._where == "wait":
            self.end.wait(timeout=60)


class Report:
    def __init__(self):
        self.steps = []

    def saved(self, step):
        self.steps.append(step)


@pytest.fixture
def ends(monkeypatch):
    found = []
    monkeypatch.setattr(run_saver, "end_job", lambda *end: found.append(end))
    return found


@pytest.mark.parametrize("where", ["save", "wait"])
def test_a_save_that_hangs_ends_the_job(where, monkeypatch):
    checkpoints, report = SlowCheckpoints(where), Report()
    ends = []

    def end_job(*end):
        ends.append(end)
        checkpoints.end.set()  # Here the process ends.

    monkeypatch.setattr(run_saver, "end_job", end_job)
    saver = RunSaver(checkpoints, {}, report, max_seconds=0.05)
    saver.save(20, STATE)
    saver.wait()
    ((job, message, status),) = ends
    assert message.startswith("The checkpoint of step 20 is not complete after 0.05 s")
    assert "--set max_save_seconds=N" in message
    assert (job.num_processes, status) == (1, 1)


def test_a_save_in_time_is_reported_once(ends):
    checkpoints, report = SlowCheckpoints("wait"), Report()
    saver = RunSaver(checkpoints, {}, report, max_seconds=60)
    saver.save(20, STATE)
    saver.poll()
    assert not report.steps
    checkpoints.end.set()
    saver.wait()
    saver.poll()
    assert report.steps == [20]
    assert not ends
