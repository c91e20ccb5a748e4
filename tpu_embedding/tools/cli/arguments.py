"""Options that several commands share, emulated devices, and errors of the user."""

import contextlib
import dataclasses
from typing import Annotated

import jax
import tyro
from jax.sharding import Mesh

from tpu_embedding.plan.mesh_options import device_mesh
from tpu_embedding.tools.train.origin import RunOrigin


class UsageError(ValueError):
    """Raised if the command line contradicts itself or names something missing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigCommand:
    """Options of a command that takes a config."""

    config: Annotated[str, tyro.conf.Positional]
    """Name of a config, or path of a Python file that defines `config`, or of a CSV
    file."""

    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Change of the config as KEY=VALUE, such as num_steps=100 or model.dim=8; may be
    repeated. `--set help` lists the keys of the config."""

    def origin(self) -> RunOrigin:
        """Returns what the run is started with."""
        return RunOrigin(config=self.config, settings=self.set)


def emulated_mesh(count: int, num_processes: int = 1) -> Mesh:
    """Returns a mesh of CPU devices; creates them if JAX is not initialised yet.

    Args:
      count: devices of all processes together.
      num_processes: processes of the job, each of which has an equal number.
    """
    emulate_devices(count // num_processes)
    devices = jax.devices("cpu")
    if count % num_processes or len(devices) < count:
        raise UsageError(
            f"--devices {count}: JAX has {len(devices)} CPU devices in {num_processes} "
            "processes; give a multiple of the processes, in a process of its own."
        )
    return device_mesh(devices[:count])


def emulate_devices(count: int) -> None:
    """Lets JAX start with so many CPU devices, unless it has started already."""
    jax.config.update("jax_platforms", "cpu")
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)
