"""Devices and errors of the user, as several commands need them."""

import contextlib

import jax
from jax.sharding import Mesh

from tpu_embedding.plan.device_mesh import device_mesh


class UsageError(ValueError):
    """Raised if the command line contradicts itself or names something missing."""


def use_cpu_only() -> None:
    """Restricts JAX to CPU devices, unless it has been initialised already."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", "cpu")


def emulated_mesh(
    count: int, num_processes: int = 1, num_slices: int | None = None
) -> Mesh:
    """Returns a mesh of CPU devices; creates them if JAX is not initialised yet.

    Args:
      count: devices of all processes together.
      num_processes: processes of the job, each of which has an equal number.
      num_slices: equal slices to emulate; None: one.
    """
    emulate_devices(count // num_processes)
    devices = jax.devices("cpu")
    if count % num_processes or len(devices) < count:
        raise UsageError(
            f"--devices {count}: JAX has {len(devices)} CPU devices in {num_processes} "
            "processes; give a multiple of the processes, in a process of its own."
        )
    return device_mesh(devices[:count], num_slices=num_slices)


def emulate_devices(count: int) -> None:
    """Lets JAX start with so many CPU devices, unless it has started already."""
    use_cpu_only()
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)
