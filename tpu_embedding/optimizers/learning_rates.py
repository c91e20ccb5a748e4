"""Learning rates inside a rule's formula."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def learning_rate_at(
    learning_rate: optax.ScalarOrSchedule, count: jax.Array
) -> jax.Array:
    """Returns the learning rate of a step, counted from 0, as a float32 scalar."""
    rate: Any = learning_rate(count) if callable(learning_rate) else learning_rate
    return jnp.asarray(rate, jnp.float32)
