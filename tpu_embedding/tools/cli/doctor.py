"""The command `tpu-embedding doctor`."""

import argparse
import collections
import functools
import time
from typing import Any

from tpu_embedding.hardware import EXAMPLE_TOPOLOGIES
from tpu_embedding.tools.cli.arguments import num_devices
from tpu_embedding.tools.doctor.devices import Expectation, parse_expectation
from tpu_embedding.tools.doctor.examine import examine
from tpu_embedding.tools.jobs.exit_status import FAILED


def add_doctor(commands: Any) -> None:
    """Adds the command to the subparsers of the program."""
    parser = commands.add_parser(
        "doctor",
        allow_abbrev=False,
        help="check this machine: versions, devices, memory, kernels",
        description="Checks versions, environment variables, devices and memory. Then "
        "compares lookups and updates of XLA and of the kernels with a dense "
        "reference, on the devices, and times both. The verdicts decide which kernels "
        "train uses.",
        epilog="Exit status: 0 if all is well, 1 if a check failed, 2 if the command "
        "is wrong. On a slice of several hosts, run it on all of them at the same "
        "time.",
    )
    parser.set_defaults(run=_doctor)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="check one kind of row; it can refuse kernels, but allows none",
    )
    parser.add_argument(
        "--expect",
        type=_expectation,
        metavar="DEVICES",
        help="devices that should be there: a number, or a generation and its chips "
        f"such as {EXAMPLE_TOPOLOGIES[0]} (default: TPU_ACCELERATOR_TYPE, if it is "
        "set)",
    )
    parser.add_argument(
        "--devices",
        type=num_devices,
        metavar="N",
        help="check N emulated CPU devices in place of the machine's",
    )


def _doctor(parsed: argparse.Namespace) -> int:
    start = time.perf_counter()
    findings = examine(
        functools.partial(print, flush=True),
        tier="quick" if parsed.quick else "full",
        expected=parsed.expect,
        num_devices=parsed.devices,
    )
    counts = collections.Counter(finding.status for finding in findings)
    parts = [
        f"{counts[status]} {text}"
        for status, text in (
            ("failed", "failed"),
            ("warning", "may be intended"),
            ("unmeasured", "could not be checked"),
        )
        if counts[status]
    ]
    summary = f"{len(findings)} findings: {', '.join(parts) or 'all is well'}"
    print(f"\n{summary}, {time.perf_counter() - start:.0f} s")
    return FAILED if counts["failed"] else 0


def _expectation(text: str) -> Expectation:
    try:
        return parse_expectation(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
