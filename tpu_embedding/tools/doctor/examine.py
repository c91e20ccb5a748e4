"""Runs all checks of a machine."""

import glob
from collections.abc import Iterator, Mapping
from typing import Final

from tpu_embedding.tools.doctor.devices import (
    ask_child,
    check_devices,
    check_holders,
    sparse_core_problem,
)
from tpu_embedding.tools.doctor.environment import (
    Finding,
    check_variables,
    check_versions,
    user_environment,
)

Times = list[tuple[int, float]]
"""Pairs of a dim and the milliseconds of a step."""

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
    if not isinstance(found, dict):
        return
    finding, times = _check_rows("rows", ["rows", "xla"], environment, seconds)
    yield finding
    problem = sparse_core_problem(found)
    if problem is not None:
        yield Finding("SparseCores", "ok", f"not compared: {problem}")
    else:
        yield from _compare_backends(times, environment, seconds)


def _check_rows(
    check: str, question: list[str], environment: Mapping[str, str], seconds: float
) -> tuple[Finding, Times]:
    """Compares rows with NumPy; also returns the times of a step, if all are equal."""
    answer = ask_child(question, environment, seconds)
    if isinstance(answer, str) or answer["problem"] is not None:
        problem = answer if isinstance(answer, str) else answer["problem"]
        way_out = "Please report it, with this output."
        return Finding(check, "FAILED", problem, way_out), []
    text = ", ".join(f"dim {x}: {t:.2f} ms a step" for x, t in answer["times"])
    return Finding(check, "ok", f"equal to NumPy; {text}"), answer["times"]


def _compare_backends(
    times: Times, environment: Mapping[str, str], seconds: float
) -> Iterator[Finding]:
    """Compares XLA's embedding operations with NumPy, and with gathers and scatters."""
    question = ["rows", "sparse_core"]
    finding, own_times = _check_rows("SparseCores", question, environment, seconds)
    yield finding
    ratios = [t / own for (_, t), (_, own) in zip(times, own_times, strict=False)]
    if ratios:
        text = f"{min(ratios):.2f} times as fast as XLA's gathers and scatters"
        yield Finding("backend", "ok", f"sparse_core is {text}")
