"""Runs the doctor's cases on the devices, and prints an event before and after each.

    python -m tpu_embedding.tools.doctor.child --backend sparse_core \
        --part correctness --tier full --seeds 0,1

The parent watches this process (`protocol.py`), because a kernel may hang or halt the
chip. The exit status is 0 if all cases have run, also if some failed.
"""

import argparse
import dataclasses
import functools
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, get_args

import jax

from tpu_embedding.rows.kernels.kernel_access import Backend
from tpu_embedding.tools.doctor.compile_ahead import (
    COMPILATION,
    compile_ahead,
    programs_at_once,
)
from tpu_embedding.tools.doctor.faults import parse_fault, planted
from tpu_embedding.tools.doctor.protocol import (
    AllDone,
    CaseEnded,
    CaseStarted,
    Part,
    Planned,
    Tier,
    emit,
)
from tpu_embedding.tools.doctor.row_batches import size_of
from tpu_embedding.tools.doctor.row_cases import (
    Coverage,
    RowCase,
    row_cases,
    timed_cases,
)
from tpu_embedding.tools.doctor.row_checks import find_problem
from tpu_embedding.tools.doctor.row_programs import RowProgram, row_program
from tpu_embedding.tools.doctor.row_speed import Repetitions, time_program

_EMULATED_DEVICES: Final = 2
"""Devices that the host's CPU stands for, so that rows are exchanged there too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """The work that suits a kind of device.

    Attributes:
      floats: elements of the rows that a feature looks up.
      many_rows: minimum rows of the larger table of a case with many rows.
      coverage: of the full tier.
      repetitions: of timings.
    """

    floats: int
    many_rows: int
    coverage: Coverage
    repetitions: Repetitions


_ON_TPU: Final = Effort(
    # Several chunks of 64 KiB for each of 64 subcores. The factor 9 gives some of them
    # more chunks than others.
    floats=9 * 2**18,
    # float32 cannot tell the row ids above this from their neighbours.
    many_rows=2**24 + 2**20,
    coverage="all",
    repetitions=Repetitions(turns=9, seconds_per_turn=0.02),
)
_ELSEWHERE: Final = Effort(
    floats=9 * 2**11,
    many_rows=2**17 + 2**13,
    coverage="each once",
    repetitions=Repetitions(turns=3, seconds_per_turn=0.0),
)


def effort_on(device: jax.Device) -> Effort:
    """Returns the work for a device; the interpreter is too slow for that of a TPU."""
    return _ON_TPU if device.platform == "tpu" else _ELSEWHERE


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChildOptions:
    """The command line of the child.

    Attributes:
      backend: of the kernels, or XLA.
      part: compares results, or measures times.
      tier: quick or full.
      seeds: of the random numbers, one run of each case for each.
    """

    backend: Backend
    part: Part
    tier: Tier
    seeds: tuple[int, ...]

    def cases(self, devices: Sequence[Any]) -> list[RowCase]:
        """Returns the cases for some devices, in the order in which they run."""
        coverage = effort_on(devices[0]).coverage
        if self.part == "speed":
            return timed_cases(self.backend, self.tier, coverage)
        return row_cases(self.backend, self.tier, coverage, len(devices))

    def programs(
        self, cases: Sequence[RowCase], devices: Sequence[Any]
    ) -> list[Callable[[], RowProgram]]:
        """Returns functions that make the programs of some cases."""
        backends: list[Backend] = [self.backend]
        if self.part == "speed" and self.backend != "xla":
            backends.append("xla")
        return [
            functools.partial(make_program, case, backend, devices)
            for case in cases
            for backend in backends
        ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parsed = _parser().parse_args(arguments)
    options = ChildOptions(
        backend=parsed.backend, part=parsed.part, tier=parsed.tier, seeds=parsed.seeds
    )
    _keep_noise_from_events()
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", _EMULATED_DEVICES)
    devices = jax.local_devices()
    cases = options.cases(devices)
    emit(Planned(capabilities={case.name: case.capability for case in cases}))
    if parsed.skip_until_after is not None:
        names = [COMPILATION, *(case.name for case in cases)]
        cases = cases[names.index(parsed.skip_until_after) :]
    with planted(parsed.fault):
        num_threads = programs_at_once()
        if num_threads and parsed.skip_until_after is None:
            for event in compile_ahead(options.programs(cases, devices), num_threads):
                emit(event)
        for case in cases:
            for event in run_case(case, options, devices):
                emit(event)
    emit(AllDone())
    return 0


def run_case(
    case: RowCase, options: ChildOptions, devices: Sequence[Any]
) -> Iterator[CaseStarted | CaseEnded]:
    """Runs a case, and yields its events.

    Args:
      case: the case.
      options: of the child.
      devices: of this process. A case without an exchange uses the first.
    """
    yield CaseStarted(case=case.name, capability=case.capability)
    start = time.perf_counter()
    problem, figures = None, {}
    try:
        problem, figures = _results(case, options, devices)
    except Exception as error:  # Whatever fails is a finding, not an end.
        traceback.print_exc()
        first_line = (str(error).splitlines() or [""])[0]
        problem = f"{type(error).__name__}: {first_line}"
    yield CaseEnded(
        case=case.name,
        capability=case.capability,
        ok=problem is None,
        problem=problem,
        seconds=time.perf_counter() - start,
        figures=figures,
    )


def _results(
    case: RowCase, options: ChildOptions, devices: Sequence[Any]
) -> tuple[str | None, dict[str, float | None]]:
    """Returns the problem of a case, and its figures."""
    program = make_program(case, options.backend, devices)
    if options.part == "correctness":
        return find_problem(program, options.seeds), {}
    by_xla = make_program(case, "xla", devices)
    repetitions = effort_on(devices[0]).repetitions
    return None, time_program(program, by_xla, options.seeds[0], repetitions)


def make_program(case: RowCase, backend: Backend, devices: Sequence[Any]) -> RowProgram:
    """Makes the program of a case, in the size that suits the devices.

    Args:
      case: the case.
      backend: runs the case's directions.
      devices: of this process. A case without an exchange uses the first.
    """
    if case.exchange is None:
        devices = devices[:1]
    effort = effort_on(devices[0])
    size = size_of(
        case,
        floats=effort.floats,
        many_rows=effort.many_rows,
        num_devices=len(devices),
    )
    return row_program(case, size, backend, devices)


def _keep_noise_from_events() -> None:
    """Lets only events reach the standard output; libraries print to stderr."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = events


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tpu_embedding.tools.doctor.child")
    parser.add_argument("--backend", choices=get_args(Backend), required=True)
    parser.add_argument("--part", choices=get_args(Part), required=True)
    parser.add_argument("--tier", choices=get_args(Tier), required=True)
    parser.add_argument("--seeds", type=_seeds, default=(0,))
    parser.add_argument("--skip-until-after", metavar="CASE")
    parser.add_argument("--fault", type=parse_fault, help=argparse.SUPPRESS)
    return parser


def _seeds(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    sys.exit(main())
