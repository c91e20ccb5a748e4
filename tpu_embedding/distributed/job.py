"""The job of several processes that this process belongs to.

Processes exchange small values through the store of JAX's coordination service. No
device takes part, so any thread may do it, and a step costs no synchronisation.
"""

import collections
import contextlib
import functools
import itertools
import json
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import jax

from tpu_embedding.distributed.store import (
    CoordinatorStore,
    MemoryStore,
    Store,
    place_in_jax,
)

EXCHANGE_SECONDS: Final = 600.0
"""Longest wait for the other processes in an exchange.

Processes that fail or die are found much earlier. The limit only ends the wait for one
that has fewer batches than others, or reads its files for that long."""

_WAIT_SECONDS: Final = 1.0
"""Time after which a wait looks if it is abandoned; Python handles signals then."""

_HOSTS: Final = "hosts"


class DisagreementError(ValueError):
    """Raised on every process if the processes of a job differ where they must not."""


class AbsentProcessError(RuntimeError):
    """Raised if a process of a job does not arrive where the others wait for it."""


class Job:
    """The processes of a job, and this one's place among them.

    Attributes:
      process_index: number of this process.
      num_processes: processes of the job; 1 outside of a job.
      store: store that the processes share.
      last_acts: functions to call before a failure of the job ends this process.
      final_acts: functions to call before that, if the same job would fail again.
      ending: lock of the thread that ends this process after a failure. The others
        wait, and report nothing.
    """

    def __init__(self, process_index: int, num_processes: int, store: Store):
        self.process_index = process_index
        self.num_processes = num_processes
        self.store = store
        self.last_acts: list[Callable[[], object]] = []
        self.final_acts: list[Callable[[], object]] = []
        self.ending = threading.RLock()
        self._abandoned: set[str] = set()
        self._numbers: dict[str, Iterator[int]] = collections.defaultdict(
            itertools.count
        )
        if num_processes > 1:
            store.set(f"{_HOSTS}/{process_index}", platform.node())

    @property
    def is_first(self) -> bool:
        """True on the process that prints, and writes the files of the run."""
        return self.process_index == 0

    def name_of(self, process: int) -> str:
        """Returns the number and the host of a process, for messages."""
        host = self.store.items(_HOSTS).get(str(process))
        return f"process {process}" + (f" (host {host})" if host else "")

    @contextlib.contextmanager
    def before_failure(self, act: Callable[[], object]) -> Iterator[None]:
        """Calls a function if a failure of the job ends this process in the block."""
        self.last_acts.append(act)
        try:
            yield
        finally:
            self.last_acts.remove(act)

    def exchange(
        self,
        name: str,
        value: Any,
        combine: Callable[[list[Any]], Any],
        *,
        timeout_seconds: float = EXCHANGE_SECONDS,
    ) -> Any:
        """Combines a value of each process, and returns the result on all of them.

        All processes call it, the same number of times for each name. Process 0
        combines the values.

        Args:
          name: name of the exchange. Exchanges of one name happen in order; threads
            use different names.
          value: JSON value of this process.
          combine: takes the values in the order of processes; returns a JSON value.
          timeout_seconds: longest wait for the other processes.

        Raises:
          AbsentProcessError: if some processes do not arrive in time, or the exchange
            was abandoned.

        Example:
          >>> current_job().exchange("steps", 7, combine=min)
          7
        """
        if self.num_processes == 1:
            return combine([value])
        call = self.next_number(f"exchange {name}")
        folder = f"exchange/{name}/{call}"
        own = f"{folder}/{self.process_index}"
        self.store.set(own, json.dumps(value))
        if self.is_first:
            values = self._collect(name, folder, timeout_seconds)
            self.store.set(f"{folder}/result", json.dumps(combine(values)))
            if call:  # All processes have read the result before: they came here.
                self.store.delete(f"exchange/{name}/{call - 1}/result")
        try:
            # Process 0 waits for the slowest process, so it may need the whole time.
            result = self._wait(name, f"{folder}/result", timeout_seconds + 30.0)
        except TimeoutError:
            raise AbsentProcessError(
                f"{self.name_of(0)} has not arrived at {name!r} within "
                f"{timeout_seconds:g} s; see its log."
            ) from None
        self.store.delete(own)
        return json.loads(result)

    def abandon(self, name: str) -> None:
        """Ends the wait of another thread in exchanges of a name; they raise errors.

        A thread that loads batches ahead would wait for batches that never come.
        """
        self._abandoned.add(name)

    def _wait(self, name: str, key: str, timeout_seconds: float) -> str:
        """Waits for a key, as `Store.get` does, unless the exchange is abandoned."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            seconds = deadline - time.monotonic()
            try:
                return self.store.get(key, min(max(seconds, 0.0), _WAIT_SECONDS))
            except TimeoutError:
                if name in self._abandoned:
                    raise AbsentProcessError(
                        f"The exchange {name!r} is abandoned, because the run ends."
                    ) from None
                if seconds <= 0:
                    raise

    def next_number(self, kind: str) -> int:
        """Returns 0, 1, 2, ... for each kind.

        Processes that run the same program give the same numbers to the same things.
        """
        return next(self._numbers[kind])

    def _collect(self, name: str, folder: str, timeout_seconds: float) -> list[Any]:
        """Returns the values of all processes, in their order."""
        present: dict[str, str] = {}
        for process in range(self.num_processes):
            if str(process) in present:
                continue
            try:
                self._wait(name, f"{folder}/{process}", timeout_seconds)
            except TimeoutError:
                raise self._absence(name, folder, timeout_seconds) from None
            # Most others have arrived meanwhile; one request reads them all.
            present = self.store.items(folder)
        return [json.loads(present[str(i)]) for i in range(self.num_processes)]

    def _absence(
        self, name: str, folder: str, timeout_seconds: float
    ) -> AbsentProcessError:
        present = self.store.items(folder)
        absent = [
            self.name_of(process)
            for process in range(self.num_processes)
            if str(process) not in present
        ]
        return AbsentProcessError(
            f"{', '.join(absent)} did not arrive at {name!r} within "
            f"{timeout_seconds:g} s. All processes must run the same command "
            "and have the same number of batches."
        )

    def agree(self, name: str, facts: Mapping[str, Any]) -> None:
        """Checks that all processes have the same facts.

        Args:
          name: name of the exchange.
          facts: JSON values by name.

        Raises:
          DisagreementError: on all processes, if some differ. The message has each
            fact that differs, its values, and the processes that have them.
        """
        if self.num_processes == 1:
            return
        problem = self.exchange(
            name, dict(facts), functools.partial(_differences, self.name_of)
        )
        if problem:
            raise DisagreementError(problem)

    def broadcast(self, name: str, value: Any) -> Any:
        """Returns the JSON value of process 0 on all processes."""
        return self.exchange(name, value, lambda values: values[0])


def _differences(
    name_of: Callable[[int], str], facts: list[dict[str, Any]]
) -> str | None:
    """Describes the facts that differ between processes; None if all are equal."""
    lines = []
    for key in dict.fromkeys(key for each in facts for key in each):
        by_value: dict[str, list[int]] = {}
        for process, each in enumerate(facts):
            text = json.dumps(each[key], sort_keys=True) if key in each else "nothing"
            by_value.setdefault(text, []).append(process)
        if len(by_value) == 1:
            continue
        lines += [
            f"  {key} is {_shorten(text)} on {_name_all(name_of, processes)}"
            for text, processes in by_value.items()
        ]
    if not lines:
        return None
    return (
        "All processes of a job must run the same command on the same data, with the "
        "same versions, but they differ:\n" + "\n".join(lines)
    )


def _shorten(text: str, size: int = 200) -> str:
    return text if len(text) <= size else f"{text[:size]}..."


def _name_all(name_of: Callable[[int], str], processes: list[int]) -> str:
    named = ", ".join(name_of(process) for process in processes[:3])
    rest = len(processes) - 3
    return named + (f" and {rest} further processes" if rest > 0 else "")


_ALONE: Final = Job(0, 1, MemoryStore())


def current_job() -> Job:
    """Returns the job of this process; a job of one process if JAX started no other.

    It does not start JAX's devices.

    Example:
      >>> current_job().num_processes
      1
    """
    if not jax.distributed.is_initialized():
        return _ALONE
    return _job_of_jax()


@functools.cache
def _job_of_jax() -> Job:
    process_index, num_processes = place_in_jax()
    if num_processes == 1:
        return _ALONE
    return Job(process_index, num_processes, CoordinatorStore())
