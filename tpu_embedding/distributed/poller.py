"""A thread that looks at something regularly, such as the store of a job."""

import contextlib
import threading
from collections.abc import Callable
from typing import Final

POLL_SECONDS: Final = 0.5
"""Time between two looks at the store."""


class Poller:
    """Calls a function regularly in a thread, until it is closed."""

    def __init__(
        self, name: str, look: Callable[[], None], seconds: float | None = None
    ):
        """Starts the thread.

        Args:
          name: name of the thread.
          look: function that the thread calls. After an error, the thread calls it
            again: the network may recover. If process 0 has died, JAX's runtime ends
            this process, too.
          seconds: time between two looks; None stands for `POLL_SECONDS`.
        """
        self._look = look
        self._seconds = POLL_SECONDS if seconds is None else seconds
        self._is_closed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Lets the thread look at once."""
        self._wake.set()

    def close(self) -> None:
        """Ends the thread, after a look in progress."""
        self._is_closed = True
        self._wake.set()
        self._thread.join(timeout=10 * POLL_SECONDS)

    def _run(self) -> None:
        while not self._is_closed:
            with contextlib.suppress(Exception):
                self._look()
            self._wake.wait(self._seconds)
            self._wake.clear()
