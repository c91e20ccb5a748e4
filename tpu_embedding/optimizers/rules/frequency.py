"""Rules that count how often a row is looked up.

One makes the steps of rare rows longer, the other keeps the mean number of steps
between two lookups of a row as the row itself.
"""

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
    fraction,
    non_negative,
    open_fraction,
    positive,
)
from tpu_embedding.optimizers.rules._rates import learning_rate_at


class FrequencyAwareAdagradState(NamedTuple):
    """Slots `accumulators` `[rows, dim]` and `counters` `[rows]`; updates so far."""

    count: jax.Array
    accumulators: jax.Array
    counters: jax.Array


@takes_common_options
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
    """Adagrad with longer steps for rows that are looked up rarely ("F2A").

    With t the step, from 1:

        c += 1
        a = max(accumulator_decay * a + g**2, initial_accumulator_value)
        k = min((t / c)**probability_exponent, max_lr_multiplier)
        w -= learning_rate * (k * g / sqrt(a) + l1 * sign(w) + l2 * w)

    So `c / t` is the share of the steps that looked the row up, and a row of every
    step has k = 1. TensorFlow: `FrequencyAwareAdagradParameters` of the TPU
    embeddings' protocol buffer, whose comment divides by the accumulator where the
    counter is meant, and multiplies by the gradient twice. This is the rule of
    jax-tpu-embedding, `sparse_dense_matmul_grad_with_f2a`, and of that comment decay
    and floor of the accumulator, which have no effect at a decay of 1. One counter per
    row is kept, where those keep one per element, all equal. Rows are regularised only
    in steps that look them up.

    Args:
      learning_rate: number or schedule of the step, counted from 0.
      initial_accumulator_value: start and floor of `a`, positive.
      probability_exponent: not negative; 0 is plain Adagrad.
      max_lr_multiplier: upper bound of `k`, positive.
      l1: not negative.
      l2: not negative.
      accumulator_decay: in [0, 1].
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of its range.

    Example:
      >>> state = frequency_aware_adagrad().init(jnp.ones((3, 2)))
      >>> state.accumulators.shape, state.counters.shape
      ((3, 2), (3,))
    """
    check_hyperparameters(
        "frequency_aware_adagrad",
        initial_accumulator_value=positive(initial_accumulator_value),
        probability_exponent=non_negative(probability_exponent),
        max_lr_multiplier=positive(max_lr_multiplier),
        l1=non_negative(l1),
        l2=non_negative(l2),
        accumulator_decay=fraction(accumulator_decay),
    )

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

    rule = for_each_array(init, update)
    return with_options(rule, learning_rate=learning_rate, **options)


class FrequencyEstimatorState(NamedTuple):
    """Slot `last_hit_step` `[rows]`, 0 for never, and the number of updates so far."""

    count: jax.Array
    last_hit_step: jax.Array


def frequency_estimator(
    tau: float,
    max_delta: float,
    outlier_threshold: float,
    weight_exponent: float = 1.0,
) -> optax.GradientTransformation:
    """Keeps, as the row, the mean number of steps between two lookups of it.

    For tables of dim 1. With t the step, from 1, and D the row:

        d = t - last_hit_step
        c = min(d, max_delta)
        D = c if d >= outlier_threshold * D else (1 - tau) * D + tau * c
        last_hit_step = t

    The gradient is ignored: D is looked up like any row, and changes in the steps that
    look it up. The table must start at `max_delta`, which is its initializer's task:
    `TableConfig(..., dim=1, initializer=jax.nn.initializers.constant(max_delta))`.
    TensorFlow: `FrequencyEstimatorParameters` of the TPU embeddings' protocol buffer,
    where the step comes in as the learning rate; here the rule counts its own updates.

    Args:
      tau: weight of the newest interval, in (0, 1).
      max_delta: longest interval that is averaged, in steps, positive.
      outlier_threshold: an interval this many times longer than D replaces it;
        positive.
      weight_exponent: the fourth of TensorFlow's parameters. The update does not
        depend on it: it is for `frequency_weights`, which is where it is applied.

    Raises:
      ValueError: if a value is out of its range, or the table's dim is not 1.

    Example:
      >>> optimizer = frequency_estimator(0.5, 100.0, outlier_threshold=200.0)
      >>> rows = jnp.full((3, 1), 100.0)
      >>> updates, state = optimizer.update(rows, optimizer.init(rows), rows)
      >>> (rows + updates)[0].tolist(), state.last_hit_step.tolist()
      ([50.5], [1, 1, 1])
    """
    del weight_exponent
    check_hyperparameters(
        "frequency_estimator",
        tau=open_fraction(tau),
        max_delta=positive(max_delta),
        outlier_threshold=positive(outlier_threshold),
    )

    def init(params):
        if params.shape[1:] != (1,):
            raise ValueError(
                "frequency_estimator keeps one number per row, so TableConfig.dim must "
                f"be 1, got rows of shape {params.shape[1:]}. Use a table of its own "
                "for it, with the same vocabulary_size."
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
    """Makes weights out of looked-up rows of `frequency_estimator`.

    `(D / max_delta)**weight_exponent`: 1 for ids never seen, smaller for frequent ones.
    TensorFlow names the formula, but not where it is applied. Here that is the model's
    part: look the ids up in the estimator's table, and multiply what they stand for by
    these weights.

    Args:
      deltas: activations of a table with a `frequency_estimator`, one id per sample,
        of any shape.
      max_delta: as for the estimator.
      weight_exponent: the power.

    Returns:
      Weights of the shape of `deltas`. No gradient flows through them.

    Example:
      >>> frequency_weights(jnp.array([100.0, 25.0]), 100.0, 0.5).tolist()
      [1.0, 0.5]
    """
    return jnp.power(jax.lax.stop_gradient(deltas) / max_delta, weight_exponent)
