"""Keras' schedules, against its formulas in NumPy's float64."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_embedding.optimizers.keras.schedules import (
    at_updates,
    keras_learning_rate,
)


def serialized(class_name, **config):
    return {
        "module": "keras.optimizers.schedules",
        "class_name": class_name,
        "config": {"name": class_name, **config},
        "registered_name": None,
    }


EXPONENTIAL = {"initial_learning_rate": 0.1, "decay_steps": 3, "decay_rate": 0.7}
POLYNOMIAL = {
    "initial_learning_rate": 0.1,
    "decay_steps": 5,
    "end_learning_rate": 0.01,
    "power": 2.0,
    "cycle": False,
}
COSINE = {"initial_learning_rate": 0.1, "decay_steps": 6, "alpha": 0.2}
RESTARTS = {
    "initial_learning_rate": 0.1,
    "first_decay_steps": 4,
    "t_mul": 2.0,
    "m_mul": 0.8,
    "alpha": 0.05,
}


def cosine(step, start, steps, alpha):
    fraction = min(step, steps) / steps
    return start * ((1 - alpha) * 0.5 * (1 + math.cos(math.pi * fraction)) + alpha)


def warmed_cosine(step, first, target, warmup_steps, steps, alpha):
    if step < warmup_steps:
        return first + (target - first) * step / warmup_steps
    return cosine(step - warmup_steps, target, steps, alpha)


def restarting_cosine(step, t_mul, m_mul, alpha):
    length, scale = 4.0, 1.0
    while step >= length:
        step, length, scale = step - length, length * t_mul, scale * m_mul
    half_cosine = 0.5 * (1 + math.cos(math.pi * step / length))
    return 0.1 * ((1 - alpha) * scale * half_cosine + alpha)


def cycling_polynomial(step):
    period = 5 * (math.ceil(step / 5) or 1)
    return 0.09 * (1 - step / period) ** 2 + 0.01


CASES = {
    "exponential": (
        serialized("ExponentialDecay", **EXPONENTIAL, staircase=False),
        lambda step: 0.1 * 0.7 ** (step / 3),
    ),
    "exponential_staircase": (
        serialized("ExponentialDecay", **EXPONENTIAL, staircase=True),
        lambda step: 0.1 * 0.7 ** (step // 3),
    ),
    "inverse_time": (
        serialized("InverseTimeDecay", **EXPONENTIAL, staircase=False),
        lambda step: 0.1 / (1 + 0.7 * step / 3),
    ),
    "piecewise": (
        serialized(
            "PiecewiseConstantDecay", boundaries=[2, 5], values=[0.1, 0.05, 0.2]
        ),
        lambda step: 0.1 if step <= 2 else 0.05 if step <= 5 else 0.2,
    ),
    "polynomial_cycle": (
        serialized("PolynomialDecay", **{**POLYNOMIAL, "cycle": True}),
        cycling_polynomial,
    ),
    "cosine_of_old_keras": (
        serialized("CosineDecay", **COSINE),
        lambda step: cosine(step, 0.1, 6, 0.2),
    ),
    "cosine_warmup": (
        serialized("CosineDecay", **COSINE, warmup_target=0.5, warmup_steps=4),
        lambda step: warmed_cosine(step, 0.1, 0.5, 4, 6, 0.2),
    ),
    "restarts_doubling": (
        serialized("CosineDecayRestarts", **RESTARTS),
        lambda step: restarting_cosine(step, 2, 0.8, 0.05),
    ),
    "defaults": (
        serialized(
            "PolynomialDecay",
            initial_learning_rate=np.float32(0.5),
            decay_steps=np.int64(4),
        ),
        lambda step: (0.5 - 1e-4) * (1 - min(step, 4) / 4) + 1e-4,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_equals_the_formula(case):
    config, formula = case
    schedule: Any = keras_learning_rate(config)
    steps = np.arange(30)
    rates = jax.vmap(schedule)(jnp.asarray(steps, jnp.int32))
    assert rates.dtype == jnp.float32
    expected = [formula(float(step)) for step in steps]
    # Cosines near their zero lose digits to the rounding of pi.
    np.testing.assert_allclose(rates, expected, rtol=1e-5, atol=1e-7)


def test_numbers_and_functions_stay():
    def schedule(count):
        return 0.1 * count

    assert keras_learning_rate(schedule) is schedule
    rate = keras_learning_rate(np.float32(0.25))
    assert rate == 0.25 and isinstance(rate, float)
    with pytest.raises(TypeError, match="te.nn.set_each_step"):
        keras_learning_rate(lambda: 0.1)


def test_updates_see_the_last_of_their_steps():
    schedule = at_updates(lambda count: count, 3)
    assert callable(schedule)
    assert [schedule(update) for update in range(3)] == [2, 5, 8]
    assert at_updates(0.5, 3) == 0.5


BAD = {
    "a_function_of_keras": (
        {"class_name": "__lambda__", "config": {"value": "4wAA"}},
        "replace another schedule by a function of the step",
    ),
    "a_users_class": (serialized("MySchedule"), "MySchedule.*PolynomialDecay"),
    "missing": (serialized("ExponentialDecay", decay_rate=0.1), "missing.*decay_steps"),
    "unknown": (serialized("CosineDecay", **COSINE, restarts=3), "'restarts'"),
    "order": (
        serialized("PiecewiseConstantDecay", boundaries=[3, 3], values=[1, 2, 3]),
        "boundaries must increase",
    ),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD.keys())
def test_what_is_no_learning_rate_is_refused(case):
    value, message = case
    with pytest.raises(ValueError, match=message):
        keras_learning_rate(value)


def test_a_fractional_power_ends_at_the_end_rate_under_jit():
    for decay_steps in (10, 13, 41, 100):
        config = {**POLYNOMIAL, "decay_steps": decay_steps, "power": 0.5}
        schedule = keras_learning_rate(serialized("PolynomialDecay", **config))
        last = jax.jit(schedule)(jnp.int32(decay_steps))
        np.testing.assert_allclose(last, config["end_learning_rate"], rtol=1e-6)


def test_periods_begin_at_their_first_step_under_jit():
    """Periods at which the product with their inverse is above, or below, 1."""
    cosine = {"initial_learning_rate": 1.0, "t_mul": 1.0}
    for period in (7, 14, 41, 55, 61):
        cycle = {**POLYNOMIAL, "decay_steps": period, "cycle": True}
        stairs = {**EXPONENTIAL, "decay_steps": period, "staircase": True}
        restarts = {**cosine, "first_decay_steps": period}
        steps = jnp.arange(1, 4) * period
        for config, expected in [
            (serialized("PolynomialDecay", **cycle), 0.01),
            (serialized("ExponentialDecay", **stairs), 0.1 * 0.7 ** np.arange(1, 4)),
            (serialized("CosineDecayRestarts", **restarts), 1.0),
        ]:
            rates = jax.jit(jax.vmap(keras_learning_rate(config)))(steps)
            np.testing.assert_allclose(rates, expected, rtol=1e-5, err_msg=str(config))
