"""A thread that makes calls one after the other."""

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

ENDING: Final = threading.Event()
"""Set when the process ends: calls that wait for something must return."""

_SECONDS_TO_END: Final = 5


class Worker:
    """A thread that ends with this object, or with the process.

    A `ThreadPoolExecutor` would keep the process alive while a call waits for a loop
    that nobody continues.
    """

    def __init__(self, name: str):
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        arguments = (self._calls,)
        thread = threading.Thread(target=_work, args=arguments, name=name, daemon=True)
        thread.start()
        _threads[thread] = self._calls
        self.close = weakref.finalize(self, self._calls.put, None)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Calls a function after all calls so far; returns its future result."""
        future: Future[Any] = Future()
        self._calls.put((future, function, args))
        return future

    def wait(self) -> None:
        """Returns after all calls so far."""
        self.submit(lambda: None).result()


_threads: "weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[Any]]" = (
    weakref.WeakKeyDictionary()
)


def _work(calls: "queue.SimpleQueue[Any]") -> None:
    while (call := calls.get()) is not None and not ENDING.is_set():
        future, function, args = call
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)
        del call, future, function, args  # They may hold the rows of a batch.


@atexit.register
def _end_all() -> None:
    """Ends all threads: Python may not stop one that runs C++ code."""
    ENDING.set()
    for thread, calls in list(_threads.items()):
        calls.put(None)
        thread.join(_SECONDS_TO_END)
