"""Says why a worker ended, and if a restart may help."""

import collections
import dataclasses
import signal
from collections.abc import Iterable, Sequence
from typing import Final

from tpu_embedding.tools.jobs.exit_status import (
    DONE,
    FAILED,
    INTERRUPTED,
    STOPPED,
    WRONG_USAGE,
)

NO_FAILURES: Final = (DONE, STOPPED, INTERRUPTED)

SHOWN_LINES: Final = 15

KEPT_LINES: Final = 300
"""Lines that are kept of a worker, so that stacks do not displace the error."""

_HINTS: Final[dict[int, str]] = {
    signal.SIGABRT: "the JAX runtime aborts a process when it loses another one, or "
    "at an error of its own",
    signal.SIGKILL: "sent by the kernel when memory runs out (look at `dmesg`), or by "
    "another process, such as a scheduler",
    signal.SIGSEGV: "native code crashed",
    signal.SIGBUS: "native code crashed, or a disk of mapped files is full",
    signal.SIGILL: "native code crashed",
    signal.SIGFPE: "native code crashed",
}

_CRASH: Final = "Fatal Python error:"
"""Begins the stacks that Python prints at a crash."""


@dataclasses.dataclass(kw_only=True)
class WorkerState:
    """The facts that a parent knows about a worker, from its start to its end.

    Attributes:
      name: name of the process, such as `"process 2 of 4 (pid 71)"`.
      return_code: exit status, or minus the signal's number; None before the end.
      silent_seconds: time since the last pulse of a process that hangs, or None.
      has_started: True once its run has begun in its directory.
      step: number of steps it has completed; None before the first.
      saved: step of the newest complete checkpoint; None before the first.
      is_final: True if the same run would fail again.
      lines: last lines that it wrote.
    """

    name: str
    return_code: int | None = None
    silent_seconds: float | None = None
    has_started: bool = False
    step: int | None = None
    saved: int | None = None
    is_final: bool = False
    lines: collections.deque[str] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=KEPT_LINES)
    )

    def note(self, event: str, values: Sequence[int]) -> None:
        """Notes an event that the worker has told; see `pulses.EVENTS`."""
        match event, values:
            case "started", []:
                self.has_started = True
            case "step", [step]:
                self.step = step
            case "saved", [step]:
                self.saved = step
            case "final", []:
                self.is_final = True

    def can_be_mended(self, has_started: bool) -> bool:
        """Returns True if a restart may succeed.

        Args:
          has_started: True if the run has begun before. The command and its data were
            right then, so a start that fails now may find a missing host later.
        """
        return not self.is_final and (has_started or self.return_code != WRONG_USAGE)

    @property
    def status(self) -> int:
        """Exit status of the whole command."""
        code = self.return_code
        if self.silent_seconds is not None or code is None or code < 0:
            return FAILED
        return code

    def describe(self) -> str:
        """Returns the sentence that names the process and the reason.

        Example:
          >>> state = WorkerState(name="process 1 of 2", return_code=-11, step=7)
          >>> state.describe()
          'process 1 of 2 was killed by SIGSEGV after step 7: native code crashed'
        """
        when = "before its first step"
        if self.step is not None:
            when = f"after step {self.step}"
        if self.silent_seconds is not None:
            return (
                f"{self.name} has not answered for {self.silent_seconds:.0f} s, {when}"
            )
        code = self.return_code
        assert code is not None
        if code >= 0:
            return f"{self.name} ended with exit status {code}, {when}"
        hint = f": {_HINTS[-code]}" if -code in _HINTS else ""
        return f"{self.name} was killed by {signal_name(-code)} {when}{hint}"


def last_lines(lines: Iterable[str]) -> list[str]:
    """Returns the lines that say why a process ended.

    Those are the last ones, or the last ones before the stacks of a crash.

    Example:
      >>> last_lines(["step 1", "no memory", "Fatal Python error: Aborted", "  File"])
      ['step 1', 'no memory', 'Fatal Python error: Aborted']
    """
    kept: collections.deque[str] = collections.deque(maxlen=SHOWN_LINES)
    for line in lines:
        if line.strip():
            kept.append(line)
        if line.startswith(_CRASH):
            break
    return list(kept)


def signal_name(number: int) -> str:
    """Returns the name of a signal, or its number if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
