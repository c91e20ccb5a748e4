"""Tests the window of steps that a run profiles."""

import jax
import jax.numpy as jnp
import pytest

from tests.tools.train.run_files import recorded_steps
from tpu_embedding.tools.train.errors import ConfigError
from tpu_embedding.tools.train.loop.profiling import (
    PROFILE_DIR,
    ProfileWindow,
    StepProfiler,
)


@pytest.mark.parametrize(
    "text", ["", ":", "3", "3:", ":3", "a:b", "-1:3", "1.5:3", "3:3", "4:3", "1:2:3"]
)
def test_no_window(text):
    with pytest.raises(ValueError, match="A profile needs START:STOP") as error:
        ProfileWindow.parse(text)
    assert text in str(error.value)


def test_a_window_beyond_the_run_is_refused():
    ProfileWindow(3, 8).check_within(8)
    with pytest.raises(ConfigError, match=r"3:9 must .* 8 steps; .* at most 8"):
        ProfileWindow(3, 9).check_within(8)


def run_steps(window, directory, steps):
    lines = []
    step_of = jax.jit(lambda x: x + 1)
    with StepProfiler(window, directory, lines.append, steps[0]) as profiler:
        for step in steps:
            assert profiler.run(step, step_of, jnp.float32(step)) == step + 1
    return lines


@pytest.mark.parametrize(
    ("steps", "recorded"),
    [
        (range(8), [2, 3, 4]),
        pytest.param(range(3, 8), [3, 4], marks=pytest.mark.full),  # resumed inside
        pytest.param(range(4), [2, 3], marks=pytest.mark.full),  # stopped inside
    ],
)
def test_the_steps_of_the_window_are_recorded(steps, recorded, tmp_path):
    lines = run_steps(ProfileWindow(2, 5), tmp_path, steps)
    assert recorded_steps(tmp_path / PROFILE_DIR) == recorded
    assert len(lines) == 1 and f"xprof --logdir {tmp_path / PROFILE_DIR}" in lines[0]


def test_each_process_of_a_job_has_a_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    profiler = StepProfiler(None, tmp_path, print, 0)
    assert profiler.directory == tmp_path / PROFILE_DIR / "process-1"


def test_no_window_records_nothing(tmp_path):
    assert run_steps(None, tmp_path, range(3)) == []
    assert list(tmp_path.iterdir()) == []


def test_a_window_before_the_first_step_is_reported(tmp_path):
    """A restarted run has the same options, and must not fail."""
    lines = run_steps(ProfileWindow(2, 5), tmp_path, range(5, 8))
    assert lines == ["no profile: steps 2:5 were done before"]
    assert list(tmp_path.iterdir()) == []
