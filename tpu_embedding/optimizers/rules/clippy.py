"""Clippy: Adagrad that shortens a table's step where values would change too fast.

Tang et al., "Improving Training Stability for Multitask Ranking Models in Recommender
Systems" (KDD 2023).
"""

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.array_rules import for_each_array
from tpu_embedding.optimizers.checks import non_negative
from tpu_embedding.optimizers.learning_rates import learning_rate_at
from tpu_embedding.optimizers.options import CommonOptions, takes_common_options
from tpu_embedding.optimizers.table_rows import table_rows


class ClippyAdagradState(NamedTuple):
    """State of `clippy_adagrad`: slot variable `[rows, dim]`, and count of updates."""

    count: jax.Array
    accumulators: jax.Array


@takes_common_options(initial_accumulator_value=non_negative)
def clippy_adagrad(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    initial_accumulator_value: float = 0.1,
    variable_relative_threshold: float = 0.1,
    accumulator_relative_threshold: float = 0.0,
    absolute_threshold: float = 1e-7,
    epsilon: float = 1e-7,
    *,
    use_standard_accumulator_update: bool = False,
    clip_accumulator_update: bool = False,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes Adagrad whose step is shortened where values would change too fast.

    For a row `w` with the summed gradient `g`::

        p = 1 / sqrt(a + epsilon)
        d = learning_rate * g * p
        bound = (abs(w) * variable_relative_threshold
                 + p * accumulator_relative_threshold + absolute_threshold)
        scale = min(1, min(bound / abs(d)))
        w -= scale * d
        a += g**2
        a += (scale * g)**2                        instead, if clip_accumulator_update

    `p` is the preconditioner, `d` the unscaled step, and `bound` the largest change
    allowed per element. `scale` shortens the step of the whole table. The inner minimum
    is over the elements of the whole table whose step `d` is not 0. It takes an
    all-reduce of one scalar per table. `p` uses `a` from before the step; with
    `use_standard_accumulator_update` it uses `a` from after it. The slot variable `a`,
    `[rows, dim]`, starts at `initial_accumulator_value`.

    Source: Tang et al. (2023), as `tfrs.experimental.optimizers.ClippyAdagrad` of
    TensorFlow Recommenders.

    The result equals the dense rule, because a row that the step does not look up has
    gradient zero. optax has no Clippy.

    Args:
      learning_rate: scalar, or schedule of the step counted from 0.
      initial_accumulator_value: start of `a`, non-negative.
      variable_relative_threshold: non-negative.
      accumulator_relative_threshold: non-negative.
      absolute_threshold: non-negative.
      epsilon: positive.
      use_standard_accumulator_update: True adds the squares before the step.
      clip_accumulator_update: True adds the squares of the scaled gradient. Excludes
        `use_standard_accumulator_update`.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of its range, or both flags are set.

    Example:
      >>> optimizer = clippy_adagrad(1.0)
      >>> rows = jnp.ones((3, 2))
      >>> updates, _ = optimizer.update(rows, optimizer.init(rows), rows)
      >>> [round(x, 4) for x in updates[0].tolist()]
      [-0.1, -0.1]
    """
    if use_standard_accumulator_update and clip_accumulator_update:
        raise ValueError(
            "clippy_adagrad: at most one of use_standard_accumulator_update and "
            "clip_accumulator_update may be True, got both. The former updates the "
            "accumulator before the scale is known; set one of them to False."
        )

    def init(params: Any) -> Any:
        return ClippyAdagradState(
            count=jnp.zeros((), jnp.int32),
            accumulators=jnp.full_like(params, initial_accumulator_value),
        )

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        rows = table_rows(updates)
        accumulators = state.accumulators
        if use_standard_accumulator_update:
            accumulators = accumulators + jnp.square(updates)
        preconditioner = jax.lax.rsqrt(accumulators + epsilon)
        step = learning_rate_at(learning_rate, state.count) * updates * preconditioner
        bound = (
            jnp.abs(params) * variable_relative_threshold
            + preconditioner * accumulator_relative_threshold
            + absolute_threshold
        )
        # An element whose step is 0 sets no bound.
        is_moved = step != 0
        ratio = jnp.where(is_moved, bound / jnp.where(is_moved, jnp.abs(step), 1), 1)
        min_ratio = rows.minimum(jnp.min(ratio, axis=1, initial=1))
        scale = rows.per_row(jnp.minimum(1, min_ratio))[:, None]
        if not use_standard_accumulator_update:
            added = scale * updates if clip_accumulator_update else updates
            accumulators = accumulators + jnp.square(added)
        return -scale * step, ClippyAdagradState(state.count + 1, accumulators)

    return for_each_array(init, update)
