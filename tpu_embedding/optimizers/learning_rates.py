"""Learning rates: their checks, and their values inside a rule's formula."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.checks import (
    Check,
    check_hyperparameters,
    real_scalar,
    step_size,
)


def learning_rate_at(
    learning_rate: optax.ScalarOrSchedule, count: jax.Array
) -> jax.Array:
    """Returns the learning rate of a step, counted from 0, as a float32 scalar."""
    rate: Any = learning_rate(count) if callable(learning_rate) else learning_rate
    return jnp.asarray(rate, jnp.float32)


def checked_schedule(
    owner: str,
    value: Any,
    name: str = "learning_rate",
    check: Callable[[Any], Check] = step_size,
) -> optax.ScalarOrSchedule:
    """Checks a learning rate, or another scalar that may be a schedule of the step.

    The values of a schedule are not known before the step runs, so a learning rate that
    falls below 0 ascends the gradient.

    Args:
      owner: name of the optimizer, for errors.
      value: the user's scalar or schedule.
      name: name of the argument, for errors.
      check: returns the check of a scalar. A learning rate must be at least 0.

    Returns:
      The scalar; or a schedule that checks each value before it returns it.

    Raises:
      TypeError: if the value is neither a number nor a function of one argument; or
        if its argument has a default.
      ValueError: if the value is no scalar, or out of range.
    """
    if not callable(value):
        check_hyperparameters(owner, **{name: check(value)})
        return value
    check_takes_a_step(owner, value, name)

    def schedule(count: Any) -> Any:
        rate = value(count)
        # Checks the type and shape only: under jit, a rate has no value yet.
        check_hyperparameters(owner, **{f"{name}(step)": real_scalar(rate)})
        return rate

    return schedule


def check_takes_a_step(owner: str, schedule: Callable[..., Any], name: str) -> None:
    """Raises TypeError if a schedule cannot be called with the step alone.

    A function whose first argument has a default is refused, too: TensorFlow calls
    `lambda rate=rate: rate` without arguments, and here the step would be its rate.
    """
    try:
        signature = inspect.signature(schedule)
    except (ValueError, TypeError):  # A builtin may have none.
        return
    problem = ""
    first = next(iter(signature.parameters.values()), None)
    if first is not None and first.default is not first.empty:
        problem = (
            f", whose argument {first.name!r} has a default, so it may be meant to be "
            "called without arguments. Take the default away if it is the step"
        )
    else:
        try:
            signature.bind(0)
            return
        except TypeError:
            problem = f" with the arguments {signature}"
    raise TypeError(
        f"{owner}: {name} must be a number or a function of the step, counted from 0, "
        f"got {schedule!r}{problem}. A compiled step cannot call a function without "
        "arguments again, as TensorFlow does. Keep such a rate in the state: "
        f"optax.inject_hyperparams(te.optimizers.{owner})({name}=0.1), and set it "
        f"before each step: te.nn.set_each_step(train_step, {name}=function)."
    )
