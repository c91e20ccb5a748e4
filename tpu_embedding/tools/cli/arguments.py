"""Options, emulated devices and usage errors that several commands share."""

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
    """Options for commands that take a config."""

    config: Annotated[str, tyro.conf.Positional]
    """Config name, or path of a Python file that defines `config`."""

    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Changes the config: KEY=VALUE, such as num_steps=100 or model.dim=8.
    `--set help` lists the keys."""

    def origin(self) -> RunOrigin:
        return RunOrigin(config=self.config, settings=self.set)


def emulated_mesh(count: int, num_processes: int = 1) -> Mesh:
    """Makes a mesh of `count` CPU devices, divided equally among the processes."""
    emulate_devices(count // num_processes)
    # JAX has fewer than `count` devices if it had already started, for example in a
    # notebook.
    devices = jax.devices("cpu")
    if count % num_processes or not 1 <= count <= len(devices):
        raise UsageError(
            f"--devices must be from 1 to JAX's {len(devices)} CPU devices and "
            f"divisible by the number of processes, {num_processes}, got {count}."
        )
    return device_mesh(devices[:count])


def emulate_devices(count: int) -> None:
    """Makes JAX start with `count` CPU devices, unless it has started already."""
    # JAX would otherwise also start a TPU, which only one process can use.
    jax.config.update("jax_platforms", "cpu")
    # JAX raises a RuntimeError if it has started; `emulated_mesh` checks the count.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", max(1, count))
