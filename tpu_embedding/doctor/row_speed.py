"""Times the program of a case, beside XLA's program of the same case.

One process runs both programs in turns. So a slow phase of the machine slows both, and
the ratio of two neighbouring timings stays.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any, Final

import jax

from tpu_embedding.aot.cost import program_cost, total
from tpu_embedding.aot.floor import embedding_floor
from tpu_embedding.aot.hlo import parse_module
from tpu_embedding.doctor.protocol import (
    BYTES,
    MODEL_BYTES,
    SECONDS_PER_CALL,
    SPEED_RATIO,
    SPREAD,
    XLA_SECONDS_PER_CALL,
)
from tpu_embedding.doctor.row_batches import CaseSize
from tpu_embedding.doctor.row_cases import RowCase
from tpu_embedding.doctor.row_inputs import make_inputs
from tpu_embedding.doctor.row_programs import RowProgram, row_program
from tpu_embedding.rows.packed_rows import Backend

_MAX_CALLS_PER_TURN: Final = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repetitions:
    """The number of timings.

    Attributes:
      turns: of the two programs.
      seconds_per_turn: minimum time of the calls of a turn. It should be much longer
        than one dispatch.
    """

    turns: int
    seconds_per_turn: float


class _TimedProgram:
    """A compiled program and its arguments on the devices."""

    def __init__(self, program: RowProgram, seed: int):
        self._program = program
        self._arguments = make_inputs(program, seed).arguments
        self._compiled = program.step.lower(*self._arguments).compile()

    def seconds(self, num_calls: int) -> float:
        """Returns the time of one call, the mean of some calls."""
        start = time.perf_counter()
        for _ in range(num_calls):
            activations, _, tables, slots = self._compiled(*self._arguments)
            if tables is not None:  # Those before were donated.
                self._arguments = (tables, slots, *self._arguments[2:])
        jax.block_until_ready((activations, self._arguments))
        return (time.perf_counter() - start) / num_calls

    def floor_bytes(self) -> float:
        """Returns the bytes that any program must move for the case."""
        floor = embedding_floor(self._program.plan, self._arguments[2])
        is_lookup = self._program.case.rule is None
        return floor.forward_hbm_bytes if is_lookup else floor.hbm_bytes

    def model_bytes(self) -> float | None:
        """Returns the modelled traffic of a program for a TPU; None for others."""
        text = self._compiled.as_text()
        if jax.default_backend() != "tpu" or text is None:
            return None
        return total(program_cost(parse_module(text)).operations).hbm_bytes


def time_case(
    case: RowCase,
    size: CaseSize,
    backend: Backend,
    devices: Sequence[Any],
    seed: int,
    repetitions: Repetitions,
) -> dict[str, float | None]:
    """Returns the figures of `protocol.py` for a case.

    Args:
      case: the case.
      size: of its tables and batch.
      backend: to time beside XLA, or XLA, then alone.
      devices: to run on.
      seed: of the random numbers.
      repetitions: number of timings.
    """
    programs = {
        name: _TimedProgram(row_program(case, size, name, devices), seed)
        for name in dict.fromkeys((backend, "xla"))
    }
    for program in programs.values():
        program.seconds(1)  # The first call allocates memory.
    slowest = max(program.seconds(1) for program in programs.values())
    num_calls = math.ceil(repetitions.seconds_per_turn / slowest)
    num_calls = max(1, min(num_calls, _MAX_CALLS_PER_TURN))
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(repetitions.turns):
        order = list(programs) if turn % 2 else list(reversed(programs))
        for name in order:
            seconds[name].append(programs[name].seconds(num_calls))
    of_backend, of_xla = seconds[backend], seconds["xla"]
    ratios = [xla / own for own, xla in zip(of_backend, of_xla, strict=True)]
    median = statistics.median(of_backend)
    return {
        SECONDS_PER_CALL: median,
        SPREAD: (max(of_backend) - min(of_backend)) / median,
        XLA_SECONDS_PER_CALL: statistics.median(of_xla),
        SPEED_RATIO: statistics.median(ratios),
        BYTES: programs[backend].floor_bytes(),
        MODEL_BYTES: programs[backend].model_bytes(),
    }
