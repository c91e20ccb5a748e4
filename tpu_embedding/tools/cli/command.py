"""Parses the command line with tyro, runs a command, and prints errors on one line.

Exit status 1 means that a run failed, or that a program doesn't fit in memory. Status 2
means that the command, the config or the data are wrong. Status 75 means that a signal
stopped a run.
"""

import os
import select
import sys
import traceback
from collections.abc import Sequence
from typing import Any, Final

import jax
import tyro

import tpu_embedding
from tpu_embedding.checkpoint.records import CheckpointError
from tpu_embedding.export.program_inputs import ExportError
from tpu_embedding.extras import MissingExtraError
from tpu_embedding.tools.cli.arguments import UsageError
from tpu_embedding.tools.cli.compile import Compile
from tpu_embedding.tools.cli.doctor import Doctor
from tpu_embedding.tools.cli.export import Export
from tpu_embedding.tools.cli.inspect import Inspect
from tpu_embedding.tools.cli.train import Evaluate, Train
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.train.reporting import TrainingDivergedError
from tpu_embedding.tools.train.run_config import ConfigError
from tpu_embedding.tools.train.run_directory import RunDirectoryError

FAILED: Final = 1
WRONG: Final = 2

_CLOSED_OUTPUT: Final = 141
"""Exit status that a shell reports after SIGPIPE, 128 + 13."""

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
"""Errors printed without a traceback, like `_WRONG_ERRORS`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with `arguments`, by default from `sys.argv`."""
    is_program = arguments is None
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # `--version` is handled here, because tyro would also require a subcommand.
    if arguments == ["--version"]:
        print(f"tpu-embedding {tpu_embedding.__version__}")
        return 0
    status = _run(parse(arguments))
    if is_program and status in (FAILED, WRONG):
        # At a normal exit, Orbax would wait for the disk, and JAX would wait for other
        # processes.
        sys.stdout.flush()
        os._exit(status)
    return status


def parse(arguments: Sequence[str]) -> Any:
    """Parses a command. For `--help` or wrong arguments, prints a text and exits."""
    return tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="tpu-embedding",
        description="Embedding tables for JAX on TPUs.",
        args=arguments,
    )


def _run(command: Any) -> int:
    """Runs a command, and prints user and machine errors on one line."""
    try:
        return command.run()
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError as error:
        if not _output_is_closed():
            return _fail(f"BrokenPipeError: {error}", FAILED)
        # At exit, Python would otherwise write to the closed pipe and print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED_OUTPUT
    except Exception as error:
        # Any other error is a bug, here or in a user's config, so the traceback helps.
        if not isinstance(error, _WRONG_ERRORS + _FAILURES):
            traceback.print_exc()
        status = WRONG if isinstance(error, _WRONG_ERRORS) else FAILED
        (text,) = str(error).splitlines()[:1] or [""]
        return _fail(f"{type(error).__name__}: {text}", status)


def _output_is_closed() -> bool:
    """Tells if the reader has closed the output, as `head` does."""
    try:
        descriptor = sys.stdout.fileno()
    except OSError:  # Not a file, as in a notebook.
        return False
    # A closed pipe has an error condition, which `poll` always reports.
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _fail(message: str, status: int) -> int:
    print(f"error: {message}", file=sys.stderr, flush=True)
    return status
