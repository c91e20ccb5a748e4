"""Lets a save that fails end at once, with its error as the only output.

Orbax writes in threads. After an error, a thread still waits for the other processes,
which wait elsewhere, for 20 minutes. And it logs tracebacks of the error, which it also
raises.
"""

import logging
import os
import re
import sys
from typing import Any, Final

import orbax.checkpoint as ocp

_CLOSED_LOOP: Final = "Event loop is closed"
"""Error of writes that go on when orbax has closed their event loop, after an error."""


def meet_unless_failed(*, key: str, timeout_ms: int) -> None:
    """Waits for all processes; returns at once while an error is on its way.

    Orbax also waits in a `finally`. Processes without an error are not there.

    Args:
      key: name of the meeting.
      timeout_ms: longest wait in milliseconds.
    """
    if sys.exception() is None:
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


def print_no_tracebacks(directory: str | os.PathLike[str]) -> None:
    """Drops what orbax and its writers print of errors in a directory, from now on.

    Orbax raises these errors, too. Writes go on after a save has failed, so there is no
    end at which to print again. Errors of other directories, in which the program may
    use orbax itself, are printed as before.

    Args:
      directory: the checkpoint, or all checkpoints of a run.
    """
    _directories.add(os.fspath(directory))
    logging.getLogger("absl").addFilter(_without_errors_of_saves)
    if not isinstance(sys.unraisablehook, _WithoutClosedLoops):
        sys.unraisablehook = _WithoutClosedLoops(sys.unraisablehook)


_directories: Final[set[str]] = set()


def _without_errors_of_saves(record: logging.LogRecord) -> bool:
    if not record.exc_info or "orbax" not in record.pathname:
        return True
    text = f"{record.getMessage()} {record.exc_info[1]}"
    # The name of another directory may begin with the same letters.
    return not any(re.search(re.escape(d) + r"(?![\w-])", text) for d in _directories)


class _WithoutClosedLoops:
    """A hook for errors that cannot be raised, which drops those of closed loops."""

    def __init__(self, former: Any):
        self._former = former

    def __call__(self, error: Any) -> None:
        is_dropped = isinstance(error.exc_value, RuntimeError)
        if not (is_dropped and str(error.exc_value) == _CLOSED_LOOP):
            self._former(error)
