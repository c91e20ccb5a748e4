"""The step from the command to its parent process."""

import os
import signal

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
