"""The commands `tpu-embedding train` and `tpu-embedding evaluate`."""

import dataclasses
import logging
import pathlib
import shlex

from jax.sharding import Mesh

from tpu_embedding import distributed
from tpu_embedding.host_memory import keep_freed_memory
from tpu_embedding.tools.cli.arguments import (
    ConfigCommand,
    emulate_devices,
    emulated_mesh,
)
from tpu_embedding.tools.train.origin import RunOrigin, is_csv
from tpu_embedding.tools.train.run import evaluate, train
from tpu_embedding.tools.train.run_directory import PLOT_FILE

STOPPED = 75
"""Status of a run that a signal stopped: EX_TEMPFAIL of sysexits.h.

Neither Python nor a shell uses it for a failure. A launcher that sees it can start the
same command again, with `--resume`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run(ConfigCommand):
    """Options of a command that runs a config on some devices."""

    data_dir: str | None = None
    """File or directory of the data."""

    label: str | None = None
    """Column of the labels of a CSV file: short for --set data.label=NAME."""

    positive: str | None = None
    """Value of the label to predict: short for --set data.positive=VALUE."""

    columns: str | None = None
    """Names of the columns of a file without a header, with commas between them: short
    for --set data.column_names="NAME NAME"."""

    devices: int | None = None
    """Emulates so many CPU devices, over all processes, instead of the machine's."""

    output_dir: pathlib.Path | None = None
    """Directory of the run; runs/NAME by default."""

    coordinator: str | None = None
    """HOST:PORT of process 0. Cloud TPU, GKE, Slurm and Open MPI tell it, and the next
    two options, by themselves."""

    num_processes: int | None = None
    """Processes of the job, each of which runs this command."""

    process_id: int | None = None
    """Number of this process, from 0."""

    def origin(self) -> RunOrigin:
        """Returns what the run is started with."""
        settings, data_dir = self.set, self.data_dir
        names = None if self.columns is None else self.columns.split(",")
        for key, values in (
            ("label", self.label and [self.label]),
            ("positive", self.positive and [self.positive]),
            ("column_names", names),
        ):
            if values:
                settings = (f"data.{key}={shlex.join(values)}", *settings)
        if data_dir is None and is_csv(self.config):
            data_dir = self.config
        return RunOrigin(config=self.config, settings=settings, data_dir=data_dir)

    def start_devices(self) -> Mesh | None:
        """Starts JAX's processes and devices; returns the mesh of emulated ones."""
        # Orbax logs an error of a save with its traceback, and also raises it.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        if self.devices is not None:
            keep_freed_memory()
            emulate_devices(self.devices // (self.num_processes or 1))
        distributed.start(self.coordinator, self.num_processes, self.process_id)
        if self.devices is None:
            return None
        return emulated_mesh(self.devices, distributed.num_processes())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(_Run):
    """Trains a config's model, or one for a CSV file: prints, evaluates, and saves.

    SIGTERM and Ctrl-C save the state first. Exit status: 0 if the run is done, 1 if it
    failed, 2 if the command, the config or the data are wrong, 75 if it was stopped.
    """

    resume: bool = False
    """Continues from the newest checkpoint in the output directory, if there is one."""

    stop_at: int | None = None
    """Saves a checkpoint after this step, and stops as if interrupted."""

    profile: tuple[int, int] | None = None
    """Records a profile for xprof from the first number of steps to the second."""

    verbose: bool = False
    """Prints the whole plan: packing, placement and backend of each stack of tables."""

    def run(self) -> int:
        """Trains; returns the exit status."""
        origin = self.origin()
        config = origin.load()
        mesh = self.start_devices()
        directory = self.output_dir or pathlib.Path("runs") / config.name
        result = train(
            config,
            directory,
            data_dir=origin.data_dir,
            mesh=mesh,
            existing_run="resume" if self.resume else "refuse",
            stop_at=self.stop_at,
            profile=self.profile,
            origin=origin,
            verbose=self.verbose,
        )
        if result.metrics is None:
            return STOPPED
        if distributed.is_first():
            run, served = str(directory), str(directory / "served")
            export = shlex.join(["export", run, served, *origin.export_options()])
            print(
                f"next: plot     {directory / PLOT_FILE}\n"
                f"      export   tpu-embedding {export}\n"
                f"      inspect  tpu-embedding inspect {shlex.quote(run)}"
            )
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate(_Run):
    """Evaluates the newest checkpoint of a run on the held-out data."""

    def run(self) -> int:
        """Evaluates; returns the exit status."""
        origin = self.origin()
        config = origin.load()
        mesh = self.start_devices()
        output_dir = self.output_dir or pathlib.Path("runs") / config.name
        evaluate(config, output_dir, data_dir=origin.data_dir, mesh=mesh)
        return 0
