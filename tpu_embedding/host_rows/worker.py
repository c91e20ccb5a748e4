"""A thread that makes calls one after the other."""

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Worker:
    """A thread that ends with this object, or with the process.

    A `ThreadPoolExecutor` would keep the process alive while a call waits for a loop
    that nobody continues.
    """

    def __init__(self, name: str):
        calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls = calls
        threading.Thread(target=_work, args=(calls,), name=name, daemon=True).start()
        self.close = weakref.finalize(self, calls.put, None)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Calls a function after all calls so far; returns its future result."""
        future: Future[Any] = Future()
        self._calls.put((future, function, args))
        return future

    def wait(self) -> None:
        """Returns after all calls so far."""
        self.submit(lambda: None).result()


def _work(calls: "queue.SimpleQueue[Any]") -> None:
    while (call := calls.get()) is not None:
        future, function, args = call
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)
        del call, future, function, args  # They may hold the rows of a batch.
