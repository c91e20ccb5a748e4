"""Finds this process's place in a job: from options, or from the environment.

JAX knows Cloud TPU, GKE, Slurm and Open MPI. Its detection fills in what the options
leave open; options win.
"""

import dataclasses
import os
from typing import Any, Final

from jax._src import cloud_tpu_init, clusters  # JAX has no public name for them

COORDINATOR_PORT: Final = 8476
"""Port of the coordinator. Google Cloud's default network admits it between hosts."""

_PORT_VARIABLE: Final = "JAX_COORDINATOR_PORT"
_ADDRESS_VARIABLE: Final = "JAX_COORDINATOR_ADDRESS"


class StartError(ValueError):
    """Raised if the processes of a job cannot be started together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The place of a process in its job.

    Attributes:
      coordinator: `HOST:PORT` of process 0.
      num_processes: processes of the job.
      process_id: number of this process, from 0.
      local_device_ids: devices that the process uses; None: all of its host.
    """

    coordinator: str
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator, without the brackets of IPv6."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


def find_place(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    *,
    timeout_seconds: float,
) -> Place | None:
    """Returns the place of this process; None if it is the only one.

    Args:
      coordinator: `HOST:PORT` or `HOST` of process 0; None: see the module.
      num_processes: processes of the job, or None.
      process_id: number of this process, or None.
      timeout_seconds: longest wait for the name of the coordinator's host.

    Raises:
      StartError: if options are wrong or missing, or the detection fails.

    Example:
      >>> find_place("host-0", 4, 3, timeout_seconds=1).coordinator
      'host-0:8476'
      >>> find_place(None, 1, None, timeout_seconds=1)
    """
    _check_numbers(num_processes, process_id)
    if num_processes == 1 and process_id in (None, 0):
        return None
    coordinator = coordinator or os.environ.get(_ADDRESS_VARIABLE)
    options = {
        "--coordinator": coordinator,
        "--num-processes": num_processes,
        "--process-id": process_id,
    }
    devices = None
    if None in options.values():
        found = _detect(coordinator, num_processes, process_id, timeout_seconds)
        coordinator, num_processes, process_id, devices = found
        missing = [
            name
            for name, value in zip(options, found[:3], strict=True)
            if value is None
        ]
        if len(missing) == len(options):
            return None
        if missing:
            given = [name for name in options if name not in missing]
            raise StartError(
                f"{' and '.join(given)} must be given together with "
                f"{' and '.join(missing)}: no job of Cloud TPU, GKE, Slurm or Open "
                "MPI was found here that would tell them."
            )
    assert coordinator is not None
    assert num_processes is not None
    assert process_id is not None
    if num_processes == 1:
        return None
    _check_numbers(num_processes, process_id)
    return Place(
        coordinator=_with_port(coordinator),
        num_processes=num_processes,
        process_id=process_id,
        local_device_ids=None if devices is None else tuple(devices),
    )


def _check_numbers(num_processes: int | None, process_id: int | None) -> None:
    if num_processes is not None and num_processes < 1:
        raise StartError(f"--num-processes must be at least 1, got {num_processes}.")
    if process_id is not None and process_id < 0:
        raise StartError(f"--process-id must be at least 0, got {process_id}.")
    if num_processes is None or process_id is None:
        return
    if process_id >= num_processes:
        raise StartError(
            f"--process-id must be below --num-processes, {num_processes}, because "
            f"processes are numbered from 0; got {process_id}."
        )


def _detect(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    timeout_seconds: float,
) -> tuple[str | None, int | None, int | None, Any]:
    """Fills in what is None by JAX's detection, if the process runs in a cluster."""
    has_port = _PORT_VARIABLE in os.environ
    if cloud_tpu_init.running_in_cloud_tpu_vm and not has_port:
        os.environ[_PORT_VARIABLE] = str(COORDINATOR_PORT)
    try:
        return clusters.ClusterEnv.auto_detect_unset_distributed_params(
            coordinator, num_processes, process_id, None, None, round(timeout_seconds)
        )
    except Exception as error:  # Missing variables, no answer of a metadata server.
        raise StartError(
            "The environment looks like a job of several processes, but JAX cannot "
            f"read it: {type(error).__name__}: {error}. Give --coordinator HOST:PORT, "
            "--num-processes N and --process-id I, or --num-processes 1 for this "
            "process alone."
        ) from error


def _with_port(coordinator: str) -> str:
    """Adds the default port to an address without one, and checks the port."""
    host, separator, port = coordinator.rpartition(":")
    if not separator or (coordinator.startswith("[") and coordinator.endswith("]")):
        return f"{coordinator}:{COORDINATOR_PORT}"
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise StartError(
            "--coordinator must be HOST or HOST:PORT with a port from 1 to 65535, got "
            f"{coordinator!r}."
        )
    return coordinator
