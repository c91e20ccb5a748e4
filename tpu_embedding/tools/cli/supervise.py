"""Puts the command `train` under a parent process, which watches and restarts it."""

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any, Final, Literal, get_args

from tpu_embedding.distributed.place import find_place
from tpu_embedding.distributed.starting import START_SECONDS
from tpu_embedding.tools.cli.arguments import UsageError, positive_int
from tpu_embedding.tools.jobs import __main__ as parent_file
from tpu_embedding.tools.jobs.exit_status import STOP_SIGNALS
from tpu_embedding.tools.jobs.pulses import is_worker

Supervise = Literal["auto", "always", "never"]

_IGNORED_BY_LIBTPU: Final = (signal.SIGHUP, signal.SIGPROF)

_OF_JOB: Final = ("coordinator", "num_processes", "process_id")


def add_supervision_arguments(parser: Any) -> None:
    """Adds the arguments that are the parent's, not the workers'."""
    group = parser.add_argument_group(
        "failures",
        "A parent process starts the run, reports a process that fails or hangs, and "
        "ends the others.",
    )
    group.add_argument(
        "--restarts",
        type=positive_int,
        metavar="N",
        help="start a failed run again from its newest checkpoint, up to N times; not "
        "at all by default",
    )
    group.add_argument(
        "--local-processes",
        type=positive_int,
        metavar="N",
        help="start N processes on this machine, which share the emulated --devices",
    )
    group.add_argument(
        "--supervise",
        choices=get_args(Supervise),
        default="auto",
        help="auto runs under a parent if the job has several processes, or with "
        "--restarts; it is the default",
    )


def supervise(parsed: argparse.Namespace) -> int | None:
    """Replaces this process by a parent that runs the command, if there is to be one.

    A command that was called as a function runs the parent as a process of its own.

    Args:
      parsed: arguments of `train`, with the attributes that `main` adds: `given`, the
        whole command line, and `is_program`.

    Returns:
      The exit status of the parent; None if this process is to run the command.

    Raises:
      UsageError: if options contradict each other.
      StartError: if the options or the environment of a job are wrong.
    """
    if is_worker():
        return None
    _check(parsed)
    if parsed.supervise == "never":
        return None
    is_in_job = parsed.local_processes is None and _is_in_job(parsed)
    wanted = parsed.restarts or parsed.local_processes or parsed.supervise == "always"
    if not (wanted or is_in_job):
        return None
    command = _parent_command(parsed, is_in_job)
    if not parsed.is_program:
        _put_back_ignored_signals()
        return subprocess.run(command).returncode
    sys.stdout.flush()
    sys.stderr.flush()
    # A new program has the default handlers. The parent unblocks once it has its own.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    os.execv(command[0], command)


def _put_back_ignored_signals() -> None:
    """Gives the signals that libtpu ignores their default, for the parent's process.

    libtpu ignores them when it is loaded, which Python does not know, and the parent
    and the workers would inherit that. A signal that this process has ignored since its
    start stays ignored, such as SIGHUP under `nohup`.
    """
    if threading.current_thread() is threading.main_thread():
        for number in _IGNORED_BY_LIBTPU:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, signal.SIG_DFL)


def _check(parsed: argparse.Namespace) -> None:
    if parsed.supervise == "never":
        for name in ("restarts", "local_processes"):
            if getattr(parsed, name) is not None:
                option = "--" + name.replace("_", "-")
                raise UsageError(f"{option} needs a parent; leave --supervise out.")
    count = parsed.local_processes
    if count is None:
        return
    given = [name for name in _OF_JOB if getattr(parsed, name) is not None]
    if given:
        raise UsageError(
            f"--local-processes starts a job of its own; leave --"
            f"{given[0].replace('_', '-')} out."
        )
    if parsed.devices is None or parsed.devices % count:
        raise UsageError(
            f"--local-processes {count} needs --devices, a multiple of {count}, got "
            f"{parsed.devices}: the processes share emulated devices. On TPUs, one "
            "process drives all chips of its host."
        )


def _is_in_job(parsed: argparse.Namespace) -> bool:
    place = find_place(
        *(getattr(parsed, name) for name in _OF_JOB), timeout_seconds=START_SECONDS
    )
    return place is not None


def _parent_command(parsed: argparse.Namespace, is_in_job: bool) -> list[str]:
    own = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_supervision_arguments(own)
    _, of_worker = own.parse_known_args(parsed.given)
    options = ["--heartbeat", parsed.heartbeat, "--restarts", parsed.restarts or 0]
    options += ["--workers", parsed.local_processes or 1]
    options += ["--several-hosts"] if is_in_job else []
    parent = [sys.executable, "-I", str(pathlib.Path(parent_file.__file__))]
    program = _program(parsed.is_program)
    return [*parent, *map(str, options), "--", *program, *of_worker]


_MODULE: Final = ("-m", "tpu_embedding.tools.cli")


def _program(is_program: bool) -> Sequence[str]:
    """Returns the command line of this program without the arguments.

    The program is that of the user, so that the workers import what it imports.
    """
    if not is_program:
        return [sys.executable, *_MODULE]
    _, *start = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv[1:])]
    return [sys.executable, *start]
