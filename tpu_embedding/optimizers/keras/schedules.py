"""Translation of Keras learning rate schedules into functions of the step.

The formulas are those of `keras/src/optimizers/schedules/learning_rate_schedule.py`,
which Keras 2 shares. optax has schedules of the same names, but they differ at
boundaries, after the last step, and in clipping.
"""

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpu_embedding.optimizers.checks import check_hyperparameters, positive
from tpu_embedding.optimizers.learning_rates import check_takes_a_step


def keras_learning_rate(value: Any) -> optax.ScalarOrSchedule:
    """Translates the field `learning_rate` of a Keras configuration.

    Args:
      value: a number; or a mapping with `class_name` and `config`, as
        `keras.optimizers.schedules.serialize` returns it; or a function of the step,
        which is returned unchanged.

    Returns:
      A float, or a function from the step, counted from 0, to a float32 scalar.

    Raises:
      TypeError: if a function cannot be called with the step alone.
      ValueError: if the value is none of these, or a field of the schedule is wrong.

    Example:
      >>> config = {"initial_learning_rate": 0.5, "decay_steps": 2, "decay_rate": 1.0}
      >>> schedule = keras_learning_rate(
      ...     {"class_name": "InverseTimeDecay", "config": config}
      ... )
      >>> float(schedule(2))
      0.25
    """
    if callable(value):
        check_takes_a_step("from_keras_config", value, "learning_rate")
        return cast(optax.Schedule, value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    class_name = value.get("class_name") if isinstance(value, Mapping) else None
    make = _SCHEDULES.get(class_name) if isinstance(class_name, str) else None
    if make is None:
        raise ValueError(
            f"learning_rate={value!r}: must be a number, or a serialized schedule of "
            f"Keras' classes {sorted(_SCHEDULES)}; replace another schedule by a "
            "function of the step, or see te.nn.set_each_step for a function without "
            "arguments"
        )
    fields = {field: x for field, x in value["config"].items() if field != "name"}
    try:
        return make(**jax.tree.map(_to_python, fields))
    except (TypeError, ValueError) as error:
        raise ValueError(f"learning_rate of class {class_name}: {error}") from error


def at_updates(
    rate: optax.ScalarOrSchedule, gradient_steps: int
) -> optax.ScalarOrSchedule:
    """Converts a schedule of steps to a schedule of updates.

    Each update sums the gradients of `gradient_steps` steps, and happens in the last of
    them. Keras' schedules count steps. A rate that is not a schedule stays as it is.
    """
    if not callable(rate):
        return rate

    def schedule(count: Any) -> Any:
        return rate(count * gradient_steps + gradient_steps - 1)

    return schedule


def _to_python(value: Any) -> Any:
    """Converts a scalar of NumPy to one of Python, which has no dtype."""
    return value.item() if isinstance(value, np.generic) else value


def _exponential_decay(
    *,
    initial_learning_rate: float,
    decay_steps: float,
    decay_rate: float,
    staircase: bool = False,
) -> optax.Schedule:
    check_hyperparameters(decay_steps=positive(decay_steps))

    def schedule(count: Any) -> jax.Array:
        periods = _num_periods(count, decay_steps, staircase)
        return initial_learning_rate * jnp.power(decay_rate, periods)

    return schedule


def _inverse_time_decay(
    *,
    initial_learning_rate: float,
    decay_steps: float,
    decay_rate: float,
    staircase: bool = False,
) -> optax.Schedule:
    check_hyperparameters(decay_steps=positive(decay_steps))

    def schedule(count: Any) -> jax.Array:
        periods = _num_periods(count, decay_steps, staircase)
        return initial_learning_rate / (1 + decay_rate * periods)

    return schedule


def _piecewise_constant_decay(
    *, boundaries: list[float], values: list[float]
) -> optax.Schedule:
    if len(boundaries) != len(values) - 1:
        raise ValueError(
            "boundaries must be one fewer than values, got "
            f"{len(boundaries)} and {len(values)}"
        )
    # Keras casts boundaries to the step's dtype, an integer.
    limits = np.asarray(boundaries, np.int32)
    if (np.diff(limits) <= 0).any():
        raise ValueError(f"boundaries must increase, got {boundaries}")

    def schedule(count: Any) -> jax.Array:
        # A boundary is the last step that uses its value.
        num_passed = jnp.sum(jnp.asarray(count) > limits)
        return jnp.asarray(values, jnp.float32)[num_passed]

    return schedule


def _polynomial_decay(
    *,
    initial_learning_rate: float,
    decay_steps: float,
    end_learning_rate: float = 0.0001,
    power: float = 1.0,
    cycle: bool = False,
) -> optax.Schedule:
    check_hyperparameters(decay_steps=positive(decay_steps))

    def schedule(count: Any) -> jax.Array:
        step = jnp.asarray(count, jnp.float32)
        period = decay_steps
        if cycle:
            period *= jnp.maximum(-jnp.floor_divide(-step, decay_steps), 1)
        # Exactly 0 at the end. XLA may round the quotient in `1 - step / period` above
        # 1, and a root of the rest is NaN.
        remaining = (period - jnp.minimum(step, period)) / period
        span = initial_learning_rate - end_learning_rate
        return span * jnp.power(remaining, power) + end_learning_rate

    return schedule


def _cosine_decay(
    *,
    initial_learning_rate: float,
    decay_steps: float,
    alpha: float = 0.0,
    warmup_target: float | None = None,
    warmup_steps: float = 0.0,
) -> optax.Schedule:
    check_hyperparameters(decay_steps=positive(decay_steps))
    start = initial_learning_rate if warmup_target is None else warmup_target
    num_before = 0.0 if warmup_target is None else warmup_steps

    def schedule(count: Any) -> jax.Array:
        step = jnp.asarray(count, jnp.float32)
        passed = jnp.clip(step - num_before, 0, decay_steps) / decay_steps
        rate = start * ((1 - alpha) * _half_cosine(passed) + alpha)
        if not num_before:
            return rate
        rise = (start - initial_learning_rate) * (step / num_before)
        return jnp.where(step < num_before, initial_learning_rate + rise, rate)

    return schedule


def _cosine_decay_restarts(
    *,
    initial_learning_rate: float,
    first_decay_steps: float,
    t_mul: float = 2.0,
    m_mul: float = 1.0,
    alpha: float = 0.0,
) -> optax.Schedule:
    check_hyperparameters(
        first_decay_steps=positive(first_decay_steps), t_mul=positive(t_mul)
    )

    def schedule(count: Any) -> jax.Array:
        step = jnp.asarray(count, jnp.float32)
        passed = step / first_decay_steps
        if t_mul == 1:
            num_restarts, step = jnp.divmod(step, first_decay_steps)
            passed = step / first_decay_steps
        else:
            # Period i is t_mul**i times as long as the first: a geometric series.
            num_restarts = jnp.floor(
                jnp.log(1 - passed * (1 - t_mul)) / math.log(t_mul)
            )
            length = jnp.power(t_mul, num_restarts)
            passed = (passed - (1 - length) / (1 - t_mul)) / length
        scale = jnp.power(m_mul, num_restarts)
        cosine = scale * _half_cosine(passed)
        return initial_learning_rate * ((1 - alpha) * cosine + alpha)

    return schedule


def _num_periods(count: Any, decay_steps: float, staircase: bool) -> jax.Array:
    """Returns the decay periods so far, rounded down for a staircase."""
    step = jnp.asarray(count, jnp.float32)
    # XLA multiplies by the inverse: the floor of a quotient may be one too low.
    return jnp.floor_divide(step, decay_steps) if staircase else step / decay_steps


def _half_cosine(passed: jax.Array) -> jax.Array:
    """Returns a half cosine, which falls from 1 to 0 as `passed` rises from 0 to 1."""
    return 0.5 * (1 + jnp.cos(math.pi * passed))


_SCHEDULES: Final[Mapping[str, Callable[..., optax.Schedule]]] = {
    "ExponentialDecay": _exponential_decay,
    "InverseTimeDecay": _inverse_time_decay,
    "PiecewiseConstantDecay": _piecewise_constant_decay,
    "PolynomialDecay": _polynomial_decay,
    "CosineDecay": _cosine_decay,
    "CosineDecayRestarts": _cosine_decay_restarts,
}
