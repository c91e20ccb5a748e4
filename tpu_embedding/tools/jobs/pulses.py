"""The worker's side of a supervised run: it tells its parent that it is alive.

A worker writes lines to a pipe that it inherits. A thread writes `pulse` twice a
second, so a process that is stopped, or whose interpreter is blocked, falls silent. The
training loop adds facts that the parent's reports and restarts need: see `EVENTS`.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from typing import Final

PIPE_VARIABLE: Final = "TPU_EMBEDDING_PULSE_PIPE"
"""Environment variable with the pipe's descriptor; only workers have it."""

PULSE_SECONDS: Final = 0.5

STACKS_SIGNAL: Final = signal.SIGUSR2
"""Signal at which a worker prints the stacks of its threads and goes on."""

EVENTS: Final = {
    "pulse": "the process is alive",
    "process": "index of this process and number of all processes",
    "started": "the run has begun in its directory, so a restart resumes it",
    "step": "number of completed steps",
    "saved": "step of the newest complete checkpoint",
    "final": "an error ends the run, and the same run would fail again",
}
"""Events and their meaning."""

ORPHAN_SECONDS: Final = 30.0
"""Time that a worker has to save and stop once its parent is gone."""

_pipe: int | None = None


def is_worker() -> bool:
    """Returns True in a process that a parent supervises."""
    return _pipe is not None or PIPE_VARIABLE in os.environ


def start_pulses() -> None:
    """Starts to send pulses, if this process has a parent that reads them.

    From now on, `STACKS_SIGNAL` prints the stacks of all threads on stderr, and so does
    a crash of the interpreter.
    """
    global _pipe
    # Processes that this one starts are no workers of the parent.
    value = os.environ.pop(PIPE_VARIABLE, None)
    if value is None or _pipe is not None:
        return
    _pipe = int(value)
    os.set_inheritable(_pipe, False)
    # A parent that does not read must not stop the run.
    os.set_blocking(_pipe, False)
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    threading.Thread(target=_send_pulses, name="pulses", daemon=True).start()


def send_event(event: str, *values: int) -> None:
    """Tells the parent of an event; does nothing without a parent.

    Args:
      event: one of `EVENTS`.
      *values: numbers that belong to it.

    Raises:
      ValueError: if the event is unknown.

    Example:
      >>> send_event("step", 100)
    """
    if event not in EVENTS:
        raise ValueError(f"event must be one of {list(EVENTS)}, got {event!r}.")
    if _pipe is not None:
        _write(_pipe, " ".join([event, *map(str, values)]))


def _write(pipe: int, line: str) -> bool:
    """Writes a line as a whole, or drops it; returns False if nobody can read it."""
    try:
        os.write(pipe, line.encode() + b"\n")
    except BlockingIOError:
        pass  # The pipe is full: the parent has not read for an hour.
    except OSError:
        return False
    return True


def _send_pulses() -> None:
    assert _pipe is not None
    while _write(_pipe, "pulse"):
        time.sleep(PULSE_SECONDS)
    _end_without_parent()


def _end_without_parent() -> None:
    """Ends this process, whose parent was killed; the run may save its state first."""
    with contextlib.suppress(OSError):
        print("the parent of this process is gone", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)
