"""Runs of two real processes: they equal one, and stop at the same step."""

import pytest

from tests.processes.test_processes import free_port
from tests.tools.train.runs import (
    SMALL,
    losses_of,
    metrics_of,
    run,
    start_command,
    wait_for_line,
)


def start_two(directory, *arguments, settings=SMALL):
    place = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", 2]
    return [
        start_command(
            directory,
            *("--devices", 4, *place, "--process-id", process, *arguments),
            settings=settings,
        )
        for process in range(2)
    ]


def end(job):
    outputs = [process.communicate(timeout=120) for process in job]
    return [process.returncode for process in job], outputs


@pytest.mark.exhaustive
def test_two_processes_equal_one(tmp_path):
    statuses, outputs = end(start_two(tmp_path / "two"))
    assert statuses == [0, 0], outputs
    assert "train" not in outputs[1][0]  # The first one prints.
    result = run(tmp_path / "one", devices=4)
    assert metrics_of(tmp_path / "two") == pytest.approx(result.metrics, abs=1e-5)
    one = losses_of(tmp_path / "one")
    assert losses_of(tmp_path / "two") == pytest.approx(one, abs=1e-6)


@pytest.mark.full
def test_a_signal_to_one_process_stops_both_at_a_step(tmp_path):
    settings = [*SMALL, "num_steps=3000", "checkpoint_every=0", "log_every=20"]
    job = start_two(tmp_path, settings=settings)
    wait_for_line(job[0], "train")
    job[1].terminate()
    statuses, outputs = end(job)
    assert statuses == [75, 75], outputs
    (step,) = (path.name for path in (tmp_path / "checkpoints").iterdir())
    assert f"stopped at step {step}" in outputs[0][0]
    resumed = run(
        tmp_path, "num_steps=3000", existing_run="resume", stop_at=int(step) + 4
    )
    assert resumed.step == int(step) + 4
