"""A worker as its parent sees it: process, output, pulses."""

import collections
import contextlib
import os
import platform
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Final

from tpu_embedding.tools.jobs.failures import WorkerState
from tpu_embedding.tools.jobs.pulses import PIPE_VARIABLE, STACKS_SIGNAL

FULL_SECONDS: Final = 1.0
"""Longest wait for the reader of a pipe that is full and does not block."""

_CHUNK_BYTES: Final = 1 << 16

_LAST_WORDS_SECONDS: Final = 1.0
"""Longest wait for the last lines of a process that has ended.

Its readers wait longer themselves, until all its output is written.
"""


class WorkerProcess:
    """The process of the run, whose output and pulses are read by threads.

    Attributes:
      process: the process; the leader of a group of its own, so that a signal of the
        terminal reaches it through the parent only.
      state: facts that its parent knows about it.
      last_pulse: time of the latest pulse, or of the start before the first one.
      has_answered: True once a pulse has arrived.
    """

    def __init__(self, command: Sequence[str]):
        """Starts the process.

        Args:
          command: command line of the process.
        """
        pulses, write_end = os.pipe()
        ended, self._end = os.pipe()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                **os.environ,
                PIPE_VARIABLE: str(write_end),
                "PYTHONUNBUFFERED": "1",
            },
            pass_fds=[write_end],
            start_new_session=True,
        )
        os.close(write_end)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._place = f"(pid {self.process.pid} on host {platform.node()})"
        self.state = WorkerState(name=f"the process {self._place}")
        self.last_pulse = time.monotonic()
        self.has_answered = False
        self._readers = [
            _read(self.process.stdout, ended, lambda line: self._copy(1, line)),
            _read(self.process.stderr, ended, lambda line: self._copy(2, line)),
            _read(open(pulses, "rb"), ended, self._on_event),
        ]
        os.close(ended)

    @property
    def is_alive(self) -> bool:
        """True until `poll` has found that the process has ended."""
        return self.state.return_code is None

    def poll(self) -> bool:
        """Returns True if the process has ended."""
        if self.process.poll() is None:
            return False
        self.kill()  # its own helpers, such as loader processes
        os.close(self._end)
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        for reader in self._readers:
            reader.join(max(deadline - time.monotonic(), 0.0))
        self.state.return_code = self.process.returncode
        return True

    def kill(self) -> None:
        """Kills the process and all that it has started."""
        kill_group(self.process.pid)

    def signal(self, number: int) -> None:
        """Sends a signal to the process alone."""
        self.process.send_signal(number)

    def mark_silent(self, seconds: float) -> None:
        """Notes that the process hangs, and asks for the stacks of its threads.

        SIGCONT lets a process that is stopped print them, too.
        """
        self.state.silent_seconds = seconds
        if self.has_answered:  # Before, the signal would end it.
            self.signal(STACKS_SIGNAL)
            self.signal(signal.SIGCONT)

    def _copy(self, descriptor: int, line: bytes) -> None:
        self.state.lines.append(line.decode(errors="replace"))
        write_line(descriptor, line)

    def _on_event(self, line: bytes) -> None:
        self.last_pulse = time.monotonic()
        self.has_answered = True
        with contextlib.suppress(ValueError):  # A broken line is no event.
            event, *words = line.decode().split()
            values = [int(word) for word in words]
            if event == "process":
                index, count = values
                self.state.name = f"process {index} of {count} {self._place}"
            else:
                self.state.note(event, values)


def kill_group(leader: int) -> None:
    """Kills a process that leads a group, and all others of the group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _read(
    pipe: IO[bytes], ended: int, on_line: Callable[[bytes], object]
) -> threading.Thread:
    """Starts a thread that reads the lines of a pipe; returns the thread.

    Args:
      pipe: pipe to read to its end. A process that outlives its worker may hold it
        open, so once the worker has ended, the thread reads only what is there.
      ended: another pipe, which is at its end once the worker has ended.
      on_line: function to call with each line.
    """
    ended = os.dup(ended)

    def read() -> None:
        rest = b""
        with pipe, open(ended, "rb"):
            while pipe in select.select([pipe, ended], [], [])[0]:
                data = os.read(pipe.fileno(), _CHUNK_BYTES)
                if not data:
                    break
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    on_line(line)
            if rest:
                on_line(rest)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


_lines: Final = collections.defaultdict(threading.Lock)
"""Locks by descriptor, so that lines of several threads stay whole."""


def write_line(descriptor: int, line: bytes) -> None:
    """Writes a line to a descriptor, or drops it if it cannot be written.

    The reader may be gone, the disk full, or the terminal closed. The worker goes on.
    """
    data = line + b"\n"
    with _lines[descriptor], contextlib.suppress(OSError):
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                if not select.select([], [descriptor], [], FULL_SECONDS)[1]:
                    return
