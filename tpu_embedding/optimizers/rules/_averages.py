"""Moving averages of rows, which lag behind until their row moves.

A row that stays still for `k` steps changes its average `a` by a closed form,
`a = momentum**k * a + (1 - momentum**k) * row`. So averages are updated in the steps
that move their row, and caught up when they are read.
"""

from typing import Any

import jax
import jax.numpy as jnp


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
