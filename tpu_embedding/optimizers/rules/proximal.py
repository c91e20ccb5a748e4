"""Adagrad with proximal regularisation.

Duchi and Singer, "Efficient Learning using Forward-Backward Splitting" (NIPS 2009).
"""

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.array_rules import for_each_array
from tpu_embedding.optimizers.learning_rates import learning_rate_at
from tpu_embedding.optimizers.options import CommonOptions, takes_common_options
from tpu_embedding.optimizers.rules._regularization import proximal_step


class ProximalAdagradState(NamedTuple):
    """State of `proximal_adagrad`: slot variable `[rows, dim]`, count of updates."""

    count: jax.Array
    accumulators: jax.Array


@takes_common_options()
def proximal_adagrad(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    *,
    l1: float = 0.0,
    l2: float = 0.0,
    initial_accumulator_value: float = 0.1,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes Adagrad followed by a proximal step, which shrinks rows towards zero.

    For a row `w` with the summed gradient `g`::

        a += g**2
        eta = learning_rate / sqrt(a)
        z = w - eta * g
        w = sign(z) * max(abs(z) - eta * l1, 0) / (1 + eta * l2)

    `z` is the row after Adagrad's step, whose size is `eta`. The slot variable `a`,
    `[rows, dim]`, starts at `initial_accumulator_value`.

    Source: Duchi and Singer (2009), as `ProximalAdagradParameters` of TensorFlow's
    `optimization_parameters.proto`, and its kernel
    `ResourceSparseApplyProximalAdagrad`.

    Rows are regularised only in steps that look them up. optax has no such optimizer.

    Args:
      learning_rate: scalar, or schedule of the step counted from 0.
      l1: strength of L1 regularisation, non-negative.
      l2: strength of L2 regularisation, non-negative.
      initial_accumulator_value: start of `a`, positive.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of its range.

    Example:
      >>> proximal_adagrad(0.1).init(jnp.ones((3, 2))).accumulators.shape
      (3, 2)
    """

    def init(params):
        return ProximalAdagradState(
            count=jnp.zeros((), jnp.int32),
            accumulators=jnp.full_like(params, initial_accumulator_value),
        )

    def update(updates: Any, state: Any, params: Any):
        accumulators = state.accumulators + jnp.square(updates)
        rate = learning_rate_at(learning_rate, state.count)
        eta = rate * jax.lax.rsqrt(accumulators)
        rows = proximal_step(params - eta * updates, eta, l1, l2)
        return rows - params, ProximalAdagradState(state.count + 1, accumulators)

    return for_each_array(init, update)
