"""The state of Adafactor, of one form for tables and for dense arrays of any rank."""

from typing import Any, NamedTuple

import jax
import optax

from tpu_embedding.optimizers.rules._sums import NO_SUM, CompensatedSum


class CollectedGradients(NamedTuple):
    """State of `adafactor` on dense arrays, with `gradient_accumulation_steps`."""

    steps: optax.MultiStepsState


class AdafactorState(NamedTuple):
    """State of `adafactor`. A field that an array has no use for is None.

    Attributes:
      count: updates so far.
      row_accumulators: `r`, `[rows]`; of a dense array of rank 3 or more, its shape
        without the last axis.
      row_clocks: `[rows]`. Mode "lazy": updates of the row so far. Mode "exact": sum of
        the logarithms of the decays up to the row's latest update.
      column_accumulators: `c`, `[tables, dim]`; of a dense array of rank 3 or more, its
        shape without the axis before the last.
      velocities: second moments of a dense array of rank 0 or 1.
      squares: sum of the squares of all elements of each table, `[tables]`.
      clock: mode "exact": sum of the logarithms of the decays so far.
      averages: moving averages, with `use_ema`; of the shape of the array.
      average_counts: `[rows]`, the `count` at the latest update of the row's average.
      average_momentum: decay of the averages.
    """

    count: jax.Array
    row_accumulators: Any = None
    row_clocks: Any = None
    column_accumulators: Any = None
    velocities: Any = None
    # All rows of a dense array are at hand in each step, so nothing is tracked. The
    # sums stand there, empty, so that all states have one structure.
    squares: CompensatedSum = NO_SUM
    clock: CompensatedSum | None = None
    averages: Any = None
    average_counts: Any = None
    average_momentum: Any = None
