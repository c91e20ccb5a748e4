"""Times the program of a case, beside XLA's program of the same case.

One process runs both programs in turns. So a slow phase of the machine slows both, and
the ratio of two neighbouring timings stays.
"""

import math
import statistics
import time
from collections.abc import Callable
from typing import Final

import jax

from tpu_embedding.tools.doctor.row_inputs import make_inputs
from tpu_embedding.tools.doctor.row_programs import RowProgram

_TURNS_ON_TPU: Final = 9
_TURNS_ELSEWHERE: Final = 3
_SECONDS_PER_TURN: Final = 0.02
"""Minimum time of the calls of a turn, much longer than one dispatch."""

_MAX_CALLS_PER_TURN: Final = 100


def time_programs(program: RowProgram | None, by_xla: RowProgram) -> dict[str, float]:
    """Returns the figures of a `CaseResult`.

    Args:
      program: the program with kernels; None: XLA alone is timed.
      by_xla: the program of the same case that XLA runs.
    """
    timers = [_timer(x) for x in (program, by_xla) if x is not None]
    slowest = max(seconds_of(1) for seconds_of in timers)
    num_calls = min(math.ceil(_SECONDS_PER_TURN / slowest), _MAX_CALLS_PER_TURN)
    on_tpu = by_xla.plan.mesh.devices.flat[0].platform == "tpu"
    turns = []
    for turn in range(_TURNS_ON_TPU if on_tpu else _TURNS_ELSEWHERE):
        # Neither program is always the first, to which a machine may give more speed.
        order = -1 if turn % 2 else 1
        seconds = [seconds_of(num_calls) for seconds_of in timers[::order]]
        turns.append(seconds[::order])
    figures = {"xla_seconds_per_call": statistics.median(turn[-1] for turn in turns)}
    if program is not None:
        figures["seconds_per_call"] = statistics.median(turn[0] for turn in turns)
        figures["speed_ratio"] = statistics.median(xla / own for own, xla in turns)
    return figures


def _timer(program: RowProgram) -> Callable[[int], float]:
    """Returns a function that calls a program, and returns the time of one call."""
    arguments = make_inputs(program, seed=0).arguments

    def seconds_of(num_calls: int) -> float:
        nonlocal arguments
        start = time.perf_counter()
        for _ in range(num_calls):
            activations, _, tables, slots = program.step(*arguments)
            if tables is not None:  # Those before were donated.
                arguments = (tables, slots, *arguments[2:])
        jax.block_until_ready((activations, arguments))
        return (time.perf_counter() - start) / num_calls

    seconds_of(1)  # The first call allocates memory.
    return seconds_of
