"""The doctor's report: tables for the screen, and JSON to attach to a bug report.

The JSON names no user, host or home directory.
"""

import dataclasses
import datetime
import getpass
import os
import pathlib
import platform
import re
import socket
from collections.abc import Sequence
from typing import Any, Final

from tpu_embedding.kernel_verdicts import Verdict
from tpu_embedding.plan.memory import format_table
from tpu_embedding.tools.doctor.devices import FoundDevices
from tpu_embedding.tools.doctor.environment import versions
from tpu_embedding.tools.doctor.findings import Finding, has_failures
from tpu_embedding.tools.doctor.kernel_checks import CaseRun, Tier

FORMAT: Final = 2
"""Version of the JSON's structure."""

_UNMEASURED: Final = "unmeasured"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The results of one run of the doctor.

    Attributes:
      tier: quick or full.
      created: time of the run, UTC.
      seconds: time that it took.
      findings: findings in the order of the checks.
      found: the devices; None: JAX did not start.
      run: the cases of rows; None: JAX did not start.
      verdicts: the verdicts on the kernels.
    """

    tier: Tier
    created: datetime.datetime
    seconds: float
    findings: tuple[Finding, ...]
    found: FoundDevices | None
    run: CaseRun | None
    verdicts: tuple[Verdict, ...]

    @property
    def has_failed(self) -> bool:
        """True if a check failed."""
        return has_failures(self.findings)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON values, without names of users and hosts."""
        run = self.run
        document = {
            "format": FORMAT,
            "created": self.created.isoformat(timespec="seconds"),
            "seconds": round(self.seconds, 1),
            "tier": self.tier,
            "result": "failed" if self.has_failed else "ok",
            "machine": {
                "system": f"{platform.system()} {platform.release()}",
                "processor": platform.machine(),
                "cpus": os.cpu_count(),
            },
            "versions": versions(),
            "devices": self.found and dataclasses.asdict(self.found),
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "kernels": run and run.kernels,
            "cases": [dataclasses.asdict(result) for result in run.results]
            if run
            else [],
            "verdicts": [dataclasses.asdict(verdict) for verdict in self.verdicts],
        }
        return _without_names(document, _names_of_this_machine())


def _names_of_this_machine() -> dict[str, str]:
    """Returns the names that a report must not show, and a text in place of each."""
    names = {str(pathlib.Path.home()): "~", socket.gethostname(): "HOST"}
    try:
        names[getpass.getuser()] = "USER"
    except (OSError, KeyError):
        pass  # A container without names of users.
    # The word is no secret, and a part of many others.
    return {name: text for name, text in names.items() if name not in ("/", "root")}


def _without_names(value: Any, names: dict[str, str]) -> Any:
    """Returns JSON values with other texts in place of some names."""
    if isinstance(value, dict):
        return {key: _without_names(item, names) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_names(item, names) for item in value]
    if isinstance(value, str):
        for name, text in names.items():
            value = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", text, value)
    return value


def format_times(run: CaseRun) -> str | None:
    """Returns the table of times; None if nothing was timed."""
    rows: list[tuple[str, ...]] = [
        ("time of one call", run.kernels or "kernels", "xla", "xla / kernel")
    ]
    for result in run.results:
        if result.xla_seconds_per_call is not None:
            cells = (
                _cell(result.seconds_per_call, 1e3, ".3f", " ms"),
                _cell(result.xla_seconds_per_call, 1e3, ".3f", " ms"),
                _cell(result.speed_ratio, 1, ".3g", "x"),
            )
            rows.append((result.case, *cells))
    return format_table(rows, num_left_aligned=1) if len(rows) > 1 else None


def _cell(value: float | None, scale: float, form: str, unit: str = "") -> str:
    return _UNMEASURED if value is None else f"{scale * value:{form}}{unit}"


def format_verdicts(verdicts: Sequence[Verdict]) -> str | None:
    """Returns the table of verdicts; None if there are none."""
    if not verdicts:
        return None
    rows: list[tuple[str, ...]] = [
        ("verdict on", "dim", "rule", "all equal", "speed", '"auto" runs')
    ]
    for verdict in verdicts:
        rows.append(
            (
                verdict.direction,
                str(verdict.dim),
                verdict.rule if verdict.direction == "update" else "",
                "yes" if verdict.problem is None else "no",
                _cell(verdict.speed_ratio, 1, ".3g", "x of XLA"),
                "kernel" if verdict.allows_kernel else "XLA",
            )
        )
    return format_table(rows, num_left_aligned=1)
