"""The parent process: starts the workers of a run, watches them, restarts them.

    python __main__.py SETTINGS

`parent_command.py` makes this command line; SETTINGS are those of the class, in JSON.
If several workers are asked for, each gets the options that make them one job.
"""

import dataclasses
import json
import math
import queue
import signal
import socket
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
    cause_of,
    last_lines,
)
from tpu_embedding.tools.jobs.workers import WorkerProcess, write_line

TICK_SECONDS: Final = 0.25
"""Longest time between two looks at the workers."""

LONGEST_PAUSE_SECONDS: Final = 60.0
"""Longest wait before a restart."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a parent.

    Attributes:
      command: command line of a worker.
      workers: number of processes to start on this machine.
      several_hosts: True if processes of other machines take part in the run.
      heartbeat: seconds without a pulse after which a process counts as hanging.
      startup: seconds to its first pulse after which a process counts as hanging.
      restarts: maximum number of restarts.
      pause: seconds before the first restart; each further one waits twice as long.
      collect: seconds after a failure in which the other processes may end and say why.
      suspect: seconds of silence that make a process the cause of a failure. The
        runtime of the others may notice its loss before the parent.
      grace: seconds between SIGTERM and SIGKILL.
    """

    command: Sequence[str]
    workers: int = 1
    several_hosts: bool = False
    heartbeat: float = 100.0
    startup: float = 300.0
    restarts: int = 0
    pause: float = 1.0
    collect: float = 3.0
    suspect: float = 3.0
    grace: float = 5.0


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
        """Waits until a signal arrives or a worker ends.

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
    """Runs the workers until they are done, stopped, or have failed too often."""

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
            cause = attempt.run()
            states = [worker.state for worker in attempt.workers]
            self._has_started |= any(state.has_started for state in states)
            saved = [state.saved for state in states if state.saved is not None]
            self._saved = max(saved, default=self._saved)
            if cause is None:
                return attempt.status
            reason = self._reason_to_give_up(cause, attempt, restarts)
            if reason is not None:
                report(reason)
                return cause.status
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

    def _reason_to_give_up(
        self, cause: WorkerState, attempt: "Attempt", restarts: int
    ) -> str | None:
        """Returns why there is no restart, as text; None if there is one."""
        allowed = self._settings.restarts
        if attempt.stop_requests:
            return "not restarted: a signal had asked the run to stop"
        if not cause.can_be_mended(self._has_started):
            return "not restarted: the same run would fail again"
        if not allowed:
            return "not restarted: --restarts N would, from the newest checkpoint"
        if restarts >= allowed:
            return f"not restarted: all {allowed} restarts of --restarts are used up"
        return None

    def _worker_command(self) -> list[str]:
        """Returns the command of a worker, which resumes a run that has begun."""
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
            number = self._signals.wait(left)
            if number is not None:
                return number
        return None


class Attempt:
    """One start of all workers.

    Attributes:
      workers: the processes.
      stop_requests: signals that were passed on to them.
    """

    def __init__(self, settings: Settings, signals: Signals, command: list[str]):
        self.stop_requests: list[signal.Signals] = []
        self._settings = settings
        self._signals = signals
        self.workers = [
            WorkerProcess([*command, *options], index, settings.workers)
            for index, options in enumerate(_job_options(settings))
        ]
        self._failed: list[WorkerProcess] = []
        self._cause: WorkerState | None = None
        self._failed_at: float | None = None
        self._ended_at: float | None = None
        self._looked_at = time.monotonic()

    @property
    def status(self) -> int:
        """Exit status of an attempt without a failure."""
        return max(_stopped_status(w.state.return_code) for w in self.workers)

    def run(self) -> WorkerState | None:
        """Runs until all workers have ended.

        Returns:
          The worker whose end caused the others, or None if none failed.
        """
        try:
            while any(worker.is_alive for worker in self.workers):
                self._turn(self._signals.wait(TICK_SECONDS))
        finally:
            for worker in self.workers:
                if worker.is_alive:
                    worker.kill()
        return self._cause

    def _turn(self, number: signal.Signals | None) -> None:
        """Passes a signal on, looks at all workers, and ends them after a failure."""
        alive = [worker for worker in self.workers if worker.is_alive]
        if number is not None:
            self.stop_requests.append(number)
            for worker in alive:
                worker.signal(number)
        for worker in alive:
            if worker.poll() and self._is_failure(worker):
                self._note_failure(worker)
        now = time.monotonic()
        self._skip_own_pause(now)
        self._look_for_silence(now)
        if self._failed_at is not None:
            self._end_the_rest(now, self._failed_at)

    def _is_failure(self, worker: WorkerProcess) -> bool:
        if self._ended_at is not None or worker in self._failed:
            return False  # It was ended because another one failed.
        code = worker.state.return_code
        if code in NO_FAILURES:
            return False
        # A signal ends a worker that does not handle it yet, and a second one any.
        return not any(code in (-n, 128 + n) for n in self.stop_requests)

    def _note_failure(self, worker: WorkerProcess) -> None:
        self._failed.append(worker)
        if self._failed_at is None:
            self._failed_at = time.monotonic()

    def _skip_own_pause(self, now: float) -> None:
        """Forgives the workers a time in which this process did not run itself."""
        pause = now - self._looked_at
        self._looked_at = now
        if pause > 4 * TICK_SECONDS:
            for worker in self.workers:
                worker.last_pulse = min(now, worker.last_pulse + pause)

    def _look_for_silence(self, now: float) -> None:
        settings = self._settings
        for worker in self.workers:
            if not worker.is_alive or worker in self._failed:
                continue
            seconds = now - worker.last_pulse
            limit = settings.heartbeat if worker.has_answered else settings.startup
            if self._failed_at is not None and worker.has_answered:
                limit = min(limit, settings.suspect)
            if self._ended_at is None and seconds > limit:
                worker.mark_silent(seconds)
                self._note_failure(worker)

    def _end_the_rest(self, now: float, failed_at: float) -> None:
        """Ends the processes that are left: first gently, then at once."""
        left = [worker for worker in self.workers if worker.is_alive]
        if self._ended_at is None:
            if left and now - failed_at < self._settings.collect:
                return
            self._ended_at = now
            for worker in left:
                worker.signal(signal.SIGTERM)
                if worker in self._failed:  # It hangs.
                    worker.kill()
            self._report_cause()
            if left:
                names = ", ".join(w.state.name.partition(" (")[0] for w in left)
                report(f"ending the other processes: {names}")
        elif now - self._ended_at > self._settings.grace:
            for worker in left:
                worker.kill()

    def _report_cause(self) -> None:
        cause = self._cause = cause_of(worker.state for worker in self._failed)
        report(cause.describe())
        lines = last_lines(cause.lines.copy())
        if lines:
            report("its last lines:")
            for line in lines:
                _reports.put(f"  | {line}")


def _stopped_status(code: int | None) -> int:
    """Returns the exit status for a worker's; a signal that stopped it counts as 75."""
    assert code is not None
    return code if code >= 0 else STATUS_OF_SIGNAL.get(-code, STOPPED)


def _job_options(settings: Settings) -> list[list[str]]:
    """Returns the options of each worker that make them one job."""
    if settings.workers == 1:
        return [[]]
    job = ["--coordinator", f"127.0.0.1:{_free_port()}"]
    job += ["--num-processes", str(settings.workers)]
    return [[*job, "--process-id", str(index)] for index in range(settings.workers)]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def report(text: str) -> None:
    """Prints a line of the parent's own on stderr, without waiting for it."""
    _reports.put(f"supervisor: {text}")


_reports: Final = queue.SimpleQueue[str | None]()
"""Lines of the parent's own that are not written yet; None ends their thread."""


def _write_reports() -> None:
    for line in iter(_reports.get, None):
        write_line(2, line.encode())
