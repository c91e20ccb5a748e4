"""The options of `train` about processes: their job, and the parent over them."""

import argparse
import functools
from typing import Literal, get_args

from tpu_embedding import distributed
from tpu_embedding.distributed.cluster_detection import find_place
from tpu_embedding.distributed.notices import end_job
from tpu_embedding.tools.cli.arguments import UsageError, positive_int
from tpu_embedding.tools.jobs.early_signals import early_signals
from tpu_embedding.tools.jobs.parent_command import run_under_parent
from tpu_embedding.tools.jobs.pulses import is_worker, send_event

Supervise = Literal["auto", "always", "never"]


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
    """Adds the options that are the parent's, not the worker's."""
    group = parser.add_argument_group(
        "failures",
        "A parent process starts the run, and reports a process that fails or hangs.",
    )
    group.add_argument(
        "--restarts",
        type=positive_int,
        metavar="N",
        help="start a failed run again from its newest checkpoint, up to N times; not "
        "at all by default",
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
    if parsed.supervise == "never":
        if parsed.restarts is not None:
            raise UsageError("--restarts needs a parent; leave --supervise out.")
        return None
    place = find_place(
        parsed.coordinator,
        parsed.num_processes,
        parsed.process_id,
        timeout_seconds=distributed.START_SECONDS,
    )
    if not (place or parsed.restarts or parsed.supervise == "always"):
        return None
    parent_options = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    _add_parent_arguments(parent_options)
    _, of_worker = parent_options.parse_known_args(parsed.given)
    return run_under_parent(
        of_worker,
        is_program=parsed.is_program,
        several_hosts=place is not None,
        heartbeat=parsed.heartbeat,
        restarts=parsed.restarts or 0,
    )


def start_processes(parsed: argparse.Namespace) -> distributed.Job:
    """Starts JAX in the job that options or environment name; tells the parent."""
    job = distributed.start(
        parsed.coordinator,
        parsed.num_processes,
        parsed.process_id,
        heartbeat_seconds=parsed.heartbeat,
        final_acts=[functools.partial(send_event, "final")],
    )
    if job.num_processes > 1:
        early_signals.end = functools.partial(end_job, job)
    send_event("process", job.process_index, job.num_processes)
    return job
