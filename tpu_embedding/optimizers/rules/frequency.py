"""Optimizers that count lookups of each row.

`frequency_aware_adagrad` takes longer steps for rare rows. `frequency_estimator`
stores, as the row itself, the mean number of steps between two lookups.
"""

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.array_rules import for_each_array
from tpu_embedding.optimizers.learning_rates import learning_rate_at
from tpu_embedding.optimizers.options import (
    CommonOptions,
    takes_common_options,
    takes_own_options,
)


class FrequencyAwareAdagradState(NamedTuple):
    """State of `frequency_aware_adagrad`.

    Attributes:
      count: updates so far.
      accumulators: sums of squared gradients, `[rows, dim]`.
      counters: steps that looked the row up so far, `[rows]`, int32.
    """

    count: jax.Array
    accumulators: jax.Array
    counters: jax.Array


@takes_common_options()
def frequency_aware_adagrad(
    learning_rate: optax.ScalarOrSchedule = 0.01,
    initial_accumulator_value: float = 0.1,
    probability_exponent: float = 0.5,
    max_lr_multiplier: float = 1e6,
    l1: float = 0.0,
    l2: float = 0.0,
    *,
    accumulator_decay: float = 1.0,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes Adagrad with longer steps for rows that are looked up rarely ("F2A").

    For a row `w` with the summed gradient `g`, in step `t` counted from 1::

        c += 1
        a = max(accumulator_decay * a + g**2, initial_accumulator_value)
        k = min((t / c)**probability_exponent, max_lr_multiplier)
        w -= learning_rate * (k * g / sqrt(a) + l1 * sign(w) + l2 * w)

    `c / t` is the fraction of steps that looked the row up. A row that every step looks
    up has the multiplier `k = 1`. The slot variable `a`, `[rows, dim]`, starts at
    `initial_accumulator_value`. The slot variable `c`, `[rows]`, int32, starts at 0.

    Source: `sparse_dense_matmul_grad_with_f2a` of jax-tpu-embedding. The decay and the
    floor of `a` come from `FrequencyAwareAdagradParameters` of TensorFlow's
    `optimization_parameters.proto`; at a decay of 1 they have no effect. The comment of
    that message has two misprints: it divides by the accumulator instead of the
    counter, and multiplies by the gradient twice.

    Both sources keep one counter per element, all equal. This rule keeps one per row.
    Rows are regularised only in steps that look them up. optax has no such optimizer.

    Args:
      learning_rate: scalar, or schedule of the step counted from 0.
      initial_accumulator_value: start and lower bound of `a`, positive.
      probability_exponent: non-negative; 0 gives plain Adagrad.
      max_lr_multiplier: upper bound of `k`, positive.
      l1: strength of L1 regularisation, non-negative.
      l2: strength of L2 regularisation, non-negative.
      accumulator_decay: in [0, 1].
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of its range.

    Example:
      >>> state = frequency_aware_adagrad(0.1).init(jnp.ones((3, 2)))
      >>> state.accumulators.shape, state.counters.shape
      ((3, 2), (3,))
    """

    def init(params):
        return FrequencyAwareAdagradState(
            count=jnp.zeros((), jnp.int32),
            accumulators=jnp.full_like(params, initial_accumulator_value),
            counters=jnp.zeros(params.shape[:1], jnp.int32),
        )

    def update(updates: Any, state: Any, params: Any):
        count = state.count + 1
        counters = state.counters + 1
        accumulators = jnp.maximum(
            accumulator_decay * state.accumulators + jnp.square(updates),
            initial_accumulator_value,
        )
        rarity = count.astype(params.dtype) / counters.astype(params.dtype)
        multipliers = jnp.minimum(
            jnp.power(rarity, probability_exponent), max_lr_multiplier
        )
        steps = multipliers[:, None] * updates * jax.lax.rsqrt(accumulators)
        steps += l1 * jnp.sign(params) + l2 * params
        rate = learning_rate_at(learning_rate, state.count)
        return -rate * steps, FrequencyAwareAdagradState(count, accumulators, counters)

    return for_each_array(init, update)


class FrequencyEstimatorState(NamedTuple):
    """State of `frequency_estimator`.

    Attributes:
      count: updates so far.
      last_hit_step: step of the last lookup, from 1, `[rows]`, int32; 0 means never.
    """

    count: jax.Array
    last_hit_step: jax.Array


@takes_own_options()
def frequency_estimator(
    tau: float,
    max_delta: float,
    outlier_threshold: float,
    weight_exponent: float = 1.0,
) -> optax.GradientTransformation:
    """Makes the optimizer that stores the mean interval between lookups as the row.

    It is for tables of dim 1. For a row `w`, in step `t` counted from 1::

        d = t - last_hit_step
        c = min(d, max_delta)
        w = c                                          if d >= outlier_threshold * w
        w = (1 - tau) * w + tau * c                    otherwise
        last_hit_step = t

    `d` is the interval since the row's last lookup, in steps, and `c` the bounded
    interval. The slot variable `last_hit_step`, `[rows]`, int32, starts at 0.

    The gradient is ignored. The row is looked up like any other, and changes in the
    steps that look it up. The table must start at `max_delta`; set its initializer:
    `TableConfig(..., dim=1, initializer=jax.nn.initializers.constant(max_delta))`.

    Source: `FrequencyEstimatorParameters` of TensorFlow's
    `optimization_parameters.proto`. There the learning rate passes the step; here the
    rule counts its own updates. optax has no such transformation.

    Args:
      tau: weight of the newest interval, in (0, 1).
      max_delta: longest interval that is averaged, in steps, positive.
      outlier_threshold: an interval at least this many times the row replaces it;
        positive.
      weight_exponent: TensorFlow's fourth parameter, without effect on the update. Pass
        it to `frequency_weights`, which applies it.

    Raises:
      ValueError: if a value is out of its range, or the table's dim is not 1.

    Example:
      >>> optimizer = frequency_estimator(0.5, 100.0, outlier_threshold=200.0)
      >>> rows = jnp.full((3, 1), 100.0)
      >>> updates, state = optimizer.update(rows, optimizer.init(rows), rows)
      >>> (rows + updates)[0].tolist(), state.last_hit_step.tolist()
      ([50.5], [1, 1, 1])
    """

    def init(params):
        if params.shape[1:] != (1,):
            raise ValueError(
                "frequency_estimator stores one scalar per row, so TableConfig.dim "
                f"must be 1, got rows of shape {params.shape[1:]}. Give it a table of "
                "its own with the same vocabulary_size."
            )
        return FrequencyEstimatorState(
            count=jnp.zeros((), jnp.int32),
            last_hit_step=jnp.zeros(params.shape[:1], jnp.int32),
        )

    def update(updates: Any, state: Any, params: Any):
        del updates
        count = state.count + 1
        deltas = (count - state.last_hit_step).astype(params.dtype)[:, None]
        clipped = jnp.minimum(deltas, max_delta)
        means = jnp.where(
            deltas >= outlier_threshold * params,
            clipped,
            (1 - tau) * params + tau * clipped,
        )
        last_hit_step = jnp.broadcast_to(count, state.last_hit_step.shape)
        return means - params, FrequencyEstimatorState(count, last_hit_step)

    return for_each_array(init, update)


def frequency_weights(
    deltas: jax.Array, max_delta: float, weight_exponent: float = 1.0
) -> jax.Array:
    """Returns sample weights from looked-up rows of a `frequency_estimator` table.

    The weight of an interval `delta` is `(delta / max_delta)**weight_exponent`. It is 1
    for ids never seen, and smaller for frequent ids. TensorFlow documents the formula,
    but not its place in the model. Multiply the embeddings, or the losses, of the same
    ids by these weights.

    Args:
      deltas: activations of a table with a `frequency_estimator`, one id per sample, of
        any shape.
      max_delta: the value given to `frequency_estimator`.
      weight_exponent: the exponent.

    Returns:
      Weights in the shape of `deltas`. No gradient flows through them.

    Example:
      >>> frequency_weights(jnp.array([100.0, 25.0]), 100.0, 0.5).tolist()
      [1.0, 0.5]
    """
    return jnp.power(jax.lax.stop_gradient(deltas) / max_delta, weight_exponent)
