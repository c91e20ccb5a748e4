"""The exit statuses of `tpu-embedding`, and the signals that ask it to stop.

The parent process and the early handlers of signals import this module, so it imports
only the standard library.
"""

import signal
from typing import Final

DONE: Final = 0
FAILED: Final = 1
WRONG_USAGE: Final = 2

STOPPED: Final = 75
"""Status of a run that SIGTERM or SIGHUP stopped: EX_TEMPFAIL of sysexits.h.

Neither Python nor a shell uses it for a failure. A launcher that sees it can start the
same command again, with `--resume`."""

INTERRUPTED: Final = 128 + signal.SIGINT
"""Status after Ctrl-C, 130: the one that shells report."""

STATUS_OF_SIGNAL: Final[dict[int, int]] = {
    signal.SIGTERM: STOPPED,
    signal.SIGHUP: STOPPED,
    signal.SIGINT: INTERRUPTED,
}
"""Exit status of a run that each signal stopped."""

STOP_SIGNALS: Final = tuple(STATUS_OF_SIGNAL)

REPEAT_SECONDS: Final = 0.2
"""Signals that follow each other within this time are one request to stop.

GNU `timeout` signals a process and then its group, so the process gets two."""
