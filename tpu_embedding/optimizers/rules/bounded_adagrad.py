"""Adagrad with bounds on accumulators and steps."""

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.array_rules import for_each_array
from tpu_embedding.optimizers.learning_rates import learning_rate_at
from tpu_embedding.optimizers.options import CommonOptions, takes_common_options


class BoundedAdagradState(NamedTuple):
    """State of `bounded_adagrad`: slot variable `[rows, dim]`, and count of updates."""

    count: jax.Array
    accumulators: jax.Array


@takes_common_options()
def bounded_adagrad(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    initial_accumulator_value: float = 0.1,
    update_accumulator_first: bool = False,
    max_var_update: float = 0.0,
    max_accumulator: float = 0.0,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes Adagrad with upper bounds on accumulators and steps.

    For a row `w` with the summed gradient `g`::

        a_new = min(a + g**2, max_accumulator)
        s = learning_rate * g / sqrt(a)
        s = learning_rate * g / sqrt(a_new)       instead, if update_accumulator_first
        w -= clip(s, -max_var_update, max_var_update)

    A bound of 0 means no bound. The slot variable `a`, `[rows, dim]`, starts at
    `initial_accumulator_value`, and `a_new` is its next value.

    Source: `BoundedAdagradParameters` of TensorFlow's `optimization_parameters.proto`.
    Its update is not public. This rule is a reading of that file's comments:
    `max_var_update` bounds the step `s`, and the accumulator takes the unclipped
    gradient.

    Without bounds, and with `update_accumulator_first`, it equals `adagrad` and
    `optax.adagrad` with an epsilon of 0.

    Args:
      learning_rate: scalar, or schedule of the step counted from 0.
      initial_accumulator_value: start of `a`, positive.
      update_accumulator_first: True divides by the root of the new accumulator.
      max_var_update: largest change of an element in one step, non-negative.
      max_accumulator: largest accumulator, non-negative. A larger initial value drops
        to it in the row's first update.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of its range.

    Example:
      >>> optimizer = bounded_adagrad(1.0, 1.0, max_var_update=0.5, max_accumulator=2.0)
      >>> rows = jnp.zeros((1, 2))
      >>> updates, state = optimizer.update(rows + 3.0, optimizer.init(rows))
      >>> updates.tolist(), state.accumulators.tolist()
      ([[-0.5, -0.5]], [[2.0, 2.0]])
    """

    def init(params):
        return BoundedAdagradState(
            count=jnp.zeros((), jnp.int32),
            accumulators=jnp.full_like(params, initial_accumulator_value),
        )

    def update(updates: Any, state: Any, params: Any):
        del params
        accumulators = jnp.minimum(
            state.accumulators + jnp.square(updates), _or_infinite(max_accumulator)
        )
        used = accumulators if update_accumulator_first else state.accumulators
        rate = learning_rate_at(learning_rate, state.count)
        bound = _or_infinite(max_var_update)
        steps = jnp.clip(rate * updates * jax.lax.rsqrt(used), -bound, bound)
        return -steps, BoundedAdagradState(state.count + 1, accumulators)

    return for_each_array(init, update)


def _or_infinite(bound: Any) -> jax.Array:
    """Returns the bound, with 0 replaced by infinity."""
    bound = jnp.asarray(bound, jnp.float32)
    return jnp.where(bound > 0, bound, jnp.inf)
