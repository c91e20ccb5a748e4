"""Learning rates that depend on the step."""

import jax.numpy as jnp
import optax


def warm_up(learning_rate: float, num_steps: int) -> optax.Schedule:
    """Returns a schedule that rises linearly from 0, and then stays.

    `optax.linear_schedule` computes it as a difference, which is 0.14 % off at the
    first of 24,000 steps.

    Args:
      learning_rate: learning rate after the rise.
      num_steps: steps of the rise; the first step has a learning rate of 0.

    Raises:
      ValueError: if `num_steps` is less than 1.

    Example:
      >>> [float(warm_up(2.0, 4)(step)) for step in (0, 1, 4, 9)]
      [0.0, 0.5, 2.0, 2.0]
    """
    if num_steps < 1:
        raise ValueError(
            f"warm_up: num_steps must be at least 1, got {num_steps!r}. Without a "
            "warm-up, use the learning rate itself."
        )
    return lambda step: learning_rate * jnp.minimum(1.0, step / num_steps)
