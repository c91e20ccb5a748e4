"""Learning rates: their checks, and their values inside a rule's formula."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.checks import (
    check_hyperparameters,
    finite,
    real_scalar,
)


def learning_rate_at(
    learning_rate: optax.ScalarOrSchedule, count: jax.Array
) -> jax.Array:
    """Returns the learning rate of a step, counted from 0, as a float32 scalar."""
    rate: Any = learning_rate(count) if callable(learning_rate) else learning_rate
    return jnp.asarray(rate, jnp.float32)


def checked_learning_rate(
    owner: str, value: Any, name: str = "learning_rate"
) -> optax.ScalarOrSchedule:
    """Checks a scalar, or a schedule of the step.

    Args:
      owner: the optimizer that takes it, for errors.
      value: as the user gave it.
      name: of the argument.

    Returns:
      The scalar; or the schedule, which checks each rate that it returns.

    Raises:
      TypeError: if it is neither a number nor a function of one argument.
      ValueError: if it is no scalar, or not finite.
    """
    if not callable(value):
        check_hyperparameters(owner, **{name: finite(value)})
        return value
    _check_takes_a_step(owner, value, name)

    def schedule(count: Any) -> Any:
        rate = value(count)
        # Its value is not known within jit, so neither is it checked outside.
        check_hyperparameters(owner, **{f"{name}(step)": real_scalar(rate)})
        return rate

    return schedule


def _check_takes_a_step(owner: str, schedule: Callable[..., Any], name: str) -> None:
    """Raises TypeError if a schedule cannot be called with the step alone."""
    try:
        signature = inspect.signature(schedule)
    except (ValueError, TypeError):  # A builtin may have none.
        return
    try:
        signature.bind(0)
    except TypeError as error:
        raise TypeError(
            f"{owner}: {name} must be a number or a function of the step, counted from "
            f"0, got {schedule!r} with the arguments {signature}. A compiled step "
            "cannot call a function without arguments again, as TensorFlow does. "
            "Write the rate as a function of the step. Or keep it in the state: "
            f"optax.inject_hyperparams(te.optimizers.{owner})({name}=0.1), and set it "
            f"between steps by Optimizer.set_hyperparameters({name}=...)."
        ) from error
