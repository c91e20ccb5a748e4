"""The step from the command to its parent process."""

import ctypes
import os
import signal
import sys

import pytest

from tpu_embedding.tools import cli
from tpu_embedding.tools.jobs import parent_command
from tpu_embedding.tools.jobs.exit_status import STOP_SIGNALS


def test_no_signal_is_lost_when_the_parent_takes_over(monkeypatch):
    """Handlers do not survive the exec, but what is blocked waits."""
    held = []

    def execv(path, command):
        held.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    monkeypatch.setattr(os, "execv", execv)
    try:
        parent_command.run_under_parent(["train", "synthetic"], is_program=True)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    assert set(STOP_SIGNALS) <= held[0]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_parent_does_not_inherit_what_libtpu_ignores(tmp_path, monkeypatch, capfd):
    """A run is stopped by SIGHUP even if a notebook with a TPU has started it."""
    parent = tmp_path / "parent.py"
    parent.write_text("print(open('/proc/self/status').read())")
    monkeypatch.setattr(parent_command, "_PARENT", str(parent))
    command = ["train", "synthetic", "--supervise", "always"]
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        ctypes.CDLL(None).signal(signal.SIGHUP, 1)  # SIG_IGN, unknown to Python
        assert cli.main(command) == 0
        assert not is_ignored(capfd, signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under `nohup`
        assert cli.main(command) == 0
        assert is_ignored(capfd, signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, former)


def is_ignored(capfd, number):
    mask = capfd.readouterr().out.partition("SigIgn:")[2].split()[0]
    return int(mask, 16) >> (number - 1) & 1
