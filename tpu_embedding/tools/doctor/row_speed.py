"""Times the program of a case, beside XLA's program of the same case.

One process runs both programs in turns. So a slow phase of the machine slows both, and
the ratio of two neighbouring timings stays.
"""

import math
import statistics
import time
from typing import Final

import jax

from tpu_embedding.tools.doctor.row_inputs import make_inputs
from tpu_embedding.tools.doctor.row_programs import RowProgram

_TURNS_ON_TPU: Final = 9
_TURNS_ELSEWHERE: Final = 3
_SECONDS_PER_TURN: Final = 0.02
"""Minimum time of the calls of a turn on a TPU, much longer than one dispatch."""

_MAX_CALLS_PER_TURN: Final = 100


class _TimedProgram:
    """A program and its arguments on the devices."""

    def __init__(self, program: RowProgram):
        self._step = program.step
        self._arguments = make_inputs(program, seed=0).arguments
        self.seconds(1)  # The first call allocates memory.

    def seconds(self, num_calls: int) -> float:
        """Returns the time of one call, the mean of some calls."""
        start = time.perf_counter()
        for _ in range(num_calls):
            activations, _, tables, slots = self._step(*self._arguments)
            if tables is not None:  # Those before were donated.
                self._arguments = (tables, slots, *self._arguments[2:])
        jax.block_until_ready((activations, self._arguments))
        return (time.perf_counter() - start) / num_calls


def time_programs(program: RowProgram | None, by_xla: RowProgram) -> dict[str, float]:
    """Returns the figures of a `CaseResult`.

    Args:
      program: the program with kernels; None: XLA alone is timed.
      by_xla: the program of the same case that XLA runs.
    """
    on_tpu = by_xla.plan.mesh.devices.flat[0].platform == "tpu"
    programs = [_TimedProgram(x) for x in (program, by_xla) if x is not None]
    num_calls = 1
    if on_tpu:
        slowest = max(timed.seconds(1) for timed in programs)
        num_calls = math.ceil(_SECONDS_PER_TURN / slowest)
        num_calls = min(num_calls, _MAX_CALLS_PER_TURN)
    turns = []
    for turn in range(_TURNS_ON_TPU if on_tpu else _TURNS_ELSEWHERE):
        order = programs if turn % 2 else programs[::-1]
        seconds = {timed: timed.seconds(num_calls) for timed in order}
        turns.append([seconds[timed] for timed in programs])
    by_xla_seconds = statistics.median(turn[-1] for turn in turns)
    figures = {"xla_seconds_per_call": by_xla_seconds}
    if program is not None:
        figures["seconds_per_call"] = statistics.median(turn[0] for turn in turns)
        figures["speed_ratio"] = statistics.median(xla / own for own, xla in turns)
    return figures
