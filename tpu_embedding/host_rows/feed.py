"""Prefetches the rows of upcoming batches while a step computes.

Only the main thread runs programs on the devices, so that all processes run them in the
same order. Other threads find, plan, read and write rows. `Feed.__iter__` lists what
happens in a turn, and `stack.py` states the rules that keep the threads in order.
"""

import collections
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np

from tpu_embedding.host_rows.batch_rows import RowsOfShards, united_rows
from tpu_embedding.host_rows.messages import Messenger, ReceivedRows, raise_together
from tpu_embedding.host_rows.own_shards import Exchange
from tpu_embedding.host_rows.planner import BatchPlan, Planner
from tpu_embedding.host_rows.stack import FetchedRows, HostStack
from tpu_embedding.host_rows.store import in_threads
from tpu_embedding.host_rows.worker import ENDING, Worker
from tpu_embedding.transfers import moves_arrays

BATCHES_PLANNED: Final = 3
"""Number of batches with plans: the next batch, and two more to keep the threads
busy."""

BATCHES_FETCHED: Final = 3
"""Maximum number of batches whose rows are read before their turn."""

_NO_ROWS: Final = np.zeros(0, np.int32)
_loops: Final = itertools.count()

Batch = TypeVar("Batch")
Key = tuple[str, str]
"""Layer path and stack name."""
Plans = dict[Key, list[BatchPlan]]
"""Plans for this process's shards, by stack."""


class _Coming(NamedTuple):
    """A batch that was drawn, and its rows."""

    batch: Any
    # Rows that this process's samples read, on all shards.
    found: Future[dict[Key, RowsOfShards]]
    # Rows that all samples read, on this process's shards.
    rows: Future[dict[Key, RowsOfShards]]


