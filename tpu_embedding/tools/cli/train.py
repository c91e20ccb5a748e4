"""The commands `tpu-embedding train` and `evaluate`."""

import dataclasses
import logging
import pathlib
import shlex

from jax.sharding import Mesh

from tpu_embedding import distributed
from tpu_embedding.host_memory import keep_freed_memory
from tpu_embedding.paths import local_path
from tpu_embedding.tools.cli.arguments import (
    ConfigCommand,
    emulate_devices,
    emulated_mesh,
)
from tpu_embedding.tools.train.origin import RunOrigin, config_of_run
from tpu_embedding.tools.train.run import evaluate, train
from tpu_embedding.tools.train.run_directory import (
    PLOT_FILE,
    RECORDS_FILE,
    check_files,
)

STOPPED = 75
"""Exit status of a run that a signal stopped: EX_TEMPFAIL of sysexits.h.

Neither Python nor a shell uses this status for a failure. A launcher that sees it can
repeat the command with `--resume`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run(ConfigCommand):
    """Options for commands that run a config on devices."""

    data_dir: str | None = None
    """File or directory with the data."""

    devices: int | None = None
    """Number of CPU devices to emulate, in all processes together.
    By default, the machine's devices are used."""

    output_dir: pathlib.Path | None = None
    """Directory for the run's files. Defaults to runs/NAME."""

    coordinator: str | None = None
    """HOST:PORT of process 0.
    Leave out this option, --num-processes and --process-id
    on Cloud TPU, GKE, Slurm and Open MPI."""

    num_processes: int | None = None
    """Number of processes in the job. Each one runs this command."""

    process_id: int | None = None
    """Number of this process, from 0."""

    def origin(self) -> RunOrigin:
        return RunOrigin(config=self.config, settings=self.set, data_dir=self.data_dir)

    def start_devices(self) -> Mesh | None:
        """Starts JAX, and makes the mesh if devices are emulated."""
        # Hides the traceback that Orbax logs if a save fails. Orbax also raises the
        # error.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        # Both calls must come before JAX starts.
        if self.devices is not None:
            keep_freed_memory()
            emulate_devices(self.devices // (self.num_processes or 1))
        distributed.start(self.coordinator, self.num_processes, self.process_id)
        if self.devices is None:
            return None
        return emulated_mesh(self.devices, distributed.num_processes())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(_Run):
    """Trains a config's model.

    Prints progress, evaluates, and saves checkpoints. SIGTERM and Ctrl-C save the state
    before they stop the run. The exit status is 0 if the run is done, 1 if it failed,
    and 75 if it was stopped. If the command, the config or the data are wrong, the exit
    status is 2.
    """

    resume: bool = False
    """Continues from the newest checkpoint in the output directory, if there is one."""

    stop_at: int | None = None
    """Saves a checkpoint after this step, then stops as if interrupted."""

    profile: tuple[int, int] | None = None
    """Records an xprof profile between two steps, such as 100 110."""

    verbose: bool = False
    """Prints the whole plan: each stack's packing, placement and backend."""

    def run(self) -> int:
        origin = self.origin()
        # The config is loaded before the devices start, so that a wrong config is
        # reported without waiting for other processes.
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
    """Evaluates a run's best or newest checkpoint on the held-out data.

    The first argument can also be the run directory, if the run's config is in the
    package. The metrics are added to the run's records.
    """

    def run(self) -> int:
        run_dir = local_path(self.config)
        if (run_dir / RECORDS_FILE).exists():
            check_files(run_dir)
            config = config_of_run(run_dir, settings=self.set, data_dir=self.data_dir)
        else:
            config = self.origin().load()
            run_dir = self.output_dir or pathlib.Path("runs") / config.name
        mesh = self.start_devices()
        evaluate(config, run_dir, data_dir=self.data_dir, mesh=mesh)
        return 0
