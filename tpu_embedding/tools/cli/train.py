"""The commands `tpu-embedding train`, `evaluate` and `predict`."""

import contextlib
import csv
import dataclasses
import logging
import pathlib
import shlex
import sys
from typing import Annotated, Any

import tyro
from jax.sharding import Mesh

from tpu_embedding import distributed
from tpu_embedding.host_memory import keep_freed_memory
from tpu_embedding.paths import local_path
from tpu_embedding.tools.cli.arguments import (
    ConfigCommand,
    UsageError,
    emulate_devices,
    emulated_mesh,
)
from tpu_embedding.tools.train import run_directory
from tpu_embedding.tools.train.origin import RunOrigin, config_of_run, is_csv
from tpu_embedding.tools.train.run import evaluate, open_data, train
from tpu_embedding.tools.train.run_directory import PLOT_FILE, RECORDS_FILE
from tpu_embedding.tools.train.trained_csv import (
    CsvEncoder,
    evaluate_rows,
    predictor,
    restored_model,
)

STOPPED = 75
"""Exit status of a run that a signal stopped: EX_TEMPFAIL of sysexits.h.

Neither Python nor a shell uses it for a failure. A launcher that sees it can repeat the
command with `--resume`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run(ConfigCommand):
    """Options of a command that runs a config on some devices."""

    data_dir: str | None = None
    """File or directory of the data."""

    label: str | None = None
    """Label column of a CSV file, short for --set data.label=NAME."""

    positive: str | None = None
    """Label value to predict, short for --set data.positive=VALUE."""

    columns: str | None = None
    """Comma-separated column names, for a CSV file without a header.
    Short for --set data.column_names="NAME NAME"."""

    devices: int | None = None
    """Number of CPU devices to emulate over all processes, instead of the machine's."""

    output_dir: pathlib.Path | None = None
    """Directory for the run's files. Defaults to runs/NAME."""

    coordinator: str | None = None
    """HOST:PORT of process 0.
    Cloud TPU, GKE, Slurm and Open MPI set this and the next two options."""

    num_processes: int | None = None
    """Number of processes in the job. Each one runs this command."""

    process_id: int | None = None
    """Number of this process, from 0."""

    def origin(self) -> RunOrigin:
        """Returns what the user started the run with."""
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
        """Starts JAX, and returns the mesh of emulated devices, or None without any."""
        # Orbax logs the traceback of a failed save, and also raises the error.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        if self.devices is not None:
            if self.devices < 1:
                raise UsageError(f"--devices must be at least 1, got {self.devices}.")
            keep_freed_memory()
            emulate_devices(self.devices // (self.num_processes or 1))
        distributed.start(self.coordinator, self.num_processes, self.process_id)
        if self.devices is None:
            return None
        return emulated_mesh(self.devices, distributed.num_processes())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(_Run):
    """Trains a config's model, or a model for a CSV file.

    Prints progress, evaluates, and saves checkpoints. SIGTERM and Ctrl-C save the state
    before they stop the run. The exit status is 0 if the run is done, 1 if it failed, 2
    if the command, the config or the data are wrong, and 75 if it was stopped.
    """

    resume: bool = False
    """Continues from the newest checkpoint in the output directory, if there is one."""

    stop_at: int | None = None
    """Saves a checkpoint after this step, then stops as if interrupted."""

    profile: tuple[int, int] | None = None
    """Records a profile for xprof between two numbers of steps, such as 100 110."""

    verbose: bool = False
    """Prints the whole plan: each stack's packing, placement and backend."""

    def run(self) -> int:
        """Trains and returns the exit status."""
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
            schema = directory / run_directory.SCHEMA_FILE
            predict = f"      predict  tpu-embedding predict {shlex.quote(run)} FILE\n"
            print(
                f"next: plot     {directory / PLOT_FILE}\n"
                f"{predict if schema.exists() else ''}"
                f"      export   tpu-embedding {export}\n"
                f"      inspect  tpu-embedding inspect {shlex.quote(run)}"
            )
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate(_Run):
    """Evaluates a run's best or newest checkpoint on the held-out data.

    The first argument can also be the directory of a run of a CSV file. Then pass
    another labelled CSV file as the second argument, or the run's own file with
    --data-dir to evaluate its held-out rows. The run's records do not change.
    """

    file: Annotated[pathlib.Path | None, tyro.conf.Positional] = None
    """CSV file to evaluate, if the first argument is a run's directory."""

    def run(self) -> int:
        """Evaluates and returns the exit status."""
        if (local_path(self.config) / RECORDS_FILE).exists():
            return self._run_of_directory(local_path(self.config))
        origin = self.origin()
        config = origin.load()
        mesh = self.start_devices()
        output_dir = self.output_dir or pathlib.Path("runs") / config.name
        evaluate(config, output_dir, data_dir=origin.data_dir, mesh=mesh)
        return 0

    def _run_of_directory(self, run_dir: pathlib.Path) -> int:
        run_directory.check_files(run_dir)
        config = config_of_run(run_dir, settings=self.set, data_dir=self.data_dir)
        mesh = self.start_devices()
        data: Any = CsvEncoder.read(run_dir, source=config.data, file=self.file)
        if self.file is None and self.data_dir is not None:
            data = open_data(config, self.data_dir)
            run_directory.check_vocabularies(data, run_dir)
        elif self.file is None:
            raise UsageError(
                "A run stores no rows. Pass a CSV file with the label column: "
                f"tpu-embedding evaluate {run_dir} FILE. Or pass the run's own file "
                "with --data-dir, to evaluate its held-out rows."
            )
        model, plan, checkpoint = restored_model(config, data, run_dir, mesh)
        metrics = evaluate_rows(config, model, data, plan)
        text = "  ".join(f"{name} {value:.5g}" for name, value in metrics.items())
        print(f"step {checkpoint.name}, {self.file or self.data_dir}: {text}")
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predict:
    """Predicts each row of a CSV file with the model of a run of a CSV file.

    Needs only the run's directory. The file can have new strings, and needs no label
    column.
    """

    run_dir: Annotated[pathlib.Path, tyro.conf.Positional]
    """Output directory of the run."""

    file: Annotated[pathlib.Path, tyro.conf.Positional]
    """CSV file with the columns of the run's file."""

    output: pathlib.Path | None = None
    """CSV file to write. By default, the predictions are printed."""

    id: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Column to copy to the output. By default, rows are numbered."""

    def run(self) -> int:
        """Writes a line per row, and returns the exit status."""
        run_dir = local_path(self.run_dir)
        run_directory.check_files(run_dir)
        config = config_of_run(run_dir)
        encoder = CsvEncoder.read(run_dir, source=config.data)
        model, plan, _ = restored_model(config, encoder, run_dir, None)
        predict = predictor(model, encoder, plan)
        classes = getattr(config.data, "classes", ()) if encoder.num_classes else ()
        name = "probability" if config.loss == "log_loss" else "prediction"
        names = ["class", "probability"] if classes else [name]
        first_row, output = 1, contextlib.nullcontext(sys.stdout)
        if self.output is not None:
            output = local_path(self.output).open("w", newline="", encoding="utf-8")
        with output as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*(self.id or ["row"]), *names])
            for block in encoder.blocks(local_path(self.file)):
                if missing := [x for x in self.id if x not in block.cells]:
                    raise UsageError(
                        f"--id: {self.file} has no column {missing[0]!r}; it has "
                        f"{list(block.cells)}."
                    )
                rows = range(first_row, first_row + len(block.lines))
                columns: list[Any] = [block.cells[x] for x in self.id] or [rows]
                values = predict(block)
                if classes:
                    columns.append([classes[i] for i in values.argmax(-1)])
                    values = values.max(-1)
                columns.append([f"{x:.6g}" for x in values])
                writer.writerows(zip(*columns, strict=True))
                first_row += len(rows)
        if self.output is not None:
            print(f"wrote {first_row - 1:,} rows to {self.output}")
        return 0
