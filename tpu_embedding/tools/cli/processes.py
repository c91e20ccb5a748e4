"""The options of `train` about processes: their job, and the parent over them."""

import argparse
import functools
from typing import Any, Final, Literal, get_args

from tpu_embedding import distributed
from tpu_embedding.distributed.notices import end_job
from tpu_embedding.distributed.place import find_place
from tpu_embedding.tools.cli.arguments import UsageError, positive_int
from tpu_embedding.tools.jobs.early_signals import early_signals
from tpu_embedding.tools.jobs.parent_command import run_under_parent
from tpu_embedding.tools.jobs.pulses import is_worker, send_event

Supervise = Literal["auto", "always", "never"]

_PLACE: Final = ("coordinator", "num_processes", "process_id")
"""Arguments that name the place of a process in its job."""


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that start a process in its job, and those of its parent."""
    _add_parent_arguments(parser)
    group = parser.add_argument_group(
        "several processes",
        "Run the same command on every host. Cloud TPU, GKE, Slurm and Open MPI tell "
        "each process its place; these options win.",
    )
    group.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help=f"address of process 0, whose port is {distributed.COORDINATOR_PORT} by "
        "default",
    )
    group.add_argument(
        "--num-processes",
        type=positive_int,
        metavar="N",
        help="processes of the job; 1 starts this one alone, whatever the environment",
    )
    group.add_argument(
        "--process-id",
        type=int,
        metavar="I",
        help="number of this process, from 0",
    )
    group.add_argument(
        "--heartbeat",
        type=positive_int,
        metavar="SECONDS",
        default=distributed.HEARTBEAT_SECONDS,
        help="time without a sign of life after which a process is taken for dead; "
        f"{distributed.HEARTBEAT_SECONDS} by default",
    )


def _add_parent_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that are the parent's, not the workers'."""
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
    """Runs the command under a parent process, if there is to be one.

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
    parent_options = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    _add_parent_arguments(parent_options)
    _, of_worker = parent_options.parse_known_args(parsed.given)
    return run_under_parent(
        of_worker,
        is_program=parsed.is_program,
        workers=parsed.local_processes or 1,
        several_hosts=is_in_job,
        heartbeat=parsed.heartbeat,
        restarts=parsed.restarts or 0,
    )


def _check(parsed: argparse.Namespace) -> None:
    if parsed.supervise == "never":
        for name in ("restarts", "local_processes"):
            if getattr(parsed, name) is not None:
                raise UsageError(
                    f"{_option(name)} needs a parent; leave --supervise out."
                )
    count = parsed.local_processes
    if count is None:
        return
    for name in _PLACE:
        if getattr(parsed, name) is not None:
            raise UsageError(
                f"--local-processes starts a job of its own; leave {_option(name)} out."
            )
    if parsed.devices is None or parsed.devices % count:
        raise UsageError(
            f"--local-processes {count} needs --devices, a multiple of {count}, got "
            f"{parsed.devices}: the processes share emulated devices. On TPUs, one "
            "process drives all chips of its host."
        )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_in_job(parsed: argparse.Namespace) -> bool:
    place: list[Any] = [getattr(parsed, name) for name in _PLACE]
    return find_place(*place, timeout_seconds=distributed.START_SECONDS) is not None


def start_processes(parsed: argparse.Namespace) -> distributed.Job:
    """Starts JAX in the job that options or environment name; tells the parent."""
    job = distributed.start(
        parsed.coordinator,
        parsed.num_processes,
        parsed.process_id,
        heartbeat_seconds=parsed.heartbeat,
        final_acts=[functools.partial(send_event, "final_elsewhere")],
    )
    if job.num_processes > 1:
        early_signals.end = functools.partial(end_job, job)
    send_event("process", job.process_index, job.num_processes)
    return job
