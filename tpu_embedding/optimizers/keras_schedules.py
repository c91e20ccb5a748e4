"""Keras' learning rate schedules, translated from their configurations.

The formulas are those in `optimizers/schedules/learning_rate_schedule.py` of Keras 3.15
and `tf_keras` 2.21, which agree. optax's schedules of the same names differ at
boundaries, past the end and in clipping. Keras itself is not imported.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tpu_embedding.optimizers.checks import (
    check_hyperparameters,
    flag,
    positive,
    step_size,
)
from tpu_embedding.optimizers.keras_instances import is_of_keras


def serialized_schedule(value: Any) -> Mapping[str, Any] | None:
    """Returns the serialized form of one of Keras' six schedules.

    Args:
      value: a schedule; or a mapping, as in the `get_config()` of an optimizer.

    Returns:
      A mapping with `class_name` and `config`. None for any other value, such as a
      schedule of a class that the user wrote, whatever its name is.
    """
    cls = type(value)
    if cls.__name__ in _FORMULAS and is_of_keras(cls.__module__):
        return {"class_name": cls.__name__, "config": value.get_config()}
    if not isinstance(value, Mapping) or str(value.get("class_name")) not in _FORMULAS:
        return None
    # Keras writes a registered name for the classes of users only.
    if value.get("registered_name") or not is_of_keras(value.get("module") or "keras"):
        return None
    return {"class_name": value["class_name"], "config": value.get("config")}


def keras_schedule(serialized: Mapping[str, Any]) -> optax.Schedule:
    """Translates a schedule from the form that `serialized_schedule` returns.

    Returns:
      A function from the step, counted from 0, to a float32 scalar.

    Raises:
      ValueError: if a field is missing, unknown or out of its range.

    Example:
      >>> config = {"initial_learning_rate": 0.5, "decay_steps": 2, "decay_rate": 1.0}
      >>> schedule = keras_schedule(
      ...     {"class_name": "InverseTimeDecay", "config": config}
      ... )
      >>> float(schedule(2))
      0.25
    """
    name, fields = serialized["class_name"], dict(serialized.get("config") or {})
    fields = {
        x: y.item() if isinstance(y, np.generic) else y for x, y in fields.items()
    }
    fields.pop("name", None)
    formula = _FORMULAS[name]

    def schedule(count: Any) -> jax.Array:
        # A float32 holds steps up to 2**24, which is where boundaries may differ.
        is_exact = name == "PiecewiseConstantDecay"
        step = jnp.asarray(count, None if is_exact else jnp.float32)
        return jnp.asarray(formula(step, **fields), jnp.float32)

    try:
        check_hyperparameters(
            **{x: _CHECKS[x](y) for x, y in fields.items() if x in _CHECKS}
        )
        jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {str(error).rstrip('.')}") from error
    return schedule


def _periods(step, decay_steps, is_staircase):
    # XLA multiplies by the inverse: the floor of a quotient may be one too low.
    return jnp.floor_divide(step, decay_steps) if is_staircase else step / decay_steps


def _exponential(step, initial_learning_rate, decay_steps, decay_rate, staircase=False):
    periods = _periods(step, decay_steps, staircase)
    return initial_learning_rate * jnp.power(decay_rate, periods)


def _inverse(step, initial_learning_rate, decay_steps, decay_rate, staircase=False):
    return initial_learning_rate / (
        1 + decay_rate * _periods(step, decay_steps, staircase)
    )


def _piecewise(step, boundaries, values):
    if len(boundaries) != len(values) - 1 or sorted(boundaries) != list(boundaries):
        raise ValueError(
            "boundaries must increase and be one fewer than values, got "
            f"{boundaries} and {values}"
        )
    # A boundary is the last step that uses its value. The steps are integers.
    num_passed = sum((step > math.floor(x)).astype(jnp.int32) for x in boundaries)
    return jnp.asarray(values, jnp.float32)[num_passed]


def _polynomial(
    step,
    initial_learning_rate,
    decay_steps,
    end_learning_rate=1e-4,
    power=1,
    cycle=False,
):
    period = decay_steps
    if cycle:
        period *= jnp.maximum(-jnp.floor_divide(-step, decay_steps), 1)
    # Exactly 0 at the end. XLA may round `step / period` above 1, and a root of
    # `1 - step / period` would be NaN.
    remaining = (period - jnp.minimum(step, period)) / period
    span = initial_learning_rate - end_learning_rate
    return span * jnp.power(remaining, power) + end_learning_rate


def _cosine(
    step,
    initial_learning_rate,
    decay_steps,
    alpha=0,
    warmup_target=None,
    warmup_steps=0,
):
    start, num_before = initial_learning_rate, 0
    if warmup_target is not None:
        start, num_before = warmup_target, warmup_steps
    passed = jnp.clip(step - num_before, 0, decay_steps) / decay_steps
    rate = start * ((1 - alpha) * _half_cosine(passed) + alpha)
    rise = (start - initial_learning_rate) * (step / (num_before or 1))
    return jnp.where(step < num_before, initial_learning_rate + rise, rate)


def _restarts(
    step, initial_learning_rate, first_decay_steps, t_mul=2, m_mul=1, alpha=0
):
    passed, length = step / first_decay_steps, 1
    if t_mul == 1:
        restarts = start = jnp.floor_divide(step, first_decay_steps)
    else:
        # Period i is t_mul**i times as long as the first: a geometric series. Rounding
        # of the logarithm must not delay a restart by a step.
        restarts = jnp.log(1 - passed * (1 - t_mul)) / math.log(t_mul)
        restarts = jnp.floor(restarts * (1 + 1e-6))
        length = jnp.power(t_mul, restarts)
        start = (1 - length) / (1 - t_mul)
    cosine = jnp.power(m_mul, restarts) * _half_cosine((passed - start) / length)
    return initial_learning_rate * ((1 - alpha) * cosine + alpha)


def _half_cosine(passed):
    """Returns a half cosine, which falls from 1 to 0 as `passed` rises from 0 to 1."""
    return 0.5 * (1 + jnp.cos(math.pi * passed))


_FORMULAS: Final[Mapping[str, Callable[..., Any]]] = {
    "ExponentialDecay": _exponential,
    "InverseTimeDecay": _inverse,
    "PiecewiseConstantDecay": _piecewise,
    "PolynomialDecay": _polynomial,
    "CosineDecay": _cosine,
    "CosineDecayRestarts": _restarts,
}
_CHECKS: Final = {
    "initial_learning_rate": step_size,
    "decay_steps": positive,
    "first_decay_steps": positive,
    "t_mul": positive,
    "staircase": flag,
    "cycle": flag,
}
