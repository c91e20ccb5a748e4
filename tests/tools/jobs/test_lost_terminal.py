"""A run that loses its terminal or its parent saves its state."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from tests.processes.test_processes import ROOT
from tpu_embedding.checkpoint.run_checkpoints import saved_steps
from tpu_embedding.tools.train.loop.run_directory import LOCK_FILE

pytestmark = [
    pytest.mark.full(every_case=True),
    pytest.mark.skipif(sys.platform != "linux", reason="uses its terminals"),
]

DEADLINE_SECONDS = 200  # for a busy machine

WITH_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
command = [sys.executable, "-m", "tpu_embedding.tools.cli", *sys.argv[1:]]
os.execv(sys.executable, command)
"""


def start_in_terminal(directory, supervise):
    """Starts an endless run as the leader of a terminal of its own.

    Returns:
      The process, and the terminal's other end.
    """
    command = ["train", "synthetic", "--devices", "1", "--supervise", supervise]
    command += ["--output-dir", str(directory)]
    for setting in (
        *("batch_size=16", "num_steps=1000000", "log_every=1", "checkpoint_every=0"),
        *("model.dim=4", "model.hidden_sizes=4", "data.num_evaluation_samples=16"),
    ):
        command += ["--set", setting]
    own_end, its_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", WITH_TERMINAL, *command],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
        start_new_session=True,
    )
    os.close(its_end)
    return process, own_end


@pytest.mark.parametrize(
    ("supervise", "lost"),
    [("never", "terminal"), ("always", "terminal"), ("always", "parent")],
)
def test_a_run_that_is_left_alone_saves_its_state(tmp_path, supervise, lost):
    process, terminal = start_in_terminal(tmp_path, supervise)
    output = b""
    with contextlib.suppress(OSError):  # the end of the output
        while b"step       3/" not in output:
            output += os.read(terminal, 4096)
    assert b"step       3/" in output, output.decode()
    if lost == "parent":
        process.kill()
    os.close(terminal)
    status = process.wait(timeout=DEADLINE_SECONDS)
    assert status == (75 if lost == "terminal" else -signal.SIGKILL)
    end = time.monotonic() + DEADLINE_SECONDS
    while (tmp_path / LOCK_FILE).exists():  # The worker outlives its parent.
        assert time.monotonic() < end
        time.sleep(0.02)
    (step,) = saved_steps(tmp_path / "checkpoints")
    assert step >= 3
