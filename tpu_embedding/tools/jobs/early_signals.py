"""Ends `tpu-embedding train` with its own status if a signal arrives before the run.

Imports of jax and the start of a job take seconds. A launcher would take a process that
SIGTERM ends in that time for failed. So the handler starts first of all, and this
module imports only what takes no time.
"""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from tpu_embedding.tools.jobs.exit_status import STATUS_OF_SIGNAL, STOP_SIGNALS


class EarlySignals:
    """The handler of signals before the run, which ends the process.

    Attributes:
      end: called with a message and the exit status.
      former: handlers that this one has replaced.
    """

    def __init__(self) -> None:
        self.end: Callable[[str, int], object] = end_process
        self.former: dict[int, Any] = {}

    def start(self) -> None:
        """Handles the signals from now on; ignored ones stay ignored.

        Only the main thread can, so a call in another one changes nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in STOP_SIGNALS:
            former = signal.getsignal(number)
            if former not in (signal.SIG_IGN, None):
                self.former[number] = former
                signal.signal(number, self._handle)

    def handler_before(self, number: int) -> Any:
        """Returns the handler of a signal, or the one that this object has replaced."""
        handler = signal.getsignal(number)
        return self.former[number] if handler == self._handle else handler

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        for each in STOP_SIGNALS:  # A second signal would print a second error.
            signal.signal(each, signal.SIG_IGN)
        arrived = signal.Signals(number)
        message = f"{arrived.name}: the run has not started"
        self.end(message, STATUS_OF_SIGNAL[arrived])


def end_process(message: str, status: int) -> None:
    """Prints a message and ends the process, also in the middle of an import."""
    try:
        os.write(2, f"{message}\n".encode())
    except OSError:  # The terminal or the reader of a pipe is gone.
        pass
    os._exit(status)


early_signals: Final = EarlySignals()
