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

from tpu_embedding.hardware import HardwareInfo
from tpu_embedding.kernel_verdicts import Verdict
from tpu_embedding.plan.memory import format_table
from tpu_embedding.tools.doctor.devices import FoundDevices
from tpu_embedding.tools.doctor.environment import versions
from tpu_embedding.tools.doctor.findings import Finding, has_failures
from tpu_embedding.tools.doctor.kernel_checks import PartRun
from tpu_embedding.tools.doctor.protocol import (
    BYTES,
    MODEL_BYTES,
    SECONDS_PER_CALL,
    SPEED_RATIO,
    XLA_SECONDS_PER_CALL,
    Tier,
)

FORMAT: Final = 1
"""Version of the JSON's structure."""

_UNMEASURED: Final = "unmeasured"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The results of one run of the doctor.

    Attributes:
      tier: of the checks.
      created: time of the run, UTC.
      seconds: that it took.
      findings: in the order of the checks.
      found: the devices; None: JAX did not start.
      runs: of the cases of rows.
      verdicts: that were stored.
      hosts: names that the user gave.
    """

    tier: Tier
    created: datetime.datetime
    seconds: float
    findings: tuple[Finding, ...]
    found: FoundDevices | None
    runs: tuple[PartRun, ...]
    verdicts: tuple[Verdict, ...]
    hosts: tuple[str, ...] = ()

    @property
    def has_failed(self) -> bool:
        """True if a check failed."""
        return has_failures(self.findings)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON values, without names of users and hosts."""
        counts = [finding.status for finding in self.findings]
        document = {
            "format": FORMAT,
            "created": self.created.isoformat(timespec="seconds"),
            "seconds": round(self.seconds, 1),
            "tier": self.tier,
            "result": "failed" if self.has_failed else "ok",
            "counts": {name: counts.count(name) for name in dict.fromkeys(counts)},
            "machine": {
                "system": f"{platform.system()} {platform.release()}",
                "processor": platform.machine(),
                "cpus": os.cpu_count(),
            },
            "versions": versions(),
            "devices": None if self.found is None else _devices(self.found),
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "cases": [
                {"backend": part.backend, "part": part.part, **dataclasses.asdict(case)}
                for part in self.runs
                for case in part.run.results
            ],
            "verdicts": [dataclasses.asdict(verdict) for verdict in self.verdicts],
        }
        return _Redaction.of_this_machine(self.hosts).apply(document)


def _devices(found: FoundDevices) -> dict[str, Any]:
    hardware = found.hardware
    return {
        "platform": found.platform,
        "kinds": {kind: found.kinds.count(kind) for kind in dict.fromkeys(found.kinds)},
        "hardware": None if hardware is None else hardware.name,
        "hbm_bytes_per_second": hardware and hardware.hbm_bytes_per_second,
    }


@dataclasses.dataclass(frozen=True)
class _Redaction:
    """The names that a report must not show, and the text in place of each."""

    names: tuple[tuple[str, str], ...]

    @classmethod
    def of_this_machine(cls, hosts: Sequence[str]) -> "_Redaction":
        names = [(str(pathlib.Path.home()), "~"), (socket.gethostname(), "HOST")]
        names += [(host, f"HOST-{i}") for i, host in enumerate(hosts)]
        try:
            names.append((getpass.getuser(), "USER"))
        except (OSError, KeyError):
            pass  # A container without names of users.
        # The word is no secret, and a part of many others.
        return cls(tuple((n, text) for n, text in names if n not in ("", "/", "root")))

    def apply(self, value: Any) -> Any:
        """Returns JSON values without the names."""
        if isinstance(value, dict):
            return {key: self.apply(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.apply(item) for item in value]
        if isinstance(value, str):
            for name, text in self.names:
                value = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", text, value)
        return value


_MARKS: Final = {
    "ok": "ok",
    "warning": "WARNING",
    "failed": "FAILED",
    "unmeasured": "unmeasured",
}


def format_finding(finding: Finding) -> str:
    """Returns the lines of a finding for the screen."""
    line = f"{_MARKS[finding.status]:10}  {finding.check}: {finding.text}"
    if finding.way_out is not None:
        line += f"\n{'':10}  -> {finding.way_out}"
    return line


def format_times(runs: Sequence[PartRun], hardware: HardwareInfo | None) -> str | None:
    """Returns the table of times and bandwidths; None if nothing was timed.

    The bandwidth counts the minimum bytes of a call. The peak is that of the hardware
    table, for one device.
    """
    peak = None
    if hardware is not None and hardware.hbm_bytes_per_second is not None:
        peak = hardware.hbm_bytes_per_second / hardware.devices_per_chip
    head = ("case", "backend", "time", "XLA's", "XLA / kernel", "GB/s", "of peak")
    rows: list[tuple[str, ...]] = [(*head, "model / minimum")]
    for part in runs:
        for case in part.run.results if part.part == "speed" else ():
            if case.ok:
                rows.append((case.case, part.backend, *_time_cells(case.figures, peak)))
    return format_table(rows, num_left_aligned=2) if len(rows) > 1 else None


def _time_cells(figures: Any, peak: float | None) -> tuple[str, ...]:
    seconds, num_bytes = figures.get(SECONDS_PER_CALL), figures.get(BYTES)
    rate = num_bytes / seconds if seconds and num_bytes else None
    model = figures.get(MODEL_BYTES)
    return (
        _cell(seconds, 1e3, ".3f", " ms"),
        _cell(figures.get(XLA_SECONDS_PER_CALL), 1e3, ".3f", " ms"),
        _cell(figures.get(SPEED_RATIO), 1, ".3g", "x"),
        _cell(rate, 1e-9, ".3g"),
        _cell(rate / peak if rate and peak else None, 100, ".1f", " %"),
        _cell(model / num_bytes if model and num_bytes else None, 1, ".1f", "x"),
    )


def _cell(value: float | None, scale: float, form: str, unit: str = "") -> str:
    return _UNMEASURED if value is None else f"{scale * value:{form}}{unit}"


def format_verdicts(verdicts: Sequence[Verdict]) -> str | None:
    """Returns the table of verdicts; None if there are none."""
    if not verdicts:
        return None
    rows: list[tuple[str, ...]] = [("verdict on", "all equal", "speed", '"auto" runs')]
    for verdict in verdicts:
        ratio = verdict.speed_ratio
        rows.append(
            (
                verdict.capability,
                "yes" if verdict.is_equal else "no",
                _UNMEASURED if ratio is None else f"{ratio:.3g}x of XLA",
                "kernel" if verdict.is_equal and verdict.is_faster else "XLA",
            )
        )
    return format_table(rows, num_left_aligned=1)
