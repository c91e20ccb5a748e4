"""The doctor's child process: describes the devices, and runs cases on them.

The parent asks by lines of JSON (`child_process.py`). `{"devices": true}` asks for the
devices. `{"case": ..., "kernels": ...}` has the fields of a `RowCase` and the backend
of the kernels, or null for XLA alone. The answer has the fields of a `CaseResult`.
"""

import dataclasses
import json
import os
import sys
import traceback
from typing import Any

import jax

from tpu_embedding.tools.doctor.row_cases import CaseResult, RowCase
from tpu_embedding.tools.doctor.row_checks import find_problem
from tpu_embedding.tools.doctor.row_programs import RowProgram, row_program
from tpu_embedding.tools.doctor.row_speed import time_programs


def main() -> None:
    """Answers the questions of the standard input until it ends."""
    # Only answers reach the standard output; libraries print to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


def _answer(question: dict[str, Any]) -> Any:
    if "devices" in question:
        return describe_devices()
    case = RowCase(**question["case"])
    return dataclasses.asdict(run_case(case, question["kernels"], jax.local_devices()))


def describe_devices() -> dict[str, Any]:
    """Returns platform, kind of all devices, and memory of this host's devices."""
    try:
        devices = jax.devices()
    except RuntimeError as error:
        sys.exit(f"RuntimeError: {str(error).splitlines()[0]}")
    return {
        "platform": jax.default_backend(),
        "kinds": [device.device_kind for device in devices],
        "memory": [_memory(device) for device in jax.local_devices()],
    }


def _memory(device: jax.Device) -> dict[str, int] | None:
    stats: Any = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return {
        "bytes_limit": int(stats["bytes_limit"]),
        "bytes_in_use": int(stats.get("bytes_in_use", 0)),
    }


def run_case(case: RowCase, kernels: str | None, devices: list[Any]) -> CaseResult:
    """Runs a case by XLA and by kernels, compares the results, and times both.

    Args:
      case: the case.
      kernels: the backend of the kernels; None: XLA alone runs.
      devices: the devices of this process. A case without an exchange uses the first.
    """
    by_xla, xla_problem = _checked(case, "xla", devices)
    by_kernels, problem, times = None, None, {}
    if kernels is not None and case.directions:
        by_kernels, problem = _checked(case, kernels, devices)
    if case.is_timed and by_xla is not None and problem is None:
        times = time_programs(by_kernels, by_xla)
    return CaseResult(case=case.name, problem=problem, xla_problem=xla_problem, **times)


def _checked(
    case: RowCase, backend: Any, devices: list[Any]
) -> tuple[RowProgram | None, str | None]:
    """Returns the program of a case for a backend, and the problem that it shows."""
    try:
        program = row_program(case, backend, devices)
        return program, find_problem(program)
    except Exception as error:  # Whatever fails is a finding, not an end.
        traceback.print_exc()
        first_line = (str(error).splitlines() or [""])[0]
        return None, f"{type(error).__name__}: {first_line}"


if __name__ == "__main__":
    main()
