"""Times the program of a case, beside XLA's program of the same case.

One process runs both programs in turns. So a slow phase of the machine slows both, and
the ratio of two neighbouring timings stays.
"""

import dataclasses
import math
import statistics
import time
from typing import Final

import jax

from tpu_embedding.tools.compile_report.cost import program_cost, total
from tpu_embedding.tools.compile_report.floor import embedding_floor
from tpu_embedding.tools.compile_report.hlo import parse_module
from tpu_embedding.tools.doctor.protocol import (
    BYTES,
    MODEL_BYTES,
    SECONDS_PER_CALL,
    SPEED_RATIO,
    SPREAD,
    XLA_SECONDS_PER_CALL,
)
from tpu_embedding.tools.doctor.row_inputs import make_inputs
from tpu_embedding.tools.doctor.row_programs import RowProgram

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


def time_program(
    program: RowProgram, by_xla: RowProgram, seed: int, repetitions: Repetitions
) -> dict[str, float | None]:
    """Returns the figures of `protocol.py` for a case.

    Args:
      program: of the case.
      by_xla: of the same case, where XLA runs all directions.
      seed: of the random numbers.
      repetitions: number of timings.
    """
    programs = [_TimedProgram(x, seed) for x in dict.fromkeys((program, by_xla))]
    for timed in programs:
        timed.seconds(1)  # The first call allocates memory.
    slowest = max(timed.seconds(1) for timed in programs)
    num_calls = math.ceil(repetitions.seconds_per_turn / slowest)
    num_calls = max(1, min(num_calls, _MAX_CALLS_PER_TURN))
    turns = []
    for turn in range(repetitions.turns):
        order = programs if turn % 2 else programs[::-1]
        seconds = {timed: timed.seconds(num_calls) for timed in order}
        turns.append([seconds[timed] for timed in programs])
    of_program, of_xla = [t[0] for t in turns], [t[-1] for t in turns]
    ratios = [xla / own for own, xla in zip(of_program, of_xla, strict=True)]
    median = statistics.median(of_program)
    return {
        SECONDS_PER_CALL: median,
        SPREAD: (max(of_program) - min(of_program)) / median,
        XLA_SECONDS_PER_CALL: statistics.median(of_xla),
        SPEED_RATIO: statistics.median(ratios),
        BYTES: programs[0].floor_bytes(),
        MODEL_BYTES: programs[0].model_bytes(),
    }
