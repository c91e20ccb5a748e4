"""The command `tpu-embedding doctor`."""

import dataclasses
import json
import pathlib
import platform

from tpu_embedding.tools.cli.arguments import UsageError
from tpu_embedding.tools.doctor.examine import examine, parse_expectation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doctor:
    """Checks this machine: versions, variables, devices, memory and training.

    Trains as in production, and compares every row with NumPy: with XLA gathers and
    scatters, and with SparseCores or, on other platforms, the same operations in plain
    JAX. This takes a few minutes. On a slice with several hosts, start it on all of
    them at the same time. The exit status is 1 if a check failed.
    """

    expect: str | None = None
    """Expected devices, such as 8, v5e:8 or v5p:2x2x2."""

    seconds: float = 300.0
    """Time limit in seconds of each child process that uses the devices."""

    timings: bool = False
    """Also times the benchmark step of 26 tables with each backend."""

    output_dir: pathlib.Path | None = None
    """Directory for doctor-HOST.json, with all findings and figures, and for profiles
    of the timed steps."""

    def run(self) -> int:
        # A typo should not be found only after minutes of checks.
        try:
            if self.expect is not None:
                parse_expectation(self.expect)
        except ValueError as error:
            raise UsageError(str(error)) from error
        findings = []
        for finding in examine(
            self.expect, self.seconds, self.timings, self.output_dir
        ):
            findings.append(finding)
            print(f"{finding.status:8} {finding.check}: {finding.text}", flush=True)
            if finding.fix:
                print(f"{'':8} -> {finding.fix}", flush=True)
            if self.output_dir is not None:
                # A later check may hang, so the file is complete after each.
                self.output_dir.mkdir(parents=True, exist_ok=True)
                file = self.output_dir / f"doctor-{platform.node()}.json"
                lines = [dataclasses.asdict(finding) for finding in findings]
                file.write_text(json.dumps(lines, indent=2) + "\n")
        return int(any(finding.status == "FAILED" for finding in findings))
