"""A slow step prints the stacks of all threads, once; other waits print nothing."""

import functools
import inspect
import threading
import time

import jax
import pytest

from tests.conftest import mesh_of
from tests.tools.train.loop.test_step_meter import metrics_of
from tests.tools.train.loop.test_training_loop import tiny_config
from tpu_embedding.tools.data.synthetic_clicks import SyntheticClicks
from tpu_embedding.tools.jobs import slow_steps
from tpu_embedding.tools.jobs.slow_steps import SlowStepWatch
from tpu_embedding.tools.train import train
from tpu_embedding.tools.train.loop import training_loop
from tpu_embedding.tools.train.loop.step_meter import StepMeter

DEADLINE_SECONDS = 60


@pytest.fixture
def start(tmp_path):
    """Starts a watch that takes 50 ms for slow; yields it and its output."""
    watches = []

    def start():
        file = (tmp_path / "stacks").open("a+")
        watch = SlowStepWatch(min_seconds=0.05, look_seconds=0.005, file=file)
        watches.append((watch, file))
        return watch, lambda: (tmp_path / "stacks").read_text()

    yield start
    for watch, file in watches:
        watch.close()
        file.close()


def complete(watch, num_steps, first=1):
    for step in range(first, first + num_steps):
        watch.completed(step)


def await_text(read, text):
    end = time.monotonic() + DEADLINE_SECONDS
    while text not in read():
        assert time.monotonic() < end, read()
        threading.Event().wait(0.005)


def waits_long_enough():
    """Waits for ten times the time of a slow step."""
    threading.Event().wait(0.5)


def test_a_slow_step_prints_the_stacks_once(start):
    watch, read = start()
    complete(watch, 8)
    await_text(read, "test_slow_steps.py")
    first = read()
    assert first.startswith("step 9 has taken 0.")
    assert "s is usual; the stacks of all threads:\n" in first
    waits_long_enough()
    assert read() == first
    complete(watch, 1, first=9)  # The next step may be slow, too.
    await_text(read, "step 10 has taken")


def test_a_pause_is_no_slow_step(start):
    watch, read = start()
    complete(watch, 8)
    watch.pause()
    waits_long_enough()
    assert read() == ""


def test_a_slow_step_after_a_pause_is_reported(start):
    watch, read = start()
    complete(watch, 8)
    watch.pause()
    watch.resume()
    await_text(read, "step 9 has taken 0.")


def test_steps_between_pauses_tell_the_usual_time(start):
    watch, read = start()
    for step in range(1, slow_steps._MIN_STEPS + 2):
        watch.completed(step)
        watch.pause()
        watch.resume()
    await_text(read, f"step {slow_steps._MIN_STEPS + 2} has taken")


def test_the_first_step_of_a_run_is_no_slow_step(start):
    watch, read = start()
    watch.resume()
    complete(watch, slow_steps._MIN_STEPS)
    waits_long_enough()
    assert read() == ""


def test_a_reader_that_stalls_after_a_save_is_reported(tmp_path, monkeypatch):
    """It prepares the batch of step 7 while step 6 is saved and evaluated."""
    stacks = tmp_path / "stacks"
    train_batch = SyntheticClicks.train_batch

    def stall(self, step):
        if step == 6:
            await_text(stacks.read_text, "step 7 has taken")
        return train_batch(self, step)

    monkeypatch.setattr(SyntheticClicks, "train_batch", stall)
    config = tiny_config("num_steps=7", "checkpoint_every=6", "evaluate_every=6")
    with stacks.open("a+") as file:
        watch = functools.partial(
            SlowStepWatch, min_seconds=0.05, look_seconds=0.005, file=file
        )
        monkeypatch.setattr(training_loop, "SlowStepWatch", watch)
        assert train(config, tmp_path / "run", mesh=mesh_of(1)).step == 7


def test_few_steps_tell_no_usual_time(start):
    watch, read = start()
    complete(watch, slow_steps._MIN_STEPS)  # One interval fewer.
    waits_long_enough()
    assert read() == ""


def test_a_compilation_is_no_slow_step(start):
    function = inspect.unwrap(jax._src.compiler.backend_compile_and_load)
    file = function.__code__.co_filename
    assert file.endswith(slow_steps._COMPILER)
    compiler = {}
    exec(compile("def run(function): function()", file, "exec"), compiler)
    watch, read = start()
    complete(watch, 8)
    compiler["run"](waits_long_enough)
    watch.pause()
    assert read() == ""


def test_the_meter_tells_the_watch():
    calls = []

    class Watch:
        def completed(self, step):
            calls.append(step)

        def pause(self):
            calls.append("pause")

    meter = StepMeter(10, 100, lambda record: None, watch=Watch())
    for step in (1, 2, 3):
        meter.add(step, metrics_of(1.0))
    assert calls == [1]
    meter.flush()
    assert calls == [1, 2, 3, "pause"]
