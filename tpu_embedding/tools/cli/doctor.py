"""The command `tpu-embedding doctor`."""

import collections
import dataclasses
import functools
import time

from tpu_embedding.tools.doctor.devices import parse_expectation
from tpu_embedding.tools.doctor.examine import examine


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doctor:
    """Checks this machine: versions, environment, devices, memory and kernels.

    Compares lookups and updates of XLA and of the kernels with a dense reference, on
    the devices, and times both. The verdicts decide which kernels `train` uses. On a
    slice of several hosts, run it on all of them at the same time. Exit status: 1 if a
    check failed.
    """

    quick: bool = False
    """Checks one kind of row; it can refuse kernels, but allows none."""

    expect: str | None = None
    """Devices that should be there: a number, or a generation and its chips such as
    v5p:2x2x1. TPU_ACCELERATOR_TYPE by default, if it is set."""

    devices: int | None = None
    """Checks so many emulated CPU devices in place of the machine's."""

    def run(self) -> int:
        """Prints the findings; returns the exit status."""
        start = time.perf_counter()
        findings = examine(
            functools.partial(print, flush=True),
            tier="quick" if self.quick else "full",
            expected=None if self.expect is None else parse_expectation(self.expect),
            num_devices=self.devices,
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
        return 1 if counts["failed"] else 0
