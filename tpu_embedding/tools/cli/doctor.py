"""The command `tpu-embedding doctor`."""

import argparse
import collections
import json
import sys
from typing import Any

from tpu_embedding.hardware import EXAMPLE_TOPOLOGIES
from tpu_embedding.paths import local_path
from tpu_embedding.tools.cli.arguments import UsageError, num_devices
from tpu_embedding.tools.doctor.devices import Expectation, parse_expectation
from tpu_embedding.tools.doctor.examine import examine
from tpu_embedding.tools.doctor.report import Report
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
        "--json",
        metavar="FILE",
        help="also write the report as JSON, for a bug report; - prints it",
    )
    parser.add_argument(
        "--devices",
        type=num_devices,
        metavar="N",
        help="check N emulated CPU devices in place of the machine's",
    )
    parser.add_argument(
        "--traceback", action="store_true", help="print the traceback of an error, too"
    )


def _doctor(parsed: argparse.Namespace) -> int:
    path = None if parsed.json in (None, "-") else local_path(parsed.json)
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"--json {path}: {path.parent} is not a directory.")
    # With --json -, the standard output holds the JSON alone.
    stream = sys.stderr if parsed.json == "-" else sys.stdout
    report = examine(
        lambda line: print(line, file=stream, flush=True),
        tier="quick" if parsed.quick else "full",
        expected=parsed.expect,
        num_devices=parsed.devices,
    )
    text = json.dumps(report.to_json(), indent=1)
    if path is not None:
        path.write_text(text + "\n", encoding="utf-8")
    elif parsed.json == "-":
        print(text)
    print(f"\n{_summary(report)}, {report.seconds:.0f} s", file=stream)
    return FAILED if report.has_failed else 0


def _summary(report: Report) -> str:
    counts = collections.Counter(finding.status for finding in report.findings)
    parts = [
        f"{counts[status]} {text}"
        for status, text in (
            ("failed", "failed"),
            ("warning", "may be intended"),
            ("unmeasured", "could not be checked"),
        )
        if counts[status]
    ]
    return f"{sum(counts.values())} findings: {', '.join(parts) or 'all is well'}"


def _expectation(text: str) -> Expectation:
    try:
        return parse_expectation(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
