"""Measures how long the devices wait for input."""

import time
from typing import Any

import jax


class InputWait:
    """Clock of the time in which the devices have nothing to do for want of a batch.

    It runs while the training loop is blocked for the next batch and no step is in
    flight: from the later of the moment at which the loop asks for the batch, and the
    moment at which the devices complete the latest step; to the moment at which the
    batch is on its devices. The latter moment is found to a millisecond, as the loop
    looks for it that often. Time in which the devices still run is not counted.

    With several processes, each measures its own loop.
    """

    def __init__(self):
        self._latest: Any = None
        self._since: float | None = None
        self._seconds = 0.0

    def note_step(self, output: jax.Array) -> None:
        """Notes the step that was just dispatched, by one of its outputs."""
        self._latest = output

    def poll(self) -> bool:
        """Starts the clock if the devices are idle; returns True if it runs.

        The loop calls it now and then while it is blocked.
        """
        if self._since is None and (self._latest is None or self._latest.is_ready()):
            self._since = time.perf_counter()
        return self._since is not None

    def stop(self) -> None:
        """Stops the clock, because the batch has come."""
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def take(self) -> float:
        """Returns the seconds since the last call, and starts anew."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
