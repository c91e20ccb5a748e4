"""Parses the command line by tyro, runs a command, and prints errors in one line.

It also has the options that several commands share. Exit status 2 means that the
command, the config or the data are wrong; 1 that a run failed after it had started, or
that a program does not fit; 75 that a signal stopped a run, which saved its state.
"""

import contextlib
import dataclasses
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any, Final

import jax
import tyro
from jax.sharding import Mesh

import tpu_embedding
from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.export.signature import ExportError
from tpu_embedding.extras import MissingExtraError
from tpu_embedding.plan.mesh_options import device_mesh
from tpu_embedding.tools.cli.compile import Compile
from tpu_embedding.tools.cli.doctor import Doctor
from tpu_embedding.tools.cli.export import Export
from tpu_embedding.tools.cli.inspect import Inspect
from tpu_embedding.tools.cli.train import Evaluate, Train
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.train.config import ConfigError
from tpu_embedding.tools.train.origin import RunOrigin, is_csv
from tpu_embedding.tools.train.run_directory import RunDirectoryError
from tpu_embedding.tools.train.step_meter import TrainingDivergedError


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCommand(ConfigCommand):
    """Options of a command that opens the data, and makes a model on some devices."""

    data_dir: str | None = None
    """File or directory of the data."""

    label: str | None = None
    """Column of the labels of a CSV file: short for --set data.label=NAME."""

    devices: int | None = None
    """Emulates so many CPU devices, over all processes, in place of the machine's."""

    def origin(self) -> RunOrigin:
        """Returns what the run is started with."""
        settings, data_dir = self.set, self.data_dir
        if self.label is not None:
            settings = (f"data.label={shlex.quote(self.label)}", *settings)
        if data_dir is None and is_csv(self.config):
            data_dir = self.config
        return RunOrigin(config=self.config, settings=settings, data_dir=data_dir)


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


FAILED: Final = 1
WRONG: Final = 2

COMMANDS: Final = {
    "train": Train,
    "evaluate": Evaluate,
    "compile": Compile,
    "export": Export,
    "inspect": Inspect,
    "doctor": Doctor,
}

_WRONG_ERRORS: Final = (
    UsageError,
    ConfigError,
    DataError,
    ExportError,
    RunDirectoryError,
    CheckpointError,
    MissingExtraError,
)
_FAILURES: Final = (
    TrainingDivergedError,
    OSError,
    MemoryError,
    jax.errors.JaxRuntimeError,
)
"""Errors that their message explains: of the command or the data, and of a run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    Args:
      arguments: command line without the program's name; None takes it from `sys.argv`.
    """
    is_program = arguments is None
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments == ["--version"]:
        print(f"tpu-embedding {tpu_embedding.__version__}")
        return 0
    status = _run(parse(arguments))
    if is_program and status in (FAILED, WRONG):
        # At exit, Orbax would wait for the disk, and JAX for the other processes.
        sys.stdout.flush()
        os._exit(status)
    return status


def parse(arguments: Sequence[str]) -> Any:
    """Returns the command that the arguments name, a dataclass with a method `run`.

    Wrong arguments and `--help` print a text, and raise `SystemExit`.
    """
    return tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="tpu-embedding",
        description="Embedding tables for JAX on TPUs.",
        args=arguments,
    )


def _run(command: Any) -> int:
    """Runs a command; an error of the user or the machine becomes one line."""
    try:
        return command.run()
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except Exception as error:
        if not isinstance(error, _WRONG_ERRORS + _FAILURES):
            traceback.print_exc()
        status = WRONG if isinstance(error, _WRONG_ERRORS) else FAILED
        (text,) = str(error).splitlines()[:1] or [""]
        return _fail(f"{type(error).__name__}: {text}", status)


def _fail(message: str, status: int) -> int:
    print(f"error: {message}", file=sys.stderr, flush=True)
    return status
