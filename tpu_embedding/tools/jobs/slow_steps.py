"""Prints the stacks of all threads when a step takes far longer than usual.

A step that waits for another host, a disk or a lock says nothing by itself. Each
process watches its own steps. All wait for the slowest one, so every host prints its
stacks.
"""

import collections
import faulthandler
import statistics
import sys
import threading
import time
from types import FrameType
from typing import Final, TextIO

from tpu_embedding.distributed.output import print_line
from tpu_embedding.distributed.poller import Poller

SLOWDOWN: Final = 10.0
"""Multiple of the usual time at which a step counts as slow."""

MIN_SECONDS: Final = 10.0
"""Minimum time of a slow step: short steps vary by far more than long ones."""

_STEPS_FOR_MEDIAN: Final = 100
_MIN_STEPS: Final = 5
_LOOK_SECONDS: Final = 1.0

_COMPILER: Final = "/jax/_src/compiler.py"
"""File of JAX whose functions are on the stack while XLA compiles."""


class SlowStepWatch:
    """Watches the time between completed steps, in a thread.

    Pauses, such as evaluations and saves, do not count. A step that compiles, for new
    sizes of its ids, is not slow.

    Example:
      >>> watch = SlowStepWatch()
      >>> watch.completed(1)
      >>> watch.pause()
      >>> watch.resume()
      >>> watch.close()
    """

    def __init__(
        self,
        *,
        min_seconds: float = MIN_SECONDS,
        look_seconds: float = _LOOK_SECONDS,
        file: TextIO | None = None,
    ):
        """Starts to watch.

        Args:
          min_seconds: minimum time of a slow step.
          look_seconds: time between two looks at the step in progress.
          file: file of the stacks, which has a descriptor; None: stderr.
        """
        self._min_seconds = min_seconds
        self._file = file
        self._seconds: collections.deque[float]
        self._seconds = collections.deque(maxlen=_STEPS_FOR_MEDIAN)
        self._since: float | None = None
        self._step = 0
        self._runner = threading.get_ident()
        self._reported = 0
        self._poller = Poller("slow steps", self._look, look_seconds)

    def completed(self, num_steps_done: int) -> None:
        """Notes that a step is completed; the next one has begun."""
        now = time.monotonic()
        if self._since is not None:
            self._seconds.append(now - self._since)
        self._runner = threading.get_ident()
        self._step = num_steps_done + 1
        self._since = now

    def pause(self) -> None:
        """Notes that no step runs, until `resume`."""
        self._since = None

    def resume(self) -> None:
        """Ends a pause, if there is one: the next step has begun."""
        if self._since is None and self._step:  # The first step of all compiles.
            self._since = time.monotonic()

    def close(self) -> None:
        """Ends the watch."""
        self._poller.close()

    def _look(self) -> None:
        """Reports the step in progress if it is slow and does not compile."""
        since, step = self._since, self._step
        if since is None or step == self._reported or len(self._seconds) < _MIN_STEPS:
            return
        usual = statistics.median(self._seconds.copy())
        seconds = time.monotonic() - since
        if seconds < max(self._min_seconds, SLOWDOWN * usual):
            return
        if not _is_compiling(sys._current_frames().get(self._runner)):
            self._reported = step
            self._report(step, seconds, usual)

    def _report(self, step: int, seconds: float, usual: float) -> None:
        file = self._file or sys.__stderr__  # A notebook's stderr has no descriptor.
        if file is None:
            return
        print_line(
            f"step {step} has taken {seconds:.1f} s so far, and {usual:.3f} s is "
            "usual; the stacks of all threads:",
            file,
        )
        faulthandler.dump_traceback(file, all_threads=True)


def _is_compiling(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COMPILER):
            return True
        frame = frame.f_back
    return False