class Feed(Generic[Batch]):
    """An iterable of batches and the exchanges that bring their rows.

    The caller must run a batch's exchanges before drawing the next batch, and call
    `close` at the end. `rows_of` finds the rows that this process's samples read, on
    all shards. A thread calls it in batch order.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        hosts: Mapping[Key, HostStack],
        rows_of: Callable[[Batch], dict[Key, RowsOfShards]],
    ):
        self._source, self._hosts, self._rows_of = iter(batches), hosts, rows_of
        windows = [host.stack.storage.window for host in hosts.values()]  # type: ignore
        self._window = max(windows)
        self._coming: collections.deque[_Coming] = collections.deque()
        self._plans: collections.deque[Future[Plans]] = collections.deque()
        self._fetched: collections.deque[Future[dict[Key, list[Exchange]]]] = (
            collections.deque()
        )
        # Two batches, since a loop may draw the next batch before it trains on the
        # current one.
        self._handed_out: collections.deque[dict[Key, RowsOfShards]] = (
            collections.deque(maxlen=2)
        )
        self._brought_last: dict[Key, FetchedRows] = {}
        self._turn = self._num_listed = 0
        self._own_error: Exception | None = None
        self._has_sent = self._has_ended = self._has_drawn_all = False
        self.is_closed = False
        self._stopped = threading.Event()
        self._thread = threading.get_ident()
        # All processes open loops in the same order, so they agree on a loop's number.
        self._messenger = Messenger(next(iter(hosts.values())).plan, next(_loops))
        self._planner = Worker("host_rows_planner")
        self._reader = Worker("host_rows_reader")
        # One thread, so that `features_of`, which may exchange sizes between processes,
        # is called in batch order.
        self._finder = Worker("host_rows_finder")

    def __iter__(self) -> Iterator[tuple[Batch, dict[Key, FetchedRows]]]:
        # Turn `t`, before the step of batch `t`:
        #   finder thread   find what this process reads in batch `t + window + 4`
        #   main thread     1. receive the messages sent in the last turn: the rows of
        #                      `t + window + 2`, and how many exchanges `t` needs
        #                   2. send the rows of `t + window + 3`, and the sizes of
        #                      `t + 1`
        #                   3. exchange `t`
        #   planner thread  plan `t + 2`
        #   reader thread   read the rows of `t + 1`, and start their transfer
        #   writer thread   write the rows that left with `t - 1`
        #
        # A generator, because a StopIteration from `rows_of` must not end the loop.
        while True:
            has_batch = self._draw()
            for key, rows in self._brought_last.items():
                self._hosts[key].check_brought(rows)
            if not self._has_sent:
                self._start()
            numbers = self._receive()  # Also at the end, since a message was sent.
            if not has_batch:
                return
            self._work_ahead(least=1)
            self._send(self._plans[1] if len(self._plans) > 1 else None)
            exchanges = self._fetched.popleft().result()
            plans = self._plans.popleft().result()
            coming = self._coming.popleft()
            self._turn += 1
            self._handed_out.append(coming.rows.result())
            self._brought_last = {
                key: FetchedRows(plans[key], exchanges[key], number)
                for key, number in zip(self._hosts, numbers, strict=True)
            }
            yield coming.batch, self._brought_last

    def check_end(self) -> None:
        """Raises errors from the last steps."""
        # The writer notices lost rows, so wait for it before telling other processes.
        for host in self._hosts.values():
            host.wait_for_writer()
        self._send(None, lists=False)
        self._receive()
        self._has_ended = True

    def _draw(self) -> bool:
        """Draws batches ahead, and tells whether any batch is left."""
        if any(host.feed is not self for host in self._hosts.values()):
            self._claim()
        while len(self._coming) < self._window + 5:
            found: Future[dict[Key, RowsOfShards]] = Future()
            # `next` may wait for processes that have no more batches, for example in
            # `prepare`. The watch thread compares this number with the other processes'
            # batch counts.
            self._messenger.num_awaited = self._turn + len(self._coming) + 1
            try:
                batch = next(self._source)
                found = self._finder.submit(self._find, batch)
            except StopIteration:
                self._source = iter(())  # The iterator may block after its end.
                if not self._has_drawn_all:
                    number = self._messenger.num_awaited - 1
                    self._messenger.post_last("batches", number)
                self._has_drawn_all = True
                break
            except Exception as error:  # Raised after earlier batches.
                batch, self._source = None, iter(())
                found.set_exception(error)
            finally:
                self._messenger.num_awaited = 0
            self._coming.append(_Coming(batch, found, Future()))
        return bool(self._coming)

    @moves_arrays
    def _claim(self) -> None:
        """Starts, or resumes after another feed ran or after the tables changed."""
        for host in self._hosts.values():
            host.claim(self)
        self._next_to_enter = {
            key: host.shards.planners[0].next_batch for key, host in self._hosts.items()
        }
        self._stopped = threading.Event()
        self._plans.clear()
        self._fetched.clear()
        # Batch numbers may have changed, so stamp the coming batches again.
        num_received = self._num_listed - self._turn - self._has_sent
        for coming in itertools.islice(self._coming, max(0, num_received)):
            self._planner.submit(self._enter, coming)
        if self._has_sent:  # The sent rows are still needed.
            self._receive()

    def _start(self) -> None:
        """Exchanges rows until the window is full, and plans the first batch."""
        while self._num_listed < self._turn + self._window + BATCHES_PLANNED:
            self._send(None)
            self._receive()
        self._work_ahead(least=0)
        self._send(self._plans[0] if self._plans else None, lists=False)

    def _work_ahead(self, least: int) -> None:
        """Starts to plan batches, and to read the rows for at least `least` of them."""
        while len(self._plans) < min(BATCHES_PLANNED, len(self._coming)):
            coming = self._coming[len(self._plans)]
            self._plans.append(self._planner.submit(self._plan, coming, self._stopped))
        # Processes agree on the exchange size with the first batch that has rows. Until
        # then, read only batches whose sizes have arrived.
        if all(host.exchange_rows for host in self._hosts.values()):
            least = BATCHES_FETCHED
        while len(self._fetched) < min(least, len(self._plans)):
            plans = self._plans[len(self._fetched)]
            self._fetched.append(self._reader.submit(self._fetch, plans, self._stopped))

    # The main thread sends once in each turn, and receives in the next one:

    @moves_arrays
    def _send(self, plans: Future[Plans] | None, *, lists: bool = True) -> None:
        """Sends the sizes of a batch's plans, and the rows of a later batch."""
        # An error travels in the header, and `_receive` raises it in all processes.
        # Raising it here would leave other processes waiting for this message.
        self._own_error = None
        numbers, found = [0] * 2 * len(self._hosts), {}
        try:
            for host in self._hosts.values():
                host.check_error()
            if plans is not None:
                numbers = [n for x in plans.result().values() for n in _sizes_of(x)]
        except Exception as error:
            self._own_error = error
        # A batch's rows are sent several turns before its plan needs them, so that no
        # turn waits for the devices.
        coming, self._sends_lists = None, lists
        if lists:
            number = self._num_listed - self._turn
            coming = self._coming[number] if number < len(self._coming) else None
            self._num_listed += 1
        if coming is not None:
            self._messenger.num_awaited = self._num_listed
            with contextlib.suppress(Exception):  # `_plan` raises it.
                found = coming.found.result()
            self._messenger.num_awaited = 0
        nothing = [_NO_ROWS] * len(self._messenger.processes)
        header = [self._own_error is not None, coming is not None, *numbers]
        self._messenger.send(header, [found.get(key, nothing) for key in self._hosts])
        self._has_sent = True

    @moves_arrays
    def _receive(self) -> list[int]:
        """Counts exchanges by stack. If a process has an error, all processes raise."""
        headers, rows = self._messenger.receive()
        self._has_sent = False
        has_error, has_batch, *sizes = zip(*headers, strict=True)
        if any(has_error):
            self._has_ended = True
            for host in self._hosts.values():
                host.wait_for_writer()
                with contextlib.suppress(Exception):  # Lost reads raise only once.
                    host.check_error()
            raise_together(self._own_error, self._messenger.plan)
        number = self._num_listed - 1 - self._turn
        if self._sends_lists and number < len(self._coming):
            unequal = None
            if not all(has_batch):
                ended = [i for i, x in enumerate(has_batch) if not x]
                unequal = ValueError(
                    "Batches of te.host_rows must be equally many in all processes, "
                    f"but processes {ended} have only {self._num_listed - 1}."
                )
            coming = self._coming[number]
            self._planner.submit(self._merge, coming, rows, unequal)
            self._planner.submit(self._enter, coming)
        # The busiest process decides, since all processes must run equally many
        # programs.
        most = iter(map(max, sizes))
        return [host.agree(next(most), next(most)) for host in self._hosts.values()]

    def _find(self, batch: Any) -> dict[Key, RowsOfShards]:
        return {} if self.is_closed else self._rows_of(batch)

    # Called in the planner's thread, one call at a time:

    def _merge(
        self, coming: _Coming, received: ReceivedRows, unequal: ValueError | None
    ) -> None:
        try:
            coming.found.result()
            if unequal is not None:
                raise unequal
            coming.rows.set_result(
                {
                    key: list(in_threads(united_rows, rows_by_shard))
                    for key, rows_by_shard in zip(self._hosts, received, strict=True)
                }
            )
        except BaseException as error:
            coming.rows.set_exception(error)

    def _enter(self, coming: _Coming) -> None:
        for key, rows in coming.rows.result().items():
            planners, batch = self._hosts[key].shards.planners, self._next_to_enter[key]
            list(in_threads(Planner.enter, planners, [batch] * len(planners), rows))
            self._next_to_enter[key] += 1

    def _plan(self, coming: _Coming, stopped: threading.Event) -> Plans:
        if stopped.is_set():
            return {}
        rows = coming.rows.result()
        return {key: self._hosts[key].plan_batch(rows[key]) for key in rows}

    # Called in the reader's thread, one call at a time:

    def _fetch(
        self, plans: Future[Plans], stopped: threading.Event
    ) -> dict[Key, list[Exchange]]:
        if stopped.is_set():
            return {}
        return {
            key: self._hosts[key].fetch(stack_plans, stopped)
            for key, stack_plans in plans.result().items()
        }

    def stop(self) -> None:
        """Cancels pending fetches, and waits. The caller must undo the plans."""
        self._stopped.set()
        for host in self._hosts.values():
            host.wake()
        self._planner.wait()
        self._reader.wait()

    def pin(self, host: HostStack) -> None:
        """Pins the last two batches, which may still be untrained."""
        for rows_by_stack in self._handed_out:
            for key, rows in rows_by_stack.items():
                if self._hosts[key] is host:
                    for planner, shard_rows in zip(
                        host.shards.planners, rows, strict=True
                    ):
                        planner.pin(shard_rows)

    @moves_arrays
    def close(self) -> None:
        if ENDING is None or ENDING.is_set():  # Python has cleared this module.
            return
        self.is_closed = True
        if not self._has_ended:
            self._messenger.post_last("messages", self._messenger.num_sent)
        # The garbage collector may call this in any thread, while the main thread runs
        # another pipeline. In that case, only stop the fetches. The next `claim` undoes
        # the plans.
        if threading.get_ident() == self._thread:
            for host in self._hosts.values():
                if host.feed is self:
                    host.claim(None)
                if host.feed is None:
                    host.end_writer()
            for worker in (self._finder, self._planner, self._reader):
                worker.end()
        self._stopped.set()
        # The messenger closes last. The threads above may wait for a lost process, and
        # only the messenger's watch thread notices that.
        self._messenger.close()


def _sizes_of(plans: list[BatchPlan]) -> tuple[int, int]:
    """Finds the most rows that any shard uses, and the most that must enter a cache."""
    return max(x.num_rows for x in plans), max(len(x.fetched) for x in plans)
