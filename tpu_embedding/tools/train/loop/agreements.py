"""Agreements between the processes of a run, and the tasks of the first of them.

Every function here also works with one process, where it costs nothing.
"""

import contextlib
import importlib.metadata
import itertools
import platform
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from tpu_embedding.checkpoint.run_checkpoints import RunCheckpoints
from tpu_embedding.distributed.job import Job
from tpu_embedding.distributed.notices import end_job
from tpu_embedding.tools.data.batch import Batch, DataError
from tpu_embedding.tools.jobs.exit_status import INTERRUPTED, STOPPED
from tpu_embedding.tools.jobs.run_lock import RunDirectoryError
from tpu_embedding.tools.jobs.stop_signals import RunStopped, StopRequest
from tpu_embedding.tools.train.loop.run_directory import (
    LOCK_FILE,
    ExistingRun,
    RunDirectory,
)
from tpu_embedding.tools.train.loop.run_plan import describe_plan
from tpu_embedding.tools.train.loop.run_program import RunProgram

_PACKAGES: Final = ("tpu-embedding", "jax", "jaxlib", "libtpu", "flax", "numpy")

_VISIBLE_SECONDS: Final = 20.0
"""Longest wait until another host's new file shows up; NFS caches directories."""


def agree_on_run(job: Job, program: RunProgram, options: Mapping[str, Any]) -> None:
    """Checks that all processes are about to run the same steps on the same data.

    Args:
      job: job of this process.
      program: program of the run.
      options: further JSON values that must be equal.

    Raises:
      DisagreementError: on all processes, if something differs.
    """
    if job.num_processes == 1:
        return
    data = program.data.data
    names = ("num_train_samples", "num_evaluation_samples", "digest")
    facts = {
        "versions": {"python": platform.python_version()} | _versions(),
        "config": program.config.describe(),
        "options": dict(options),
        "plan": describe_plan(program.plan),
        "data": {name: getattr(data, name, None) for name in names}
        | {"checksum of batch 0": _checksum(program.batch)},
    }
    job.agree("start of the run", flatten_dict(facts, sep="."))


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _checksum(batch: Batch) -> int:
    checksum = 0
    for leaf in jax.tree.leaves(batch):
        checksum = zlib.crc32(np.ascontiguousarray(leaf).tobytes(), checksum)
    return checksum


@contextlib.contextmanager
def ending_job_when_stopped(job: Job) -> Iterator[None]:
    """Ends all processes if a signal makes one of them leave the block."""
    try:
        yield
    except (RunStopped, KeyboardInterrupt) as stopped:
        if job.num_processes > 1:
            is_stop = isinstance(stopped, RunStopped)
            end_job(job, str(stopped), STOPPED if is_stop else INTERRUPTED)
        raise


@contextlib.contextmanager
def claim_together(
    job: Job, directory: RunDirectory, existing_run: ExistingRun
) -> Iterator[str | None]:
    """Claims the directory of a run by process 0, for all processes.

    Args:
      job: job of this process.
      directory: directory of the run, on a file system that all hosts share.
      existing_run: treatment of an earlier run; see `train`.

    Yields:
      The directory that the earlier run was moved to, or None.

    Raises:
      RunDirectoryError: if the run may not start there, or some host does not see it.
    """
    with contextlib.ExitStack() as stack:
        moved_to = None
        if job.is_first:
            moved_to = stack.enter_context(directory.claim(existing_run))
            stack.enter_context(job.before_failure(directory.unlock))
        moved_to = job.broadcast(
            "claim of the directory", None if moved_to is None else str(moved_to)
        )
        _check_shared(job, directory)
        yield moved_to


def _check_shared(job: Job, directory: RunDirectory) -> None:
    """Refuses a directory that is not the same one on all hosts."""
    lock = directory.path / LOCK_FILE
    blind = _blind_processes(job, "sight of the directory", lock.exists)
    if blind:
        raise RunDirectoryError(
            f"--output-dir {directory.path} must lie on a file system that all hosts "
            f"share, but {blind} cannot see {lock}, which process 0 wrote; give a "
            "directory of NFS or of a mounted bucket."
        )


def agree_on_checkpoint(job: Job, checkpoints: RunCheckpoints) -> int | None:
    """Returns the step of the latest checkpoint, the same on all processes.

    File systems of several hosts may list an older directory for a while.

    Args:
      job: job of this process.
      checkpoints: checkpoints of the run, on a file system that all hosts share.

    Raises:
      RunDirectoryError: on all processes, if some do not see the checkpoint in time.
    """
    step = job.exchange(
        "latest checkpoint",
        checkpoints.latest_step,
        lambda steps: max((s for s in steps if s is not None), default=None),
    )
    if step is None:
        return None
    blind = _blind_processes(
        job, "sight of the checkpoint", lambda: step in checkpoints.steps
    )
    if blind:
        raise RunDirectoryError(
            f"All processes must resume from the checkpoint of step {step} in "
            f"{checkpoints.directory}, but {blind} cannot see it; start again once all "
            "hosts list it."
        )
    return step


def _blind_processes(job: Job, name: str, sees: Callable[[], bool]) -> str:
    """Waits until all processes see a file, for a while; names those that do not.

    Args:
      job: job of this process.
      name: name of the exchange.
      sees: returns True if this process sees the file.
    """
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while not (is_seen := sees()) and time.monotonic() < deadline:
        time.sleep(0.1)
    seen = job.exchange(name, is_seen, lambda values: values)
    blind = (job.name_of(process) for process, sees in enumerate(seen) if not sees)
    return ", ".join(blind)


def evaluation_batches(
    job: Job, program: RunProgram, stop: StopRequest
) -> Iterator[Batch]:
    """Yields the held-out batches until a signal arrives, the same on all processes.

    Raises:
      DataError: on all processes, if some have more batches than others.
    """
    batches = program.data.evaluation_batches()
    for number in itertools.count():
        if stop.requested_by_any():
            return
        batch = next(batches, None)
        has_batch = job.exchange(
            "evaluation batches", batch is not None, lambda values: values
        )
        if any(has_batch) != all(has_batch):
            short = has_batch.index(False)
            raise DataError(
                "All processes must have the same number of evaluation batches, got "
                f"{number} on {job.name_of(short)} and more on "
                f"{job.name_of(has_batch.index(True))}; give all hosts the same data."
            )
        if batch is None:
            return
        yield batch
