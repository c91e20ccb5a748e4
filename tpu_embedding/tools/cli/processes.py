"""The options of a job of several processes, and its end after an error in one."""

import argparse
import sys
import traceback
from typing import NoReturn

from tpu_embedding import distributed
from tpu_embedding.distributed.notices import end_job
from tpu_embedding.distributed.output import print_line
from tpu_embedding.tools.cli.arguments import positive_int
from tpu_embedding.tools.jobs.exit_status import FAILED
from tpu_embedding.tools.train.errors import describe_error


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that start a process in its job."""
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


def start_processes(parsed: argparse.Namespace) -> distributed.Job:
    """Starts JAX in the job that options or environment name."""
    return distributed.start(
        parsed.coordinator,
        parsed.num_processes,
        parsed.process_id,
        heartbeat_seconds=parsed.heartbeat,
    )


def end_job_by(error: BaseException) -> NoReturn:
    """Ends all processes of the job after an error that no command expects."""
    print_line("".join(traceback.format_exception(error)).rstrip(), sys.stderr)
    end_job(distributed.current_job(), describe_error(error), FAILED)
