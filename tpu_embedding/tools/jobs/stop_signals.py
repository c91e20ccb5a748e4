"""Signals that ask a program to stop: it finishes its step and saves its state first.

SIGTERM announces that a machine is taken away, SIGHUP that a terminal is gone, and
SIGINT is Ctrl-C. The training loop asks after each step if one has arrived. A second
signal ends the process at once.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from tpu_embedding.distributed.job import Job, current_job
from tpu_embedding.distributed.output import print_line
from tpu_embedding.distributed.poller import Poller
from tpu_embedding.distributed.store import MemoryStore
from tpu_embedding.tools.jobs.early_signals import early_signals
from tpu_embedding.tools.jobs.exit_status import (
    REPEAT_SECONDS,
    STOP_SIGNALS,
    STOPPED,
)

Handler = Callable[[int, FrameType | None], None]


class RunStopped(SystemExit):
    """Raised after SIGTERM or SIGHUP stopped a run; ends a process with status 75.

    Attributes:
      message: text that says what was saved.
    """

    def __init__(self, message: str):
        super().__init__(STOPPED)
        self.message = message

    def __str__(self) -> str:
        return self.message


class StopRequest:
    """The first signal that asked the program to stop, once it has arrived.

    A signal reaches the processes of a job at different times, and one process may be a
    step ahead. If each stopped by itself, the others would wait for it for ever. So
    they agree: each tells the number of steps that it has begun, and all stop before
    the largest one. This costs nothing until a signal arrives.

    Attributes:
      signal: signal that arrived; None before.
    """

    def __init__(self, job: Job | None = None):
        """Makes the request.

        Args:
          job: job whose processes agree; None if this process stops by itself.
        """
        self.signal: signal.Signals | None = None
        self._interruption: str | None = None
        self._job = job or Job(0, 1, MemoryStore())
        self._name = f"stop {self._job.next_number('stop')}"
        self._poller: Poller | None = None
        self._lock = threading.Lock()
        self._num_begun = 0
        self._agreed: tuple[int, signal.Signals] | None = None

    @property
    def requested(self) -> bool:
        """True once a signal has arrived at this process."""
        return self.signal is not None

    def reached(self, step: int) -> bool:
        """Returns True if the program has to stop before a step.

        In a job of several processes, a signal to one of them stops all before the same
        step. Each calls this method before each step, which costs no synchronisation.

        Args:
          step: number of the step. If the method returns False, the step must run.
        """
        with self._lock:  # Held while the processes agree.
            if self.is_decided(step):
                return True
            self._num_begun = max(self._num_begun, step + 1)
            return False

    def is_decided(self, step: int) -> bool:
        """Returns True once it is certain that `reached(step)` will return True.

        The step does not begin by this call, so a loop can ask it while it waits for
        the batch of the step.
        """
        if self._job.num_processes == 1:
            return self.requested
        if self._agreed is None or step < self._agreed[0]:
            return False
        self.signal = self.signal or self._agreed[1]
        return True

    def requested_by_any(self) -> bool:
        """Returns True on all processes if a signal has arrived at one of them.

        The processes wait for each other, so it is for places other than steps.
        """
        names = self._job.exchange(
            f"{self._name} now",
            self.signal and self.signal.name,
            lambda names: [name for name in names if name],
        )
        if names:
            self.signal = self.signal or signal.Signals[names[0]]
        return bool(names)

    @contextlib.contextmanager
    def _agreeing(self) -> Iterator[None]:
        """Takes part in the agreement on a step within the block."""
        if self._job.num_processes == 1:
            yield
            return
        self._poller = Poller(self._name, self._agree)
        try:
            yield
        finally:
            self._poller.close()

    def _agree(self) -> None:
        """Passes a signal on; agrees on the step once a process has one."""
        if self._agreed is not None:
            return
        job = self._job
        if self.signal is not None:
            job.store.set(f"{self._name}/{job.process_index}", self.signal.name)
        requests = job.store.items(self._name)
        if requests:
            with self._lock:
                step = job.exchange(self._name, self._num_begun, max)
                name = requests[min(requests, key=int)]
                self._agreed = step, signal.Signals[name]

    def exit(self, message: str) -> NoReturn:
        """Leaves the program, after it has saved what it needs.

        Args:
          message: text that says what was saved; the name of the signal is put before.

        Raises:
          RunStopped: after SIGTERM or SIGHUP.
          KeyboardInterrupt: after SIGINT.
          ValueError: if no signal has arrived.
        """
        if self.signal is None:
            raise ValueError("exit needs a signal, but none has arrived.")
        message = f"{self.signal.name}: {message}"
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt(message)
        raise RunStopped(message)

    @contextlib.contextmanager
    def interrupting(self, message: str) -> Iterator[None]:
        """Lets a signal leave the block at once, for a block with nothing to save.

        Args:
          message: text for `exit`, which a signal calls.
        """
        self._interruption = message
        if self.requested:
            self.exit(message)
        yield
        self._interruption = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal in the main thread, between two operations of Python."""
        del frame
        self.signal = self.signal or signal.Signals(number)
        if self._interruption is not None:
            self.exit(self._interruption)

    def _watch(self, pipe: int) -> None:
        """Reads the number of each signal from a pipe, until that is closed.

        A thread runs this method, so that the second signal ends the process even if
        the main thread is inside XLA, where Python handles no signals.
        """
        first_time = None
        while numbers := os.read(pipe, 64):
            for number in numbers:
                if number not in STOP_SIGNALS:
                    continue
                now = time.monotonic()
                if first_time is None:
                    first_time = now
                    self.signal = self.signal or signal.Signals(number)
                    if self._poller is not None:
                        self._poller.wake()
                    self._announce()
                elif now - first_time > REPEAT_SECONDS:
                    os._exit(128 + number)  # the status that shells report

    def _announce(self) -> None:
        if self._interruption is None:
            assert self.signal is not None
            print_line(
                f"{self.signal.name}: stopping after this step; another signal stops "
                "at once",
                sys.stderr,
            )


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Lets a loop save its state when SIGTERM, SIGHUP or SIGINT asks it to stop.

    The first signal only makes `reached` of the value return True, which the loop asks
    before each step. The second one ends the process at once. A signal that the process
    ignores, such as SIGHUP under `nohup`, stays ignored. The former handlers are put
    back at the end of the block, and in forked processes.

    In a job of several processes, `reached` returns True on all of them before the same
    step, whichever got the signal.

    Outside of the main thread, Python cannot handle signals, so nothing is requested.

    Yields:
      The request, without a signal.

    Example:
      >>> with stop_on_signals() as stop:
      ...     for step in range(1000):
      ...         if step == 3:  # as `kill` of a shell does
      ...             signal.raise_signal(signal.SIGTERM)
      ...         if stop.reached(step):
      ...             break
      >>> step, stop.signal.name
      (3, 'SIGTERM')
    """
    stop = StopRequest(current_job())
    with contextlib.ExitStack() as stack:
        stack.enter_context(stop._agreeing())
        if threading.current_thread() is threading.main_thread():
            stack.enter_context(_watching(stop))
        yield stop


@contextlib.contextmanager
def _watching(stop: StopRequest) -> Iterator[None]:
    """Notes the signals of this process in a request, within the block."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    watcher = threading.Thread(target=stop._watch, args=(reader,), daemon=True)
    watcher.start()
    try:
        with _handlers(stop._handle, writer):
            yield
    finally:
        os.close(writer)
        watcher.join()
        os.close(reader)


