"""A thread that runs calls one at a time."""

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from tpu_embedding.transfers import moves_arrays

ENDING: Final = threading.Event()
"""Set when the process exits. Waiting calls must then return."""

_SECONDS_TO_END: Final = 5


class Worker:
    """A thread that ends with this object or with the process."""

    # A `ThreadPoolExecutor` would keep the process alive while a call waits for an
    # abandoned loop.

    def __init__(self, name: str):
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # The thread must not refer to this object, or the object would never be
        # collected.
        arguments = (self._calls,)
        thread = threading.Thread(target=_work, args=arguments, name=name, daemon=True)
        thread.start()
        self._thread = thread
        _threads[thread] = self._calls
        self.close = weakref.finalize(self, self._calls.put, None)

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((future, function, args))
        return future

    def end(self) -> None:
        """Ends the thread after its queued calls, and waits some seconds."""
        self.close()
        self._thread.join(_SECONDS_TO_END)

    def wait(self) -> None:
        self.submit(lambda: None).result()


_threads: "weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[Any]]" = (
    weakref.WeakKeyDictionary()
)


def _work(calls: "queue.SimpleQueue[Any]") -> None:
    while (call := calls.get()) is not None and not ENDING.is_set():
        future, function, args = call
        try:  # A global transfer guard would also apply to this thread.
            future.set_result(moves_arrays(function)(*args))
        except BaseException as error:
            future.set_exception(error)
        del call, future, function, args  # They may hold a batch's rows.


@atexit.register
def _end_all() -> None:
    # Python can't safely stop a daemon thread that runs C++ code.
    ENDING.set()
    end = time.monotonic() + _SECONDS_TO_END
    for thread, calls in list(_threads.items()):
        calls.put(None)
        thread.join(max(0, end - time.monotonic()))
