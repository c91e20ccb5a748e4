"""Runs all checks of a machine."""

import glob
from collections.abc import Iterator, Mapping
from typing import Final

from tpu_embedding.tools.doctor.devices import ask_child, check_devices, check_holders
from tpu_embedding.tools.doctor.environment import (
    Finding,
    check_variables,
    check_versions,
    user_environment,
)

_CHIP_FILES: Final = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")


def examine(expected: str | None, seconds: float) -> Iterator[Finding]:
    """Yields the finding of each check, in the order of a report.

    Args:
      expected: the devices that should be there, as in `parse_expectation`.
      seconds: time limit of each child process.
    """
    environment = user_environment()
    chips = [path for pattern in _CHIP_FILES for path in glob.glob(pattern)]
    yield from check_versions()
    yield from check_variables(environment, chips)
    yield from check_holders(chips)
    found = ask_child(["devices"], environment, seconds)
    yield from check_devices(found, expected, chips)
    if isinstance(found, dict):
        yield _check_rows(environment, seconds)


def _check_rows(environment: Mapping[str, str], seconds: float) -> Finding:
    answer = ask_child(["rows"], environment, seconds)
    problem = answer if isinstance(answer, str) else answer["problem"]
    if problem is None:
        assert isinstance(answer, dict)
        text = ", ".join(f"dim {x}: {t:.2f} ms a step" for x, t in answer["times"])
        return Finding("rows", "ok", f"equal to NumPy; {text}")
    return Finding("rows", "FAILED", problem, "Please report it, with this output.")
