"""Adagrad with bounds on accumulators and steps."""

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.options import (
    CommonOptions,
    takes_common_options,
    with_options,
)
from tpu_embedding.optimizers.rules._arrays import for_each_array
from tpu_embedding.optimizers.rules._checks import (
    check_hyperparameters,
    non_negative,
    positive,
)
from tpu_embedding.optimizers.rules._rates import learning_rate_at


class BoundedAdagradState(NamedTuple):
    """Slot variable `[rows, dim]`, and the number of updates so far."""

    count: jax.Array
    accumulators: jax.Array


@takes_common_options
def bounded_adagrad(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    initial_accumulator_value: float = 0.1,
    update_accumulator_first: bool = False,
    max_var_update: float = 0.0,
    max_accumulator: float = 0.0,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Adagrad whose accumulators and steps have upper bounds.

        a' = min(a + g**2, max_accumulator)
        s = learning_rate * g / sqrt(a)      or of a' if update_accumulator_first
        w -= clip(s, -max_var_update, max_var_update)

    and `a'` is kept. A bound of 0 is none; without bounds and with
    `update_accumulator_first` it is `adagrad`. TensorFlow: `BoundedAdagradParameters`
    of the TPU embeddings' protocol buffer. No source of the update is public: this is
    a reading of that text, in which `max_var_update` bounds the step of a variable,
    and the accumulator takes the gradient as it is.

    Args:
      learning_rate: number or schedule of the step, counted from 0.
      initial_accumulator_value: start of `a`, positive.
      update_accumulator_first: see above.
      max_var_update: largest change of an element in one step, not negative.
      max_accumulator: largest accumulator, not negative. One that starts above it
        drops to it in its first update.
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
    check_hyperparameters(
        "bounded_adagrad",
        initial_accumulator_value=positive(initial_accumulator_value),
        max_var_update=non_negative(max_var_update),
        max_accumulator=non_negative(max_accumulator),
    )

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

    rule = for_each_array(init, update)
    return with_options(rule, learning_rate=learning_rate, **options)


def _or_infinite(bound: Any) -> jax.Array:
    """Returns a bound in which 0 stands for none."""
    bound = jnp.asarray(bound, jnp.float32)
    return jnp.where(bound > 0, bound, jnp.inf)
