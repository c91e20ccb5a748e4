"""The parent process: starts the worker of a run, watches it, restarts it.

    python __main__.py SETTINGS

`parent_command.py` makes this command line; SETTINGS are those of the class, in JSON.
"""

import dataclasses
import json
import math
import queue
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Final

from tpu_embedding.tools.jobs.exit_status import (
    REPEAT_SECONDS,
    STATUS_OF_SIGNAL,
    STOP_SIGNALS,
    STOPPED,
)
from tpu_embedding.tools.jobs.failures import (
    NO_FAILURES,
    WorkerState,
    last_lines,
)
from tpu_embedding.tools.jobs.workers import WorkerProcess, write_line

TICK_SECONDS: Final = 0.25
"""Longest time between two looks at the worker."""

LONGEST_PAUSE_SECONDS: Final = 60.0
"""Longest wait before a restart."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a parent.

    Attributes:
      command: command line of the worker.
      several_hosts: True if processes of other machines take part in the run.
      heartbeat: seconds without a pulse after which the worker counts as hanging.
      startup: seconds to its first pulse after which the worker counts as hanging.
      restarts: maximum number of restarts.
      pause: seconds before the first restart; each further one waits twice as long.
      last_words: seconds in which a worker that hangs may print its stacks.
    """

    command: Sequence[str]
    several_hosts: bool = False
    heartbeat: float = 100.0
    startup: float = 300.0
    restarts: int = 0
    pause: float = 1.0
    last_words: float = 3.0


def main(settings: str) -> int:
    """Runs the parent by settings in JSON, and returns its exit status."""
    signals = Signals()
    threading.Thread(target=_write_reports, daemon=True).start()
    status = Parent(Settings(**json.loads(settings)), signals).run()
    _reports.put(None)
    _await_threads(signals)
    return status


def _await_threads(signals: "Signals") -> None:
    """Waits until all output is written, or until a signal arrives."""
    for thread in threading.enumerate():
        while thread is not threading.main_thread() and thread.is_alive():
            if signals.wait(0.0) is not None:
                return
            thread.join(TICK_SECONDS)


class Signals:
    """The signals that have arrived and were not handled yet."""

    def __init__(self) -> None:
        """Handles signals from now on, but those that this process ignores."""
        self._arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._last = -math.inf
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)
        # Where SIGCHLD is ignored, the kernel forgets how a process ended.
        signal.signal(signal.SIGCHLD, lambda number, frame: self._arrived.put(number))
        # `run_under_parent` has blocked them, so that none arrived before.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        last, self._last = self._last, time.monotonic()
        if self._last - last > REPEAT_SECONDS:
            self._arrived.put(number)

    def wait(self, seconds: float) -> signal.Signals | None:
        """Waits until a signal arrives or the worker ends.

        Args:
          seconds: longest wait.

        Returns:
          The signal, if it asks the run to stop.
        """
        try:
            number = self._arrived.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            return None
        return signal.Signals(number) if number in STOP_SIGNALS else None


