"""Agrees on the step at which all processes of a job stop and save.

A signal reaches processes at different times, and one may be a step ahead. If each
stopped by itself, the others would wait for it for ever. So they agree: each tells the
number of steps that it has begun, and all stop before the largest one. This costs
nothing until a signal arrives.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

from tpu_embedding.distributed.job import Job
from tpu_embedding.distributed.poller import Poller


class StopAgreement:
    """The agreement of a job on the step to stop at; see the module.

    Attributes:
      request: the request to stop that all processes know, a text; None before.
    """

    def __init__(self, job: Job, own_request: Callable[[], str | None]):
        """Makes the agreement; `running` starts it.

        Args:
          job: of several processes.
          own_request: returns this process's request to stop, or None.
        """
        self.request: str | None = None
        self._job = job
        self._own_request = own_request
        self._name = f"stop {job.next_number('stop')}"
        self._lock = threading.Lock()
        self._num_begun = 0
        self._stop_at: int | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[Callable[[], None]]:
        """Takes part in the agreement within the block.

        Yields:
          A function that passes this process's request on at once.
        """
        poller = Poller(self._name, self._poll)
        try:
            yield poller.wake
        finally:
            poller.close()

    def reached(self, step: int) -> bool:
        """Returns True if all processes stop before a step; else the step has begun.

        Args:
          step: number of the step, which rises from call to call.
        """
        with self._lock:  # Held while the processes agree.
            if self.is_decided(step):
                return True
            self._num_begun = max(self._num_begun, step + 1)
            return False

    def is_decided(self, step: int) -> bool:
        """Returns True if it is known that all processes stop before a step."""
        return self._stop_at is not None and step >= self._stop_at

    def requested_by_any(self) -> bool:
        """Returns True on all processes if one has a request; all must call it."""
        requests = self._job.exchange(
            f"{self._name} now",
            self._own_request(),
            lambda values: [each for each in values if each is not None],
        )
        if requests and self.request is None:
            self.request = requests[0]
        return bool(requests)

    def _poll(self) -> None:
        """Passes requests on; agrees on the step once there is one."""
        if self._stop_at is not None:
            return
        own = self._own_request()
        if own is not None:
            self._job.store.set(f"{self._name}/{self._job.process_index}", own)
        requests = self._job.store.items(self._name)
        if not requests:
            return
        with self._lock:
            begun = self._job.exchange(self._name, self._num_begun, max)
            self.request = requests[min(requests, key=int)]
            self._stop_at = begun
