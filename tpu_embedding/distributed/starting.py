"""Starts JAX's distributed runtime, and refuses what would end it without a message.

The runtime aborts the process if it cannot reach the coordinator, if the port is in
use, or if two processes have one id. A roll call of all processes therefore comes
first, and the wait for them is bounded.
"""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

import jax

from tpu_embedding.distributed.cluster_detection import Place, StartError, find_place
from tpu_embedding.distributed.job import Job, current_job
from tpu_embedding.distributed.notices import watch_job
from tpu_embedding.distributed.roll_call import (
    answer_roll_call,
    connect,
    hold_roll_call,
)
from tpu_embedding.distributed.store import forget_client

START_SECONDS: Final = 300.0
"""Longest wait until all processes have come; as long as JAX waits for them."""

HEARTBEAT_SECONDS: Final = 100
"""Time without a sign of life after which a process is taken for dead, as in JAX."""

_INITIALIZE_SECONDS: Final = 100.0
"""Longest wait for JAX to start in all processes, after the roll call."""


def start(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_seconds: int = HEARTBEAT_SECONDS,
    timeout_seconds: float = START_SECONDS,
    final_acts: Iterable[Callable[[], object]] = (),
) -> Job:
    """Starts JAX in a job of several processes, before any other use of JAX.

    All processes call it, in the same program. Without arguments, it asks the
    environment: Cloud TPU, GKE, Slurm and Open MPI tell a process its place. Arguments
    win. Outside of a job, and with one process, it starts nothing.

    From then on, an error that ends one process within `ending_together` ends all.

    Args:
      coordinator: `HOST:PORT` of process 0, or `HOST` with port `COORDINATOR_PORT`.
      num_processes: processes of the job.
      process_id: number of this process, from 0.
      heartbeat_seconds: time without a sign of life after which a process is taken for
        dead; the runtime then ends the others.
      timeout_seconds: longest wait until all processes have come. JAX then has another
        100 s to start in all of them. If some have not come, process 0 takes 20 s more
        to tell late ones so.
      final_acts: functions to call if another process fails, and the same job would
        fail again.

    Returns:
      The job; one of a single process if there are no others.

    Raises:
      StartError: if arguments are wrong or missing, if the coordinator cannot be
        reached, if two processes have one id, or if not all start in time.

    Example:
      >>> start(num_processes=1).num_processes
      1
    """
    if heartbeat_seconds < 1:
        raise StartError(f"--heartbeat must be at least 1 s, got {heartbeat_seconds}.")
    place = find_place(
        coordinator, num_processes, process_id, timeout_seconds=timeout_seconds
    )
    if place is None:
        return current_job()
    if place.process_id == 0:
        hold_roll_call(place, timeout_seconds)
    else:
        answer_roll_call(place, timeout_seconds)
        deadline = time.monotonic() + _INITIALIZE_SECONDS
        connect(place, _INITIALIZE_SECONDS, deadline).close()
    _initialize(place, heartbeat_seconds)
    job = current_job()
    job.final_acts.extend(final_acts)
    watch_job(job)
    return job


def _initialize(place: Place, heartbeat_seconds: int) -> None:
    """Starts the runtime, and waits for the other processes.

    A thread waits: if the runtime gave up by itself, it would abort the process.
    """
    errors: list[BaseException] = []

    def initialize() -> None:
        try:
            jax.distributed.initialize(
                place.coordinator,
                place.num_processes,
                place.process_id,
                local_device_ids=place.local_device_ids,
                cluster_detection_method="deactivate",
                initialization_timeout=round(_INITIALIZE_SECONDS) + 3600,
                heartbeat_timeout_seconds=heartbeat_seconds,
            )
        except BaseException as error:
            errors.append(error)

    # JAX would take SIGTERM for itself; `stop_on_signals` agrees on a step to stop at.
    jax.config.update("jax_enable_preemption_service", False)
    thread = threading.Thread(target=initialize, name="start of the job", daemon=True)
    thread.start()
    thread.join(_INITIALIZE_SECONDS)
    if thread.is_alive():
        forget_client()
        raise StartError(
            f"JAX has not started in all {place.num_processes} processes of the job at "
            f"{place.coordinator} within {_INITIALIZE_SECONDS:.0f} s, though all had "
            "come; see the logs of the others."
        )
    if errors:
        forget_client()
        raise StartError(
            f"JAX cannot start process {place.process_id} of {place.num_processes}: "
            f"{errors[0]}"
        ) from errors[0]