class Parent:
    """Runs the worker until it is done, stopped, or has failed too often."""

    def __init__(self, settings: Settings, signals: Signals):
        self._settings = settings
        self._signals = signals
        self._has_started = False
        self._saved: int | None = None

    def run(self) -> int:
        """Runs all attempts; returns the exit status of the last one."""
        settings, restarts = self._settings, 0
        while True:
            attempt = Attempt(settings, self._signals, self._worker_command())
            failed = attempt.run()
            state = attempt.worker.state
            self._has_started |= state.has_started
            if state.saved is not None:
                self._saved = state.saved
            if not failed:
                return _stopped_status(state.return_code)
            reason = self._reason_to_give_up(attempt, restarts)
            if reason is not None:
                report(reason)
                return state.status
            restarts += 1
            seconds = self._pause_seconds(restarts)
            report(
                f"restart {restarts} of {settings.restarts} in {seconds:.0f} s, "
                + self._restart_point()
            )
            number = self._wait(seconds)
            if number is not None:
                report(f"{number.name}: stopped before the restart")
                return STATUS_OF_SIGNAL[number]

    def _reason_to_give_up(self, attempt: "Attempt", restarts: int) -> str | None:
        """Returns why there is no restart, as text; None if there is one."""
        allowed = self._settings.restarts
        if attempt.stop_requests:
            return "not restarted: a signal had asked the run to stop"
        if not attempt.worker.state.can_be_mended(self._has_started):
            return "not restarted: the same run would fail again"
        if not allowed:
            return "not restarted: --restarts N would, from the newest checkpoint"
        if restarts >= allowed:
            return f"not restarted: all {allowed} restarts of --restarts are used up"
        return None

    def _worker_command(self) -> list[str]:
        """Returns the command of the worker, which resumes a run that has begun."""
        command = list(self._settings.command)
        if not self._has_started:
            return command
        command = [argument for argument in command if argument != "--overwrite"]
        return command if "--resume" in command else [*command, "--resume"]

    def _restart_point(self) -> str:
        if not self._has_started:
            return "from the beginning"
        if self._saved is None:
            return "from the newest checkpoint, if there is one"
        return f"from the newest checkpoint, that of step {self._saved}"

    def _pause_seconds(self, restarts: int) -> float:
        settings = self._settings
        seconds = min(settings.pause * 2 ** (restarts - 1), LONGEST_PAUSE_SECONDS)
        # The other hosts need a heartbeat to notice, and must not meet a new process.
        return seconds + (settings.heartbeat if settings.several_hosts else 0)

    def _wait(self, seconds: float) -> signal.Signals | None:
        """Waits before a restart; returns a signal that asks to stop meanwhile."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            # Python misses a signal that comes just before the wait, until its end.
            number = self._signals.wait(min(left, TICK_SECONDS))
            if number is not None:
                return number
        return None


class Attempt:
    """One start of the worker.

    Attributes:
      worker: the process.
      stop_requests: signals that were passed on to it.
    """

    def __init__(self, settings: Settings, signals: Signals, command: list[str]):
        self.stop_requests: list[signal.Signals] = []
        self.worker = WorkerProcess(command)
        self._settings = settings
        self._signals = signals
        self._looked_at = time.monotonic()

    def run(self) -> bool:
        """Runs until the worker has ended; returns True if it failed."""
        worker = self.worker
        try:
            while not worker.poll():
                self._turn(self._signals.wait(TICK_SECONDS))
        finally:
            if worker.is_alive:
                worker.kill()
        if worker.state.silent_seconds is not None:
            return True
        code = worker.state.return_code
        # A signal ends a worker that does not handle it yet, and a second one any.
        stopped = any(code in (-n, 128 + n) for n in self.stop_requests)
        if code in NO_FAILURES or stopped:
            return False
        _report_failure(worker.state)
        return True

    def _turn(self, number: signal.Signals | None) -> None:
        """Passes a signal on, and ends a worker that hangs."""
        worker, settings = self.worker, self._settings
        if number is not None:
            self.stop_requests.append(number)
            worker.signal(number)
        now = time.monotonic()
        pause = now - self._looked_at
        self._looked_at = now
        if pause > 4 * TICK_SECONDS:  # This process did not run itself.
            worker.last_pulse = min(now, worker.last_pulse + pause)
        seconds = now - worker.last_pulse
        limit = settings.heartbeat if worker.has_answered else settings.startup
        if seconds > limit and worker.state.silent_seconds is None:
            worker.mark_silent(seconds)
            time.sleep(settings.last_words)
            _report_failure(worker.state)
            worker.kill()


def _report_failure(state: WorkerState) -> None:
    report(state.describe())
    lines = last_lines(state.lines.copy())
    if lines:
        report("its last lines:")
        for line in lines:
            _reports.put(f"  | {line}")


def _stopped_status(code: int | None) -> int:
    """Returns the exit status for a worker's; a signal that stopped it counts as 75."""
    assert code is not None
    return code if code >= 0 else STATUS_OF_SIGNAL.get(-code, STOPPED)


def report(text: str) -> None:
    """Prints a line of the parent's own on stderr, without waiting for it."""
    _reports.put(f"supervisor: {text}")


_reports: Final = queue.SimpleQueue[str | None]()
"""Lines of the parent's own that are not written yet; None ends their thread."""


def _write_reports() -> None:
    for line in iter(_reports.get, None):
        write_line(2, line.encode())
