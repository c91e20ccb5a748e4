"""The commands `tpu-embedding train` and `tpu-embedding evaluate`."""

import dataclasses
import logging
import pathlib
from typing import Annotated

import jax
import tyro
from jax.sharding import Mesh

from tpu_embedding import distributed
from tpu_embedding.host_memory import keep_freed_memory
from tpu_embedding.tools.cli.arguments import (
    UsageError,
    emulate_devices,
    emulated_mesh,
)
from tpu_embedding.tools.train.config import apply_overrides, load_config
from tpu_embedding.tools.train.run import evaluate, train

STOPPED = 75
"""Status of a run that a signal stopped: EX_TEMPFAIL of sysexits.h.

Neither Python nor a shell uses it for a failure. A launcher that sees it can start the
same command again, with `--resume`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """Options of a command that runs a config on some devices."""

    config: Annotated[str, tyro.conf.Positional]
    """Name of a config, or path of a Python file that defines `config`."""

    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Change of the config as KEY=VALUE, such as num_steps=100 or model.dim=8; may be
    repeated. `--set help` lists the keys of the config."""

    data_dir: str | None = None
    """File or directory of the data."""

    output_dir: pathlib.Path | None = None
    """Directory of the run; runs/NAME by default."""

    devices: int | None = None
    """Emulates so many CPU devices, over all processes, in place of the machine's."""

    slices: int | None = None
    """With --devices: emulates so many equal slices."""

    coordinator: str | None = None
    """HOST:PORT of process 0. Cloud TPU, GKE, Slurm and Open MPI tell it, and the next
    two options, by themselves."""

    num_processes: int | None = None
    """Processes of the job, each of which runs this command."""

    process_id: int | None = None
    """Number of this process, from 0."""

    def start_devices(self) -> Mesh | None:
        """Starts JAX's processes and devices; returns the mesh of emulated ones."""
        # Orbax logs an error of a save with its traceback, and raises it, too.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        place = (self.coordinator, self.num_processes, self.process_id)
        if self.devices is None:
            if self.slices is not None:
                raise UsageError("--slices needs --devices: TPUs know their slices.")
            distributed.start(*place)
            return None
        keep_freed_memory()
        if self.num_processes is not None and self.num_processes > 1:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            emulate_devices(self.devices // self.num_processes)
            distributed.start(*place)
        return emulated_mesh(self.devices, distributed.num_processes(), self.slices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(_Run):
    """Trains the model of a config: prints progress, evaluates, and saves checkpoints.

    SIGTERM and Ctrl-C save the state first. Exit status: 0 if the run is done, 1 if it
    failed, 2 if the command, the config or the data are wrong, 75 if it was stopped.
    """

    resume: bool = False
    """Continues from the newest checkpoint in the output directory, if there is one."""

    stop_at: int | None = None
    """Saves a checkpoint after this step, and stops as if interrupted."""

    profile: tuple[int, int] | None = None
    """Records a profile for xprof from the first number of steps to the second."""

    def run(self) -> int:
        """Trains; returns the exit status."""
        config = apply_overrides(load_config(self.config), self.set)
        mesh = self.start_devices()
        result = train(
            config,
            self.output_dir or pathlib.Path("runs") / config.name,
            data_dir=self.data_dir,
            mesh=mesh,
            existing_run="resume" if self.resume else "refuse",
            stop_at=self.stop_at,
            profile=self.profile,
        )
        return STOPPED if result.metrics is None else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate(_Run):
    """Evaluates the newest checkpoint of a run on the held-out data."""

    def run(self) -> int:
        """Evaluates; returns the exit status."""
        config = apply_overrides(load_config(self.config), self.set)
        mesh = self.start_devices()
        output_dir = self.output_dir or pathlib.Path("runs") / config.name
        evaluate(config, output_dir, data_dir=self.data_dir, mesh=mesh)
        return 0
