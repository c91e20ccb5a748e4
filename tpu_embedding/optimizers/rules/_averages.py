"""Moving averages of rows, which lag behind until their row moves.

A row that stays still for `k` steps changes its average `a` by a closed form,
`a = momentum**k * a + (1 - momentum**k) * row`. So averages are updated in the steps
that move their row, and caught up when they are read.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from tpu_embedding.optimizers.rules._adafactor_state import AdafactorState
from tpu_embedding.optimizers.table_rows import TableRows

EMAStart = Literal["first_update", "initial_values"]


@dataclasses.dataclass(frozen=True)
class Averages:
    """The moving averages of `adafactor`; see its arguments.

    Attributes:
      momentum: `ema_momentum`.
      overwrite_frequency: `ema_overwrite_frequency`.
      start: `ema_start`.
      gradient_steps: steps of one update. The averages advance in each of them.
    """

    momentum: Any
    overwrite_frequency: Any
    start: EMAStart
    gradient_steps: int

    def init(self, state: AdafactorState, array: Any) -> AdafactorState:
        """Returns the state with averages that start at the values of an array."""
        is_table = array.ndim == 2
        return state._replace(
            averages=jnp.array(array, jnp.float32),
            average_counts=jnp.zeros(array.shape[0], jnp.int32) if is_table else None,
            average_momentum=jnp.asarray(self.momentum, jnp.float32),
        )

    def update(
        self, old: Any, new: Any, state: AdafactorState, tables: TableRows | None
    ) -> tuple[Any, AdafactorState]:
        """Averages the values after an update.

        Args:
          old: values before the update.
          new: values after it.
          state: state before the update.
          tables: the tables of the rows; None for a dense array.

        Returns:
          The new values, which are the averages where these replace them, and the state
          with the new averages.
        """
        missed, counts = 0, state.average_counts
        if tables is not None:
            new = tables.stored(old, new - old)
            missed = (state.count - counts)[:, None]
            counts = jnp.broadcast_to(state.count + 1, counts.shape)
        missed = missed + self.gradient_steps - 1
        momentum = jnp.asarray(self.momentum, jnp.float32)
        averages = catch_up(state.averages, old, missed, momentum)
        weight = momentum
        if self.start == "first_update":
            weight = jnp.where(state.count == 0, 0.0, momentum)
        averages = weight * averages + (1 - weight) * new
        state = state._replace(
            averages=averages, average_counts=counts, average_momentum=momentum
        )
        if self.overwrite_frequency is None:
            return new, state
        overwrites = (state.count + 1) % self.overwrite_frequency == 0
        return jnp.where(overwrites, averages, new), state


def catch_up(
    averages: jax.Array, rows: jax.Array, missed_steps: Any, momentum: Any
) -> jax.Array:
    """Returns averages after steps in which their rows stayed as they are.

    Args:
      averages: float32, of any shape.
      rows: values that are averaged, of the same shape.
      missed_steps: number of steps, non-negative; broadcast against the rows.
      momentum: decay of the averages, in [0, 1].

    Example:
      >>> catch_up(jnp.zeros(1), jnp.ones(1), 2, 0.5).tolist()
      [0.75]
    """
    missed_steps = jnp.asarray(missed_steps, jnp.float32)
    weight = jnp.power(jnp.asarray(momentum, jnp.float32), missed_steps)
    return weight * averages + (1 - weight) * rows
