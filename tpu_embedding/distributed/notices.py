"""Notices of failures, so that an error in one process ends all within seconds.

A process that fails writes a notice. A thread in each of the others looks for notices,
because the main thread may wait for devices, where Python handles nothing. It prints
the notice, and ends its process once all have read it.
"""

import atexit
import contextlib
import dataclasses
import json
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Final, NoReturn

from tpu_embedding.distributed.job import Job
from tpu_embedding.distributed.output import drop_unwritten, print_line
from tpu_embedding.distributed.poller import POLL_SECONDS, Poller

_LEAVE_SECONDS: Final = 10.0
"""Longest wait for the other processes to read a notice."""

_END_SECONDS: Final = 3600.0
"""Longest wait at the end of a job; process 0 may write large files there."""

_NOTICES: Final = "notices"
_FAILURE: Final = "failure"
_READY: Final = "ready to leave"
_ALL_READY: Final = "all are ready to leave"

_watched: set[Job] = set()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailureNotice:
    """A notice of the process that fails first.

    Attributes:
      process: number of the process.
      message: text of the error.
      status: exit status, which all processes take.
      is_final: True if the same run would fail again; no parent then restarts it.
    """

    process: int
    message: str
    status: int
    is_final: bool = False


def watch_job(job: Job) -> None:
    """Starts the thread that looks for notices, once per job."""
    if job.num_processes > 1 and job not in _watched:
        _watched.add(job)
        poller = Poller("notices", lambda: _end_if_noticed(job))
        # JAX closes the store at exit, and functions run there in reverse order.
        atexit.register(poller.close)


@contextlib.contextmanager
def ending_together(job: Job) -> Iterator[None]:
    """Ends all processes of a job if the block raises an error in one of them.

    The process prints its error, the others print its number, host and message. None of
    them returns from the block. With one process, the error passes. Without an error,
    the processes wait for each other at the end of the block.

    Args:
      job: job that `start` returned.

    Example:
      >>> from tpu_embedding import distributed
      >>> with distributed.ending_together(distributed.start()):
      ...     pass  # prepare, train, save
    """
    if job.num_processes == 1:
        yield
        return
    watch_job(job)
    try:
        yield
        _wait_for_the_others(job)
    except BaseException as error:
        status = 1
        if isinstance(error, SystemExit):
            if error.code in (None, 0):
                _wait_for_the_others(job)
                raise
            status = error.code if isinstance(error.code, int) else 1
        elif isinstance(error, KeyboardInterrupt):
            status = 128 + signal.SIGINT  # as shells report it
        else:
            print_line(traceback.format_exc().rstrip(), sys.stderr)
        end_job(job, f"{type(error).__name__}: {error}", status)


@contextlib.contextmanager
def leaving_together(job: Job) -> Iterator[None]:
    """Waits at the end of the block until all processes of a job are there.

    Up to then, a notice ends all of them. Nobody looks for notices during the shutdown
    of JAX, which aborts the processes that wait there for one that fails.

    An error ends the block at once. `SystemExit` and `KeyboardInterrupt` wait: a signal
    stops all processes.
    """
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        _wait_for_the_others(job)
        raise
    _wait_for_the_others(job)


def _wait_for_the_others(job: Job) -> None:
    job.exchange("end", None, lambda values: None, timeout_seconds=_END_SECONDS)


def end_job(job: Job, message: str, status: int, *, is_final: bool = False) -> NoReturn:
    """Prints an error, and ends this process and all others.

    An error that follows from the failure of another process is not printed, but the
    notice of that process.

    Args:
      job: job of this process.
      message: text of the error.
      status: exit status of all processes.
      is_final: True if the same run would fail again.
    """
    with contextlib.suppress(Exception):  # Process 0 may be gone.
        _end_if_noticed(job)
    job.ending.acquire()
    own = FailureNotice(
        process=job.process_index, message=message, status=status, is_final=is_final
    )
    name = f"process {job.process_index} (host {platform.node()}): "
    name = name if job.num_processes > 1 else ""
    print_line(f"error: {name}{message}", sys.stderr)
    with contextlib.suppress(Exception):
        job.store.set(f"{_NOTICES}/{_FAILURE}", json.dumps(dataclasses.asdict(own)))
    _leave(job, status)


def _leave(job: Job, status: int) -> NoReturn:
    """Ends the process, without waiting for threads or devices.

    All processes leave together, once each has printed the error: the end of one breaks
    the connections of the others, whose runtime then aborts them. Process 0 holds the
    store, so it is last.
    """
    drop_unwritten()
    for act in job.last_acts:
        with contextlib.suppress(Exception):
            act()
    with contextlib.suppress(Exception):
        job.store.set(f"{_READY}/{job.process_index}", "")
        if job.is_first:
            deadline = time.monotonic() + _LEAVE_SECONDS
            while len(job.store.items(_READY)) < job.num_processes:
                if time.monotonic() > deadline:
                    break
                time.sleep(POLL_SECONDS / 5)
            job.store.set(_ALL_READY, "")
            time.sleep(POLL_SECONDS)  # The others are about to end.
        else:
            # Process 0 may be late itself.
            job.store.get(_ALL_READY, 2 * _LEAVE_SECONDS)
    os._exit(status)


def _end_if_noticed(job: Job) -> None:
    text = job.store.items(_NOTICES).get(_FAILURE)
    if text is None:
        return
    notice = FailureNotice(**json.loads(text))
    if notice.process == job.process_index:
        return  # It is leaving already.
    job.ending.acquire()
    if notice.is_final:
        for act in job.final_acts:
            act()
    name = job.name_of(notice.process)
    print_line(f"error: {name}: {notice.message}", sys.stderr)
    _leave(job, notice.status)
