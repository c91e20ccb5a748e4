"""Prefetches the rows of upcoming batches while a step computes.

The main thread draws batches and dispatches exchanges. A reader thread plans a batch,
reads its rows from the store and starts the transfers, two batches ahead of the
exchanges. `HostStack` states the rules that keep the two threads in order.
"""

import collections
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np

from tpu_embedding.host_rows.stack import FetchedRows, HostStack
from tpu_embedding.host_rows.worker import ENDING, Worker
from tpu_embedding.transfers import moves_arrays

BATCHES_FETCHED: Final = 3
"""Number of batches being fetched: the next batch, and two more for the reader."""

Batch = TypeVar("Batch")
Key = tuple[str, str]
"""The path of a layer, and the name of a stack."""
RowsOfStacks = Mapping[Key, np.ndarray]
"""The sorted unique rows of a batch, by stack."""


class _Coming(NamedTuple):
    """A drawn batch and its rows."""

    batch: Any
    rows: Future[RowsOfStacks]


class Feed(Generic[Batch]):
    """An iterable of batches and the exchanges that bring their rows.

    The caller must run a batch's exchanges before drawing the next batch, and call
    `close` at the end.

    Args:
      batches: batches on the host. Each is drawn `window + 2` batches early.
      hosts: host rows by stack.
      rows_of: returns a batch's rows. Called for several batches at once, in threads.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        hosts: Mapping[Key, HostStack],
        rows_of: Callable[[Batch], RowsOfStacks],
    ):
        self._source, self._hosts, self._rows_of = iter(batches), hosts, rows_of
        windows = [host.stack.storage.window for host in hosts.values()]  # type: ignore
        self._num_coming = max(windows) + BATCHES_FETCHED
        self._coming: collections.deque[_Coming] = collections.deque()
        self._fetched: collections.deque[Future[dict[Key, FetchedRows]]] = (
            collections.deque()
        )
        # Two batches, since a loop may draw a batch before training on the last.
        self._handed_out: collections.deque[RowsOfStacks] = collections.deque(maxlen=2)
        self._fetched_last: dict[Key, FetchedRows] = {}
        self._stopped = threading.Event()
        self._reader = Worker("host_rows_reader")
        # NumPy releases the GIL, so it is faster to work on several batches at once.
        self._finders = ThreadPoolExecutor(thread_name_prefix="host_rows_finder")

    def __iter__(self) -> Iterator[tuple[Batch, dict[Key, FetchedRows]]]:
        # A generator, because a StopIteration of `rows_of` must not end the loop.
        while self._draw():
            for key, rows in self._fetched_last.items():
                self._hosts[key].check_brought(rows)
            self._fetched_last = self._fetched[0].result()
            self._fetched.popleft()
            batch, rows = self._coming.popleft()
            self._handed_out.append(rows.result())
            yield batch, self._fetched_last

    def _draw(self) -> bool:
        """Draws batches ahead and starts to fetch; returns False at the end."""
        if any(host.feed is not self for host in self._hosts.values()):
            self._start()
        while len(self._coming) < self._num_coming:
            rows: Future[RowsOfStacks] = Future()
            try:
                batch = next(self._source)
                rows = self._finders.submit(self._rows_of, batch)
            except StopIteration:
                self._source = iter(())  # Its iterator may block after its end.
                break
            except Exception as error:  # Raised after the batches before it.
                batch, self._source = None, iter(())
                rows.set_exception(error)
            self._coming.append(_Coming(batch, rows))
            self._reader.submit(self._enter, self._coming[-1])
        while len(self._fetched) < min(BATCHES_FETCHED, len(self._coming)):
            coming = self._coming[len(self._fetched)]
            self._fetched.append(
                self._reader.submit(self._fetch, coming, self._stopped)
            )
        return bool(self._coming)

    @moves_arrays
    def _start(self) -> None:
        """Starts, or resumes after another pipeline ran or the tables changed."""
        for host in self._hosts.values():
            host.claim(self)
        self._unpin()
        self._next_to_enter = {
            key: host.planner.next_batch for key, host in self._hosts.items()
        }
        self._stopped = threading.Event()
        self._fetched.clear()
        for coming in self._coming:
            self._reader.submit(self._enter, coming)

    # Called in the reader thread, one call at a time:

    def _enter(self, coming: _Coming) -> None:
        for key, rows in coming.rows.result().items():
            self._hosts[key].planner.enter(self._next_to_enter[key], rows)
            self._next_to_enter[key] += 1

    def _fetch(
        self, coming: _Coming, stopped: threading.Event
    ) -> dict[Key, FetchedRows]:
        if stopped.is_set():
            return {}
        return {
            key: self._hosts[key].fetch(rows, stopped)
            for key, rows in coming.rows.result().items()
        }

    def stop(self) -> None:
        """Cancels pending fetches. The caller must undo their plans."""
        self._stopped.set()
        for host in self._hosts.values():
            host.wake()
        self._reader.wait()

    def pin(self, host: HostStack) -> None:
        """Keeps rows of the last two batches cached, since these may be untrained."""
        for rows_of_stacks in self._handed_out:
            for key, rows in rows_of_stacks.items():
                if self._hosts[key] is host:
                    host.planner.pin(rows)

    def _unpin(self) -> None:
        for rows_of_stacks in self._handed_out:
            for key, rows in rows_of_stacks.items():
                self._hosts[key].planner.unpin(rows)

    @moves_arrays
    def close(self) -> None:
        """Ends the pipeline, at the end of the batches or earlier.

        The garbage collector may call this in any thread. A thread of the pipeline must
        not wait for itself. In such a thread, this method only stops the fetches, and
        the next `claim` does the rest.
        """
        if ENDING is None or ENDING.is_set():  # Python has cleared this module.
            return
        if threading.current_thread().name.startswith("host_rows"):
            self._stopped.set()
            return
        for host in self._hosts.values():
            if host.feed is self:
                host.claim(None)
            host.end_writer()
        self._unpin()
        self._finders.shutdown(cancel_futures=True)
        self._reader.close()
