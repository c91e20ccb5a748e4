"""A save that fails waits for no other process, and prints nothing of its own."""

import contextlib
import resource
import sys

import numpy as np
import orbax.checkpoint as ocp
import pytest

import tpu_embedding as te
from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.failed_saves import (
    meet_unless_failed,
    print_no_tracebacks,
)
from tpu_embedding.checkpoint.run_checkpoints import RunCheckpoints


def save_once(directory, state):
    te.save(directory, state)


def save_of_a_run(directory, state):
    checkpoints = RunCheckpoints(directory, kept=1)
    checkpoints.save(1, state, {})
    checkpoints.wait()


@pytest.mark.parametrize("save", [save_once, save_of_a_run])
def test_the_error_of_a_full_disk_is_the_only_output(save, tmp_path, caplog, capfd):
    with full_disk(), pytest.raises(CheckpointError, match="cannot be written"):
        save(tmp_path / "a", large_state())
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_errors_of_the_programs_own_orbax_are_logged(tmp_path, caplog):
    te.save(tmp_path / "a", {"x": np.zeros(3)})
    with (
        ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as own,
        full_disk(),
        pytest.raises(ValueError, match="Failed to write"),
    ):
        own.save(tmp_path / "a2", args=ocp.args.StandardSave(large_state()))
        own.wait_until_finished()
    assert any("Failed to run" in x.getMessage() for x in caplog.records)


def large_state():
    return {f"array_{i}": np.random.default_rng(i).random(5000) for i in range(10)}


@contextlib.contextmanager
def full_disk():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_other_errors_that_cannot_be_raised_are_printed(monkeypatch, tmp_path):
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    print_no_tracebacks(tmp_path)
    hook = sys.unraisablehook
    print_no_tracebacks(tmp_path)
    assert sys.unraisablehook is hook
    for error in (RuntimeError("Event loop is closed"), RuntimeError("other")):
        hook(Unraisable(error))
    assert [str(each.exc_value) for each in printed] == ["other"]


class Unraisable:
    def __init__(self, error):
        self.exc_value = error


def test_a_process_with_an_error_meets_no_other(monkeypatch):
    met = []
    monkeypatch.setattr(
        ocp.multihost, "get_barrier_sync_fn", lambda: lambda **names: met.append(names)
    )
    meet_unless_failed(key="written", timeout_ms=7)
    try:
        raise OSError
    except OSError:
        meet_unless_failed(key="end of the save", timeout_ms=7)
    assert met == [{"key": "written", "timeout_ms": 7}]
