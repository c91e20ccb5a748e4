"""FTRL-Proximal: follow the regularized leader, per coordinate."""

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from tpu_embedding.optimizers.array_rules import for_each_array, initial_state
from tpu_embedding.optimizers.checks import (
    check_hyperparameters,
    non_negative,
    positive,
)
from tpu_embedding.optimizers.learning_rates import learning_rate_at
from tpu_embedding.optimizers.options import CommonOptions, public_optimizer
from tpu_embedding.optimizers.rules._proximal import ftrl_rows, split_zero_rate


class FTRLState(NamedTuple):
    """Slot variables `[rows, dim]` and an update count."""

    count: jax.Array
    accumulators: jax.Array
    linears: jax.Array


@public_optimizer(initial_accumulator_value=non_negative)
def ftrl(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    *,
    learning_rate_power: float = -0.5,
    l1_regularization_strength: float = 0.0,
    l2_regularization_strength: float = 0.0,
    beta: float = 0.0,
    initial_accumulator_value: float = 0.1,
    multiply_linear_by_learning_rate: bool = False,
    allow_zero_accumulator: bool = False,
    l2_shrinkage_regularization_strength: float = 0.0,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes FTRL-Proximal, which recomputes rows from their slot variables.

    Let `lr = learning_rate` and `p = -learning_rate_power`, and let `l1`, `l2` and `s`
    be the three strengths below. For a row `w` with summed gradient `g`::

        a_new = a + g**2
        l += g + 2 * s * w - (a_new**p - a**p) * w / lr
        w = (clip(l, -l1, l1) - l) / ((a_new**p + beta) / lr + 2 * l2)

    With `multiply_linear_by_learning_rate`::

        l += lr * (g + 2 * s * w) - (a_new**p - a**p) * w
        w = (clip(l, -lr * l1, lr * l1) - l) / (a_new**p + beta + 2 * lr * l2)

    If the denominator is 0, the row becomes 0. The slot variables `a` and `l` are
    `[rows, dim]`. `a` starts at `initial_accumulator_value`, and `a_new` is its next
    value. `l` starts at 0, so the first update to a row discards its initial value.

    If the learning rate is 0, the row and its slot variables do not change. The
    exception is `multiply_linear_by_learning_rate=True`: then they may change, as in
    TensorFlow.

    Source: McMahan et al., "Ad Click Prediction: a View from the Trenches" (KDD 2013),
    as in `tf.tpu.experimental.embedding.FTRL` and the kernels `ResourceSparseApplyFtrl`
    and `ResourceSparseApplyFtrlV2MultiplyLinearByLr`. optax has no FTRL.

    Args:
      learning_rate: scalar or optax schedule.
      learning_rate_power: at most 0.
      l1_regularization_strength: `l1`, non-negative.
      l2_regularization_strength: `l2`, non-negative.
      beta: non-negative.
      initial_accumulator_value: positive.
      multiply_linear_by_learning_rate: True selects the second equations.
      allow_zero_accumulator: True allows `initial_accumulator_value=0`. TensorFlow
        documents the same option, but its class always rejects 0.
      l2_shrinkage_regularization_strength: `s`, non-negative. Keras and TensorFlow's
        CPU kernels have this term.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of range.

    Example:
      >>> optimizer = ftrl(0.1, l1_regularization_strength=10.0)
      >>> rows = jnp.ones((1, 2))
      >>> updates, _ = optimizer.update(rows, optimizer.init(rows), rows)
      >>> (rows + updates).tolist()
      [[0.0, 0.0]]
    """
    # The decorator accepts an initial value of 0, because only this flag tells if 0 is
    # allowed.
    if not allow_zero_accumulator:
        check_hyperparameters(
            "ftrl", initial_accumulator_value=positive(initial_accumulator_value)
        )
    p = -learning_rate_power
    l1, l2 = l1_regularization_strength, l2_regularization_strength
    init = initial_state(FTRLState, accumulators=initial_accumulator_value)

    def update(updates: Any, state: Any, params: Any):
        rate = learning_rate_at(learning_rate, state.count)
        # Shrinkage enters `l` but not `a`, as in TensorFlow's CPU kernels.
        shrunk = updates + 2 * l2_shrinkage_regularization_strength * params
        is_nonzero, divisor = split_zero_rate(rate)
        if not multiply_linear_by_learning_rate:
            # These linears have units of `1 / rate`, so a step with rate 0 changes
            # nothing.
            updates = jnp.where(is_nonzero, updates, 0)
            shrunk = jnp.where(is_nonzero, shrunk, 0)
        accumulators = state.accumulators + jnp.square(updates)
        power = _power(accumulators, p)
        change = power - _power(state.accumulators, p)
        if multiply_linear_by_learning_rate:
            linears = state.linears + rate * shrunk - change * params
            rows = ftrl_rows(linears, rate * l1, power + beta + 2 * rate * l2)
        else:
            linears = state.linears + shrunk - change * params / divisor
            rows = ftrl_rows(linears, l1, (power + beta) / divisor + 2 * l2)
            rows = jnp.where(is_nonzero, rows, params)
        return rows - params, FTRLState(state.count + 1, accumulators, linears)

    return for_each_array(init, update)


def _power(values: jax.Array, exponent: float) -> jax.Array:
    """Raises values to a power, which may be traced."""
    # The square root is exact, unlike `pow`.
    is_half = not isinstance(exponent, Tracer) and exponent == 0.5
    return jnp.sqrt(values) if is_half else jnp.power(values, exponent)
