"""Starts JAX's distributed runtime, and refuses what would end it without a message.

The runtime aborts the process if it cannot reach the coordinator, or if the port is in
use. Both are therefore tried first, and the wait for the other processes is bounded.
"""

import contextlib
import socket
import threading
import time
from typing import Final

import jax

from tpu_embedding.distributed.job import Job, current_job
from tpu_embedding.distributed.notices import watch_job
from tpu_embedding.distributed.place import Place, StartError, find_place
from tpu_embedding.distributed.store import forget_client

START_SECONDS: Final = 300.0
"""Longest wait for all processes to start, as in JAX."""

HEARTBEAT_SECONDS: Final = 100
"""Time without a sign of life after which a process is taken for dead, as in JAX."""

_GRACE_SECONDS: Final = 5.0
"""Process 0 waits longer than the others, whose connections it would break."""

_RETRY_SECONDS: Final = 0.2


def start(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_seconds: int = HEARTBEAT_SECONDS,
    timeout_seconds: float = START_SECONDS,
) -> Job:
    """Starts JAX in a job of several processes, before any other use of JAX.

    All processes call it, in the same program. Without arguments, it asks the
    environment: Cloud TPU, GKE, Slurm and Open MPI tell a process its place. Arguments
    win. Outside of a job, and with one process, it starts nothing.

    From then on, an error that ends one process within `ending_together` ends all.

    Args:
      coordinator: `HOST:PORT` of process 0, or `HOST` with port 8476.
      num_processes: processes of the job.
      process_id: number of this process, from 0.
      heartbeat_seconds: time without a sign of life after which a process is taken for
        dead; the runtime then ends the others.
      timeout_seconds: longest wait for all processes to start.

    Returns:
      The job; one of a single process if there are no others.

    Raises:
      StartError: if arguments are wrong or missing, if the coordinator cannot be
        reached, or if not all processes start in time.

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
    begin = time.monotonic()
    if place.process_id == 0:
        _check_port(place)
        timeout_seconds += _GRACE_SECONDS
    else:
        _wait_for_coordinator(place, timeout_seconds)
    _initialize(place, heartbeat_seconds, timeout_seconds - time.monotonic() + begin)
    job = current_job()
    watch_job(job)
    return job


def _check_port(place: Place) -> None:
    """Refuses a port that is in use: the runtime would crash."""
    host, port = place.address
    for family, wildcard in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        with contextlib.ExitStack() as stack:
            try:
                probe = stack.enter_context(socket.socket(family))
            except OSError:  # The host lacks one of both.
                continue
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((wildcard, port))
            except OSError as error:
                raise StartError(
                    f"Process 0 must listen on port {port} of {host}, as --coordinator "
                    f"says, but cannot: {error.strerror}. End the program that uses "
                    "it, or give all processes another --coordinator HOST:PORT."
                ) from error


def _wait_for_coordinator(place: Place, timeout_seconds: float) -> None:
    """Waits until the coordinator accepts connections."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            socket.create_connection(place.address, timeout=_RETRY_SECONDS * 10).close()
            return
        except OSError as error:
            if time.monotonic() + _RETRY_SECONDS >= deadline:
                raise StartError(
                    f"Process {place.process_id} cannot reach the coordinator "
                    f"{place.coordinator} within {timeout_seconds:g} s: {error}. Check "
                    "that process 0 runs on that host, that the address is right, and "
                    "that the firewall admits its port between the hosts."
                ) from error
        time.sleep(_RETRY_SECONDS)


def _initialize(place: Place, heartbeat_seconds: int, timeout_seconds: float) -> None:
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
                initialization_timeout=round(timeout_seconds) + 3600,
                heartbeat_timeout_seconds=heartbeat_seconds,
            )
        except BaseException as error:
            errors.append(error)

    # JAX would take SIGTERM for itself; `stop_on_signals` agrees on a step to stop at.
    jax.config.update("jax_enable_preemption_service", False)
    thread = threading.Thread(target=initialize, name="start of the job", daemon=True)
    thread.start()
    thread.join(max(timeout_seconds, 0.0))
    if thread.is_alive():
        forget_client()
        raise StartError(
            f"Not all of the {place.num_processes} processes have connected to the "
            f"coordinator {place.coordinator} within {timeout_seconds:.0f} s. Check "
            "that each host runs the same command with its own --process-id, 0 to "
            f"{place.num_processes - 1}, and see the logs of the others."
        )
    if errors:
        forget_client()
        raise StartError(
            f"JAX cannot start process {place.process_id} of {place.num_processes}: "
            f"{errors[0]}"
        ) from errors[0]