@contextlib.contextmanager
def _handlers(handler: Handler, pipe: int) -> Iterator[None]:
    """Handles the signals within the block.

    Args:
      handler: called in the main thread.
      pipe: descriptor to which Python writes the number of each signal at once.
    """
    # A handler of the time before the run ends with it, and is no one's in a fork.
    former = {n: early_signals.handler_before(n) for n in STOP_SIGNALS}
    handled = {
        number: previous
        for number, previous in former.items()
        # None stands for a handler that is no Python function and cannot be put back.
        if previous not in (signal.SIG_IGN, None)
    }
    former_pipe = signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)

    def put_back() -> None:
        for number, previous in handled.items():
            signal.signal(number, previous)
        signal.set_wakeup_fd(former_pipe)

    _in_forked_child.append(put_back)
    try:
        for number in handled:
            signal.signal(number, handler)
        yield
    finally:
        put_back()
        _in_forked_child.pop()


_in_forked_child: list[Callable[[], None]] = []
"""Functions that put the former handlers back, which forked workers must have."""


_before_fork = threading.local()


def _block_signals() -> None:
    """Holds signals back in a thread that forks, until the child has put back."""
    mask = signal.SIG_BLOCK, STOP_SIGNALS if _in_forked_child else ()
    _before_fork.mask = signal.pthread_sigmask(*mask)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before_fork.mask)


def _put_back_in_child() -> None:
    while _in_forked_child:
        _in_forked_child.pop()()
    _unblock_signals()


os.register_at_fork(
    before=_block_signals,
    after_in_parent=_unblock_signals,
    after_in_child=_put_back_in_child,
)
