"""A worker as its parent sees it: process, output, pulses."""

import collections
import contextlib
import os
import pathlib
import platform
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Final

from tpu_embedding.tools.jobs.failures import KEPT_LINES, Ending, last_lines
from tpu_embedding.tools.jobs.memory_kills import hint_of_kill, memory_kills
from tpu_embedding.tools.jobs.pulses import PIPE_VARIABLE, STACKS_SIGNAL

_CHUNK_BYTES: Final = 1 << 16

FULL_SECONDS: Final = 1.0
"""Longest wait for the reader of a pipe that is full and does not block."""


class LineReader:
    """Reads a pipe and hands over its lines.

    Attributes:
      pipe: descriptor to read, which does not block.
    """

    def __init__(self, pipe: int, on_line: Callable[[bytes], None]):
        os.set_blocking(pipe, False)
        self.pipe = pipe
        self._on_line = on_line
        self._rest = b""

    def read(self) -> bool:
        """Reads what is there; returns False if the pipe is empty or at its end."""
        try:
            data = os.read(self.pipe, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._on_line(line)
        return bool(data)

    def finish(self) -> None:
        """Reads the rest, the incomplete last line included, and closes the pipe."""
        while self.read():
            pass
        if self._rest:
            self._on_line(self._rest)
        os.close(self.pipe)


class Worker:
    """A process of the run.

    Attributes:
      process: the process; the leader of a group of its own, so that a signal of the
        terminal reaches it through the parent only.
      readers: of its stdout, stderr and pulses.
      last_pulse: time of the latest pulse, or of the start before the first one.
      has_answered: True once a pulse has arrived.
      has_started: True once its run has begun in its directory.
      saved: step of the newest complete checkpoint that it told of.
      silent_seconds: set once the parent has found that it hangs.
      return_code: exit status, or minus the signal's number; None before its end.
    """

    def __init__(self, command: Sequence[str], index: int, count: int):
        """Starts the process.

        Args:
          command: its command line.
          index: number of the process, from 0.
          count: number of the parent's workers.
        """
        pulses, write_end = os.pipe()
        self._memory_kills = memory_kills()
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
        self._prefix = f"[process {index}] ".encode() if index else b""
        self._position = (index, count) if count > 1 else None
        self.readers = [
            LineReader(os.dup(self.process.stdout.fileno()), self._copy_to(1)),
            LineReader(os.dup(self.process.stderr.fileno()), self._copy_to(2)),
            LineReader(pulses, self._on_event),
        ]
        self.process.stdout.close()
        self.process.stderr.close()
        self.last_pulse = time.monotonic()
        self.has_answered = self.has_started = False
        self.saved: int | None = None
        self.silent_seconds: float | None = None
        self.return_code: int | None = None
        self._step: int | None = None
        self._has_own_error = self._is_final = False
        self._lines: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)

    @property
    def is_alive(self) -> bool:
        """True until `poll` has found that the process has ended."""
        return self.return_code is None

    @property
    def name(self) -> str:
        """Name of the process for messages, with its pid and host."""
        place = f"pid {self.process.pid} on host {platform.node()}"
        if self._position is None:
            return f"the process ({place})"
        index, count = self._position
        return f"process {index} of {count} ({place})"

    def poll(self) -> bool:
        """Returns True if the process has ended since the last call."""
        if self.return_code is not None or self.process.poll() is None:
            return False
        self.return_code = self.process.returncode
        self.kill()  # its own helpers, such as loader processes
        return True

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to the process and all that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def signal(self, number: int) -> None:
        """Sends a signal to the process alone."""
        self.process.send_signal(number)

    def ask_for_stacks(self) -> None:
        """Asks a process that hangs for its stacks, which a stopped one prints, too."""
        if self.has_answered:  # Before, the signal would end it.
            self.signal(STACKS_SIGNAL)
            self.signal(signal.SIGCONT)

    def ending(self) -> Ending:
        """Returns why the process ended, or that it hangs."""
        hangs = self.silent_seconds is not None
        return Ending(
            name=self.name,
            return_code=None if hangs else self.return_code,
            silent_seconds=self.silent_seconds or 0.0,
            is_stopped=self._was_stopped,
            step=self._step,
            has_own_error=self._has_own_error,
            is_final=self._is_final,
            lines=last_lines(self._lines),
            kill_hint=hint_of_kill(self._memory_kills, memory_kills()),
        )

    _was_stopped = False

    def mark_silent(self, seconds: float) -> None:
        """Notes that the process hangs."""
        self.silent_seconds = seconds
        self._was_stopped = _is_stopped(self.process.pid)

    def _copy_to(self, descriptor: int) -> Callable[[bytes], None]:
        def copy(line: bytes) -> None:
            self._lines.append(line.decode(errors="replace"))
            write_line(descriptor, self._prefix + line)

        return copy

    def _on_event(self, line: bytes) -> None:
        self.last_pulse = time.monotonic()
        self.has_answered = True
        event, *values = line.decode().split()
        match event, [int(value) for value in values]:
            case "process", [index, count]:
                self._position = (index, count) if count > 1 else None
            case "started", []:
                self.has_started = True
            case "step", [step]:
                self._step = step
            case "saved", [step]:
                self.saved = step
            case "failed", []:
                self._has_own_error = True
            case "final", []:
                self._has_own_error = self._is_final = True
            case "final_elsewhere", []:
                self._is_final = True


def write_line(descriptor: int, line: bytes) -> None:
    """Writes a line to a descriptor, or drops it if it cannot be written.

    The reader may be gone, the disk full, or the terminal closed. The workers go on.
    """
    data = line + b"\n"
    with contextlib.suppress(OSError):
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                if not select.select([], [descriptor], [], FULL_SECONDS)[1]:
                    return


def _is_stopped(pid: int) -> bool:
    """Returns True if Linux says that a process is stopped."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] in ("T", "t")
