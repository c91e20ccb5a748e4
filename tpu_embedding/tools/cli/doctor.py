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

    Trains as in production, and compares every row with NumPy. Trains first with XLA
    gathers and scatters, and then with SparseCores. On platforms without SparseCores,
    plain JAX replaces their operations. The checks take a few minutes. On a slice with
    several hosts, start the command on all hosts at the same time. The exit status is 1
    if a check failed.
    """

    expect: str | None = None
    """Expected devices, such as 8, v5e:8 or v5p:2x2x2."""

    seconds: float = 300.0
    """Time limit, in seconds, for each child process that uses the devices."""

    timings: bool = False
    """Also times a benchmark step with 26 tables, once per backend."""

    output_dir: pathlib.Path | None = None
    """Directory for doctor-HOST.json, which has all findings and figures.
    Profiles of the timed steps are also saved there."""

    def run(self) -> int:
        # Finds a typo now, instead of after minutes of checks.
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
                # The file is written after each check, because a later check may hang.
                self.output_dir.mkdir(parents=True, exist_ok=True)
                file = self.output_dir / f"doctor-{platform.node()}.json"
                lines = [dataclasses.asdict(finding) for finding in findings]
                file.write_text(json.dumps(lines, indent=2) + "\n")
        return int(any(finding.status == "FAILED" for finding in findings))
