"""The child as a process: its events, a crash, a hang, and a second start."""

import os
import select
import signal
import subprocess
import sys

import pytest

from tests.conftest import needs_kernels
from tpu_embedding.tools.doctor.protocol import (
    AllDone,
    CaseEnded,
    CaseStarted,
    parse_line,
)

pytestmark = [needs_kernels, pytest.mark.full]

COMMAND = [
    *(sys.executable, "-m", "tpu_embedding.tools.doctor.child"),
    *("--backend", "interpreter", "--part", "correctness", "--tier", "quick"),
]
READ, POOL = "read, dim 32", "pool, dim 32"
DEADLINE_SECONDS = 120
"""For events that come; a slow machine needs some seconds."""

QUIET_SECONDS = 6
"""For an event that must not come; without the fault it takes one."""


class Child:
    """The process, and its events."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
            bufsize=0,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def next_event(self, seconds=DEADLINE_SECONDS):
        """Returns the next event; None at the end of the output, or in time."""
        stream = self.process.stdout
        assert stream is not None
        if not select.select([stream], [], [], seconds)[0]:
            return None
        line = stream.readline()
        if not line:
            return None
        event = parse_line(line.decode())
        assert event is not None, line  # Libraries print to stderr.
        return event

    def read_until(self, case):
        """Returns the cases that passed before the one that starts."""
        passed = []
        while (event := self.next_event()) != CaseStarted(case=case, capability=case):
            assert event is not None
            if isinstance(event, CaseEnded):
                assert event.ok
                passed.append(event.case)
        return passed


def test_a_crash_ends_the_process():
    with Child("--fault", "crash:pool") as child:
        assert child.read_until(POOL) == [READ]
        assert child.next_event() is None
        assert child.process.wait(DEADLINE_SECONDS) == -signal.SIGABRT


def test_a_hang_leaves_the_case_open():
    with Child("--fault", "hang:pool") as child:
        assert child.read_until(POOL) == [READ]
        assert child.next_event(QUIET_SECONDS) is None
        assert child.process.poll() is None


def test_a_second_start_runs_the_rest():
    step = "step, dim 32"
    arguments = ("--skip-until-after", "write, dim 32", "--fault", "zero_rows:pool")
    with Child(*arguments) as child:
        assert child.read_until(step) == []
        ended = child.next_event()
        assert isinstance(ended, CaseEnded) and ended.case == step
        assert not ended.ok and "(zeros)" in str(ended.problem)
        assert child.next_event() == AllDone()
        assert child.process.wait(DEADLINE_SECONDS) == 0
