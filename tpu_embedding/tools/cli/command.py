"""Parses the command line, runs a command, and turns errors into exit statuses.

    tpu-embedding doctor
    tpu-embedding train CONFIG
    tpu-embedding compile CONFIG --topology GENERATION:CHIPS
    tpu-embedding export CONFIG OUTPUT
    tpu-embedding inspect CHECKPOINT

Errors end in one line on stderr, never in a traceback. Exit status 2 means that the
command, the config or the data are wrong. Exit status 1 means that a run failed after
it had started, or that a program of a run does not fit. Exit status 75 means that
SIGTERM or SIGHUP stopped a run, which saved its state.
"""

import argparse
import sys
import traceback
from collections.abc import Sequence
from typing import Final

import jax

import tpu_embedding
from tpu_embedding.checkpoint.errors import (
    CheckpointError,
    UnwritableCheckpointError,
)
from tpu_embedding.distributed import (
    AbsentProcessError,
    DisagreementError,
    StartError,
    current_job,
)
from tpu_embedding.distributed.notices import end_job
from tpu_embedding.distributed.output import drop_unwritten, print_line
from tpu_embedding.export.signature import ExportError
from tpu_embedding.tools.cli.arguments import UsageError
from tpu_embedding.tools.cli.compile import add_compile
from tpu_embedding.tools.cli.doctor import add_doctor
from tpu_embedding.tools.cli.export import add_export
from tpu_embedding.tools.cli.inspect import add_inspect
from tpu_embedding.tools.cli.train import add_train
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.jobs.exit_status import (
    FAILED,
    INTERRUPTED,
    STOPPED,
    WRONG_USAGE,
)
from tpu_embedding.tools.jobs.pulses import send_event
from tpu_embedding.tools.jobs.run_lock import RunDirectoryError
from tpu_embedding.tools.jobs.stop_signals import RunStopped
from tpu_embedding.tools.plotting import MissingPlotLibraryError
from tpu_embedding.tools.train.errors import (
    ConfigError,
    TrainingDivergedError,
    describe_error,
)


def run_command(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    Args:
      arguments: command line without the program's name; None takes it from `sys.argv`.

    Returns:
      0 on success; 1 if training failed, or if a program of a run does not fit a
      topology; 2 if settings or data are wrong; 75 if SIGTERM or SIGHUP stopped a run,
      and 130 if Ctrl-C interrupted the command.
    """
    parsed = make_parser().parse_args(arguments)
    parsed.is_program = arguments is None
    parsed.given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        return parsed.run(parsed)
    except (UnwritableCheckpointError, AbsentProcessError) as error:
        return _fail(str(error), FAILED, parsed)
    except _WRONG_USAGE_ERRORS as error:
        return _fail(str(error), WRONG_USAGE, parsed, is_final=True)
    except (TrainingDivergedError, MissingPlotLibraryError) as error:
        return _fail(str(error), FAILED, parsed, is_final=True)
    except StartError as error:  # Another host may be late.
        return _fail(str(error), WRONG_USAGE, parsed)
    except (OSError, MemoryError) as error:
        return _fail(describe_error(error), FAILED, parsed)
    except jax.errors.JaxRuntimeError as error:
        return _fail(f"XLA: {str(error).partition(chr(10))[0]}", FAILED, parsed)
    except RunStopped as stopped:
        print_line(str(stopped), sys.stderr)
        return STOPPED
    except KeyboardInterrupt as interrupt:
        print_line(str(interrupt) or "interrupted", sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if current_job().num_processes == 1:
            raise
        parsed.traceback = True
        return _fail(describe_error(error), FAILED, parsed)
    finally:
        if parsed.is_program:
            drop_unwritten()


_WRONG_USAGE_ERRORS: Final = (
    UsageError,
    ConfigError,
    DataError,
    CheckpointError,
    ExportError,
    RunDirectoryError,
    DisagreementError,
)


def _fail(
    message: str,
    status: int,
    parsed: argparse.Namespace,
    *,
    is_final: bool = False,
) -> int:
    """Prints the error that is being handled, and returns the exit status.

    In a job of several processes, it ends all of them with that status.

    Args:
      message: text of the error.
      status: exit status.
      parsed: arguments of the command.
      is_final: True if the same run would fail again; the parent is told so.
    """
    if is_final:
        send_event("final")
    if parsed.traceback:
        print_line(traceback.format_exc().rstrip(), sys.stderr)
    job = current_job()
    if job.num_processes > 1:
        end_job(job, message, status, is_final=is_final)
    print_line(f"error: {message}", sys.stderr)
    return status


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the program and all its commands."""
    parser = argparse.ArgumentParser(
        prog="tpu-embedding",
        description="Embedding tables for JAX on TPUs.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"%(prog)s {tpu_embedding.__version__}",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_doctor(commands)
    add_train(commands)
    add_compile(commands)
    add_export(commands)
    add_inspect(commands)
    for command in commands.choices.values():
        command.add_argument(
            "--traceback",
            action="store_true",
            help="print the traceback of an error, too, to debug a config of your own",
        )
    return parser
