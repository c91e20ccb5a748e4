"""The command `tpu-embedding doctor`."""

import dataclasses

from tpu_embedding.tools.cli.arguments import UsageError
from tpu_embedding.tools.doctor.examine import examine, parse_expectation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doctor:
    """Checks this machine: versions, variables, devices, memory, rows on the live chip.

    Train steps as production runs them are compared with NumPy row by row: with XLA's
    gathers and scatters, and with SparseCores, or their twin in plain JAX. That takes
    some minutes. On a slice of several hosts, start it on all of them at the same time.
    Exit status: 1 if a check failed.
    """

    expect: str | None = None
    """Devices that should be there, such as 8, v5e:8 or v5p:2x2x2."""

    seconds: float = 300.0
    """Time limit of each child process, which holds the devices."""

    def run(self) -> int:
        """Prints the findings; returns the exit status."""
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
