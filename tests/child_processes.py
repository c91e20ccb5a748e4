"""The processes that tests start: default signals at their start, none left at the end.

A process that ignores a signal passes that on to all that it starts. `nohup` makes a
process ignore SIGHUP, and so does libtpu once it is loaded, with SIGPROF. A signal with
a handler has its default action in the processes that are started. So the process that
runs tests handles these signals.

All that a test starts inherits an environment variable, whatever its group, session or
parent. What still runs after the test, and after a time to end, is killed, and named in
an error.
"""

import contextlib
import itertools
import os
import pathlib
import signal
import subprocess
import time
import weakref
from multiprocessing import resource_tracker

import pytest

MARK = "TPU_EMBEDDING_TEST"
"""Environment variable of the processes that a test starts."""

SECONDS_TO_END = 20.0
"""Time for processes that were told to end, on a busy machine."""

_IGNORED_BY_LIBTPU = {signal.SIGHUP, signal.SIGPROF}
_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}  # but not in what it starts


def pytest_configure(config: pytest.Config) -> None:
    """Prepares a process that runs tests. One that only starts such passes all on."""
    if config.getoption("dist", "no") == "no":
        _handle_ignored_signals()
        subprocess.Popen.__init__ = _remembering(subprocess.Popen.__init__)


def _handle_ignored_signals() -> None:
    """Handles the signals that are ignored, or that libtpu would ignore."""
    for number in signal.valid_signals() - _IGNORED_BY_PYTHON:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)
        elif number in _IGNORED_BY_LIBTPU:
            signal.signal(number, _act_by_default)


def _act_by_default(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


@pytest.fixture(scope="session", autouse=True)
def _no_process_of_the_session_left():
    resource_tracker.ensure_running()  # Else the first test that needs it starts it.
    with none_left(str(os.getpid())):
        yield


_count = itertools.count(1)


@pytest.fixture(autouse=True)
def _no_process_of_the_test_left(_no_process_of_the_session_left):
    """Is set up before the other fixtures of the test, but after those of its file."""
    with none_left(f"{os.getpid()}.{next(_count)}"):
        yield


@contextlib.contextmanager
def none_left(mark: str):
    """Kills the processes that the block leaves behind, and fails if there are any.

    Args:
      mark: value of the environment variable; no other block may use it.
    """
    former, pids, objects = os.environ.get(MARK), _all_pids(), set(_popen_objects)
    os.environ[MARK] = mark
    try:
        yield
    finally:
        if former is None:
            del os.environ[MARK]
        else:
            os.environ[MARK] = former
        left = _end_all(mark, pids)
        for process in set(_popen_objects) - objects:
            with contextlib.suppress(OSError), process:
                process.kill()
    if left:
        pytest.fail(f"left {len(left)} processes behind: {left}", pytrace=False)


def _end_all(mark: str, former_pids: set[str]) -> dict[str, str]:
    """Waits for the marked processes to end, and kills those that do not.

    Returns:
      The command lines of the killed ones, by pid.
    """
    end = time.monotonic() + SECONDS_TO_END
    killed = {}
    while left := _marked(mark, _all_pids() - former_pids):
        if time.monotonic() > end:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    killed.setdefault(pid, _read(pid, "cmdline").replace("\0", " "))
                    os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)
    return killed


def _marked(mark: str, pids: set[str]) -> list[str]:
    """Returns those of some processes that run and have the mark."""
    return [
        pid for pid in pids if f"{MARK}={mark}" in _read(pid, "environ").split("\0")
    ]


def _read(pid: str, file: str) -> str:
    """Returns a file of a process, empty if it has ended or is of another user."""
    with contextlib.suppress(OSError):
        return pathlib.Path("/proc", pid, file).read_bytes().decode(errors="replace")
    return ""


def _all_pids() -> set[str]:
    """Returns the numbers of all processes; empty where the system has no /proc."""
    try:
        return {name for name in os.listdir("/proc") if name.isdigit()}
    except FileNotFoundError:
        return set()


_popen_objects: weakref.WeakSet[subprocess.Popen] = weakref.WeakSet()
"""Of a failed test, they live on in its traceback and warn when they are deleted."""


def _remembering(init):
    def remember(self, *arguments, **options):
        _popen_objects.add(self)
        init(self, *arguments, **options)

    return remember
