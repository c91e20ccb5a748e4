"""The command `tpu-embedding doctor`."""

import dataclasses

from tpu_embedding.tools.cli.arguments import UsageError
from tpu_embedding.tools.doctor.examine import examine, parse_expectation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doctor:
    """Checks this machine: versions, variables, devices, memory and training.

    Trains as in production, and compares every row with NumPy: with XLA's gathers and
    scatters, and with SparseCores or, on other platforms, the same operations in plain
    JAX. This takes a few minutes. Start it on all hosts of a slice at the same time.
    The exit status is 1 if a check failed.
    """

    expect: str | None = None
    """Expected devices, such as 8, v5e:8 or v5p:2x2x2."""

    seconds: float = 300.0
    """Time limit in seconds of each child process that uses the devices."""

    def run(self) -> int:
        """Prints the findings and returns the exit status."""
        try:
            if self.expect is not None:
                parse_expectation(self.expect)
        except ValueError as error:
            raise UsageError(str(error)) from error
        is_sound = True
        for finding in examine(self.expect, self.seconds):
            print(f"{finding.status:8} {finding.check}: {finding.text}", flush=True)
            if finding.fix:
                print(f"{'':8} -> {finding.fix}", flush=True)
            is_sound &= finding.status != "FAILED"
        return 0 if is_sound else 1
