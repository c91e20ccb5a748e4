"""A child process that answers questions, each within a time limit.

A TPU belongs to one process at a time, and a kernel may hang or halt it. So the doctor
leaves all work on the devices to a child, asks it one question at a time, and kills it
if an answer does not come. Every wait here has an end, so the parent never hangs.

Questions and answers are JSON values, one line each.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

_KILL_SECONDS: Final = 10.0
"""Maximum wait for a killed process. One that waits for a device may never end."""

_END_SECONDS: Final = 1.0
"""Minimum wait for the end of a process that does not answer, to tell its status."""


class ChildLost(Exception):
    """A child hung or died. The text says which, and the child is no longer of use."""


class ChildProcess:
    """A process in a group of its own. Leaving its `with` block kills the group."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
        """Starts the process.

        Args:
          command: the program and its arguments.
          environment: the variables of the process.
        """
        self._errors = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            list(command),
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=dict(environment),
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._questions, self._answers = self._process.stdin, self._process.stdout
        self._text = b""

    def __enter__(self) -> "ChildProcess":
        """Returns the process."""
        return self

    def __exit__(self, *_: Any) -> None:
        """Kills the process group, and waits a bounded time for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._has_ended_in(_KILL_SECONDS)
        self._questions.close()
        self._answers.close()
        self._errors.close()

    def ask(self, question: Any, seconds: float) -> Any:
        """Returns the child's answer to a question.

        Args:
          question: a JSON value.
          seconds: time limit. The first answer includes the start of the child.

        Raises:
          ChildLost: if the child hangs or dies.
        """
        # A child that has died is reported below, with its exit status.
        with contextlib.suppress(OSError):
            self._questions.write(json.dumps(question).encode() + b"\n")
        end = time.monotonic() + seconds
        while (line := self._next_line(end)) is not None:
            # Libraries print lines, too.
            with contextlib.suppress(ValueError):
                return json.loads(line)
        if self._has_ended_in(max(_END_SECONDS, end - time.monotonic())):
            raise ChildLost(self._describe_end())
        raise ChildLost(f"hangs: no result in {seconds:g} s; killed")

    def _next_line(self, end: float) -> bytes | None:
        """Returns the next line; None at the end of the output, or of the time."""
        while b"\n" not in self._text:
            seconds = max(0.0, end - time.monotonic())
            is_ready = select.select([self._answers], [], [], seconds)[0]
            data = os.read(self._answers.fileno(), 2**16) if is_ready else b""
            if not data:
                return None
            self._text += data
        line, _, self._text = self._text.partition(b"\n")
        return line

    def _has_ended_in(self, seconds: float) -> bool:
        try:
            self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _describe_end(self) -> str:
        """Says how the process ended, with the last line of its errors."""
        status = self._process.returncode
        text = f"ended with exit status {status}"
        if status < 0:
            text = f"crashed by {signal.Signals(-status).name}"
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return f"{text}: {lines[-1][:300]}" if lines else text
