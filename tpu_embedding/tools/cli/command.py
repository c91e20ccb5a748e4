"""Parses the command line by tyro, runs a command, and prints errors in one line.

Exit status 2 means that the command, the config or the data are wrong; 1 that a run
failed after it had started, or that a program does not fit; 75 that a signal stopped a
run, which saved its state.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final

import tyro

import tpu_embedding

FAILED: Final = 1
WRONG: Final = 2

COMMANDS: Final = {
    "train": ("train", "Train", "Train the model of a config."),
    "evaluate": ("train", "Evaluate", "Evaluate the newest checkpoint of a run."),
    "compile": ("compile", "Compile", "Compile a config for TPUs, without having any."),
    "export": ("export", "Export", "Export the model of a run for serving."),
    "inspect": ("inspect", "Inspect", "List the tables of a checkpoint; print rows."),
    "doctor": ("doctor", "Doctor", "Check this machine: devices, memory, rows."),
}
"""Module, class and help of each command; a command imports only what it needs."""


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
    commands: dict[str, Callable[..., Any]] = {
        name: _outline(description) for name, (*_, description) in COMMANDS.items()
    }
    if arguments and arguments[0] in COMMANDS:
        module, name, _ = COMMANDS[arguments[0]]
        module = importlib.import_module(f"tpu_embedding.tools.cli.{module}")
        commands[arguments[0]] = getattr(module, name)
    return tyro.extras.subcommand_cli_from_dict(
        commands,
        prog="tpu-embedding",
        description="Embedding tables for JAX on TPUs.",
        args=arguments,
    )


def _outline(description: str) -> Callable[[], None]:
    """Returns a command that has a help text only, for the list of all commands."""

    def command() -> None: ...

    command.__doc__ = description
    return command


def _run(command: Any) -> int:
    """Runs a command; an error of the user or the machine becomes one line."""
    try:
        return command.run()
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except Exception as error:
        status = _status_of(error)
        if status is None:
            traceback.print_exc()
            status = FAILED
        (text,) = str(error).splitlines()[:1] or [""]
        return _fail(f"{type(error).__name__}: {text}", status)


def _status_of(error: Exception) -> int | None:
    """Returns the exit status of an error that its message explains; else None."""
    import jax

    from tpu_embedding.checkpoint.errors import CheckpointError
    from tpu_embedding.export.signature import ExportError
    from tpu_embedding.tools.cli.arguments import UsageError
    from tpu_embedding.tools.data.batch import DataError
    from tpu_embedding.tools.train.config import ConfigError
    from tpu_embedding.tools.train.run import RunDirectoryError, TrainingDivergedError

    wrong = (UsageError, ConfigError, DataError, ExportError, RunDirectoryError)
    failed = (TrainingDivergedError, OSError, MemoryError)
    if isinstance(error, (*wrong, CheckpointError)):
        return WRONG
    if isinstance(error, (*failed, jax.errors.JaxRuntimeError)):
        return FAILED
    return None


def _fail(message: str, status: int) -> int:
    print(f"error: {message}", file=sys.stderr, flush=True)
    return status
