"""Tests the clock that runs while the devices wait for input."""

import time

from tpu_embedding.tools.train.loop.input_wait import InputWait


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
