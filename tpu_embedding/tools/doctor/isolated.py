"""Runs the doctor's child process under a watchdog.

A kernel may hang, or halt the chip. So cases run in a child process, which alone holds
the TPU. Each case has a deadline. If it passes, the whole process group is killed, the
case is reported as a hang, and a new child runs the remaining cases. A case that starts
just before the total time ends still has its whole deadline. A child that dies is
reported with its signal. Every wait here is bounded, so the parent never hangs.
"""

import contextlib
import dataclasses
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, Final, Literal

from tpu_embedding.tools.doctor.protocol import (
    AllDone,
    CaseEnded,
    CaseStarted,
    Event,
    Planned,
    parse_line,
)

_KILL_SECONDS: Final = 10.0
"""Maximum wait for a killed process. One that waits for a device may never end."""

_CANCEL_SECONDS: Final = 0.5
"""Maximum wait until a cancelled run notices it."""

_MAX_LOST_CHILDREN: Final = 8
"""Children that may hang or crash before the remaining cases are given up."""

_MAX_WAITING_LINES: Final = 1000
"""Lines that may wait for the parent. A child that prints more waits for it, too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deadlines:
    """Bounds on the time that a child may take, in seconds.

    Attributes:
      start: until the first case starts; it covers the start of JAX and of the TPU.
      case: of one case, with its compilation.
      total: of all cases. Cases that have not started by then do not run. A case that
        has started keeps its own deadline.
    """

    start: float = 120.0
    case: float = 60.0
    total: float = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class IsolatedRun:
    """The results of the cases that a child ran.

    Attributes:
      results: of all cases that ended, hung or crashed, in order.
      planned: case to capability, of all cases that should run; empty if no child
        started.
      problem: reason why other cases did not run; None if all ran.
      ended_by: `"deadline"` if the total time ran out, `"loss"` if no child could go
        on; None if all cases ran.
    """

    results: tuple[CaseEnded, ...]
    planned: Mapping[str, str] = dataclasses.field(default_factory=dict)
    problem: str | None = None
    ended_by: Literal["deadline", "loss"] | None = None

    def cases_not_run(self) -> dict[str, str]:
        """Returns the planned cases that have no result, with their capabilities."""
        ended = {result.case for result in self.results}
        return {case: c for case, c in self.planned.items() if case not in ended}


def run_isolated(
    command: Sequence[str],
    deadlines: Deadlines,
    *,
    environment: Mapping[str, str] | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    cancelled: threading.Event | None = None,
) -> IsolatedRun:
    """Runs the cases of a child, and starts it again after one that hangs or crashes.

    Args:
      command: of a child that speaks the language of `protocol.py`. After a lost case,
        `--skip-until-after CASE` is appended.
      deadlines: bounds on its time.
      environment: variables of the child; None: those of this process.
      on_event: called for each event, and for each case that was lost.
      cancelled: another thread sets it to end the run early.
    """
    cancelled = threading.Event() if cancelled is None else cancelled
    run = IsolatedRun(results=())
    end = time.monotonic() + deadlines.total
    options: list[str] = []
    for _ in range(_MAX_LOST_CHILDREN):
        with _started([*command, *options], environment, cancelled) as child:
            run, lost = _follow(child, deadlines, end, run, on_event)
        if lost is None:
            return run
        if lost.case is None:
            return dataclasses.replace(
                run, problem=lost.problem, ended_by=lost.ended_by
            )
        ended = CaseEnded(
            case=lost.case.case,
            capability=lost.case.capability,
            ok=False,
            problem=lost.problem,
            seconds=lost.seconds,
            figures={},
        )
        run = dataclasses.replace(run, results=(*run.results, ended))
        on_event(ended)
        if run.planned and not run.cases_not_run():
            return run
        if time.monotonic() >= end or cancelled.is_set():
            problem = _out_of_time(deadlines)
            return dataclasses.replace(run, problem=problem, ended_by="deadline")
        options = ["--skip-until-after", lost.case.case]
    problem = f"stopped after {_MAX_LOST_CHILDREN} cases that hung or crashed"
    return dataclasses.replace(run, problem=problem, ended_by="loss")


def output_of(
    command: Sequence[str],
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> tuple[str | None, str | None]:
    """Runs a command that prints a short text.

    Args:
      command: with its arguments.
      seconds: deadline, after which its process group is killed.
      environment: its variables; None: those of this process.

    Returns:
      Its output and no problem, or no output and the problem.
    """
    end = time.monotonic() + seconds
    lines: list[str] = []
    with _started(command, environment, threading.Event()) as child:
        while (line := child.next_line(end)) is not None:
            lines.append(line)
        if not child.has_ended_by(end):
            return None, f"no answer in {seconds:g} s"
        if child.exit_status != 0:
            return None, child.describe_end()
    return "".join(lines), None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Lost:
    """A child that hung, crashed, or ran out of time.

    Attributes:
      problem: one sentence.
      case: the case that it ran; None: it ran none.
      seconds: time of the case.
      ended_by: as in `IsolatedRun`.
    """

    problem: str
    case: CaseStarted | None
    seconds: float = 0.0
    ended_by: Literal["deadline", "loss"] = "loss"


def _follow(
    child: "_Child",
    deadlines: Deadlines,
    end: float,
    run: IsolatedRun,
    on_event: Callable[[Event], None],
) -> tuple[IsolatedRun, _Lost | None]:
    """Collects results until the child is done; also returns the loss if it is not."""
    running: CaseStarted | None = None
    since = time.monotonic()
    while True:
        if running is None:
            limit = min(since + deadlines.start, end)
        else:
            limit = since + deadlines.case
        line = child.next_line(limit)
        if line is None:
            return run, _loss(child, running, since, deadlines, end)
        event = parse_line(line)
        if isinstance(event, AllDone):
            return run, None
        if isinstance(event, Planned):
            run = dataclasses.replace(run, planned=event.capabilities)
            continue
        if isinstance(event, CaseStarted):
            if time.monotonic() >= end:
                return run, _no_time_left(deadlines)
            running = event
        elif isinstance(event, CaseEnded):
            running = None
            run = dataclasses.replace(run, results=(*run.results, event))
        else:
            continue
        since = time.monotonic()
        on_event(event)
        if run.planned and not run.cases_not_run():
            return run, None


def _loss(
    child: "_Child",
    running: CaseStarted | None,
    since: float,
    deadlines: Deadlines,
    end: float,
) -> _Lost:
    now = time.monotonic()
    seconds = now - since
    if child.cancelled.is_set():
        return _no_time_left(deadlines)
    if child.has_ended_by(now + 1.0):
        return _Lost(problem=child.describe_end(), case=running, seconds=seconds)
    if running is not None:
        problem = f"hangs: no result in {deadlines.case:g} s; killed"
        return _Lost(problem=problem, case=running, seconds=seconds)
    if now >= end:
        return _no_time_left(deadlines)
    problem = f"hangs: no case started in {deadlines.start:g} s"
    return _Lost(problem=problem, case=None)


def _no_time_left(deadlines: Deadlines) -> _Lost:
    return _Lost(problem=_out_of_time(deadlines), case=None, ended_by="deadline")


def _out_of_time(deadlines: Deadlines) -> str:
    return f"stopped after {deadlines.total:.3g} s; the remaining cases did not run"


class _Child:
    """A process in a group of its own, whose output a thread reads."""

    def __init__(
        self,
        process: "subprocess.Popen[str]",
        errors: IO[str],
        cancelled: threading.Event,
    ):
        self.cancelled = cancelled
        self._process = process
        self._errors = errors
        self._lines: queue.Queue[str | None] = queue.Queue(_MAX_WAITING_LINES)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self._lines.put(line)
        self._lines.put(None)

    def next_line(self, end: float) -> str | None:
        """Returns the next line; None at the end, at the deadline, or if cancelled."""
        while not self.cancelled.is_set():
            remaining = end - time.monotonic()
            if remaining <= 0:
                return None
            with contextlib.suppress(queue.Empty):
                return self._lines.get(timeout=min(remaining, _CANCEL_SECONDS))
        return None

    def has_ended_by(self, end: float) -> bool:
        """Waits for the end of the process, up to a point in time."""
        try:
            self._process.wait(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    @property
    def exit_status(self) -> int | None:
        """The status of the ended process; negative: a signal; None: it runs."""
        return self._process.returncode

    def describe_end(self) -> str:
        """Says how the process ended, with the last line of its errors."""
        status = self._process.returncode
        if status is not None and status < 0:
            text = f"crashed by {_signal_name(-status)}"
        else:
            text = f"ended with exit status {status}"
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return f"{text}: {lines[-1][:300]}" if lines else text

    def kill(self) -> None:
        """Kills the process group, and waits a bounded time for its end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.has_ended_by(time.monotonic() + _KILL_SECONDS)


@contextlib.contextmanager
def _started(
    command: Sequence[str],
    environment: Mapping[str, str] | None,
    cancelled: threading.Event,
) -> Iterator[_Child]:
    """Starts a child, and kills its process group in the end."""
    variables: Any = None if environment is None else dict(environment)
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            env=variables,
            start_new_session=True,
        )
        child = _Child(process, errors, cancelled)
        try:
            yield child
        finally:
            child.kill()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
