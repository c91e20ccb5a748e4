"""Adagrad, and its row-wise, bounded, proximal, Clippy and frequency-aware variants.

Only `clippy_adagrad` mixes rows: it takes a minimum over the whole table.
"""

import math
from typing import Any, Final, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from tpu_embedding.optimizers.array_rules import descent, for_each_array, initial_state
from tpu_embedding.optimizers.checks import (
    check_hyperparameters,
    may_be_positive,
    non_negative,
    positive,
)
from tpu_embedding.optimizers.learning_rates import learning_rate_at
from tpu_embedding.optimizers.options import (
    CommonOptions,
    public_optimizer,
)
from tpu_embedding.optimizers.rules._proximal import proximal_step
from tpu_embedding.optimizers.table_rows import table_rows

WeightDecayMode = Literal["l2", "decoupled"]

_LOG_OF_LARGEST: Final = math.log(np.finfo(np.float32).max)


class AdagradState(NamedTuple):
    """Summed squared gradients, `[rows, dim]`, or `[rows]` if row-wise."""

    accumulators: jax.Array


@public_optimizer(epsilon=non_negative)
def adagrad(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    initial_accumulator_value: float = 0.1,
    *,
    epsilon: float = 0.0,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes Adagrad, which divides steps by the root of the summed squared gradients.

    For a row `w` with summed gradient `g`::

        a += g**2
        w -= learning_rate * g / sqrt(a + epsilon)

    The slot variable `a`, `[rows, dim]`, starts at `initial_accumulator_value`.

    Source: Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning
    and Stochastic Optimization" (JMLR 2011), as in
    `tf.tpu.experimental.embedding.Adagrad`, which has no epsilon. Keras uses
    `epsilon=1e-7`.

    With equal hyper-parameters, the result equals applying `optax.adagrad` to the dense
    gradient, because untouched rows have gradient zero.

    Args:
      learning_rate: scalar or optax schedule.
      initial_accumulator_value: positive.
      epsilon: non-negative.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of range.

    Example:
      >>> optimizer = adagrad(0.1, initial_accumulator_value=1.0)
      >>> rows = jnp.ones((1, 2))
      >>> state = optimizer.init(rows)
      >>> updates, state = optimizer.update(jnp.sqrt(3.0) * rows, state)
      >>> [round(x, 4) for x in updates[0].tolist()]
      [-0.0866, -0.0866]
    """
    init = initial_state(AdagradState, accumulators=initial_accumulator_value)

    def update(updates, state, params=None):
        del params
        accumulators = state.accumulators + jnp.square(updates)
        # optax guards against a sum of 0. Here, accumulators start above 0.
        steps = updates * jax.lax.rsqrt(accumulators + epsilon)
        return steps, AdagradState(accumulators)

    return descent(init, update, learning_rate)


@public_optimizer(epsilon=non_negative, initial_accumulator_value=non_negative)
def rowwise_adagrad(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    initial_accumulator_value: float = 0.1,
    *,
    epsilon: float = 0.0,
    weight_decay: float = 0.0,
    weight_decay_mode: WeightDecayMode = "l2",
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes Adagrad with one accumulator per row instead of one per element.

    For a row `w` with summed gradient `g`::

        g += weight_decay * w                                  in mode "l2"
        a += mean(g**2)                                        mean over the row
        w -= learning_rate * g / (sqrt(a) + epsilon)
        w -= learning_rate * weight_decay * w_before           in mode "decoupled"

    `w_before` is the row before the step. The slot variable `a`, `[rows]`, starts at
    `initial_accumulator_value`.

    Source: `EXACT_ROWWISE_ADAGRAD` in FBGEMM and TorchRec, with `WeightDecayMode.L2` or
    `DECOUPLE` (`fbgemm_gpu/codegen/genscript/optimizers.py`). However, FBGEMM defaults
    to `initial_accumulator_value=0.0` and `epsilon=1e-8`.

    Note that rows decay only in steps that look them up. Without weight decay, the
    result equals applying the rule to all rows. optax lacks row-wise Adagrad.

    Args:
      learning_rate: scalar or optax schedule.
      initial_accumulator_value: positive, or 0 if epsilon is positive.
      epsilon: non-negative. Note that `adagrad` adds it inside the root.
      weight_decay: non-negative.
      weight_decay_mode: `"l2"` adds the decay to the gradient; `"decoupled"` subtracts
        it from the row.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of range.

    Example:
      >>> rowwise_adagrad(0.1).init(jnp.ones((3, 2)))[0].accumulators.shape
      (3,)
    """
    # An initial sum of 0 is safe only with an epsilon. The decorator can't check this,
    # because it checks each argument separately.
    if not may_be_positive(epsilon):
        check_hyperparameters(
            "rowwise_adagrad",
            initial_accumulator_value=positive(initial_accumulator_value),
        )
    # `decays` is a Python bool, so that XLA drops the read of the rows if it is False.
    decays = may_be_positive(weight_decay)
    init = initial_state(
        AdagradState, by_row=("accumulators",), accumulators=initial_accumulator_value
    )

    def update(updates: Any, state: Any, params: Any = None):
        if decays and weight_decay_mode == "l2":
            updates = updates + weight_decay * params
        accumulators = state.accumulators + jnp.mean(jnp.square(updates), axis=1)
        steps = updates / (jnp.sqrt(accumulators) + epsilon)[:, None]
        if decays and weight_decay_mode == "decoupled":
            steps = steps + weight_decay * params
        return steps, AdagradState(accumulators)

    return descent(init, update, learning_rate)


class AdagradMomentumState(NamedTuple):
    """Accumulators and momenta, `[rows, dim]`."""

    accumulators: jax.Array
    momenta: jax.Array


@public_optimizer()
def adagrad_momentum(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    momentum: float = 0.0,
    use_nesterov: bool = False,
    exponent: float = 2,
    beta2: float = 1,
    epsilon: float = 1e-10,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes Adagrad with a momentum over the scaled gradients.

    For a row `w` with summed gradient `g`::

        a += g**2                                         if beta2 == 1
        a = beta2 * a + (1 - beta2) * g**2                otherwise
        s = g * (a + epsilon)**(-1 / exponent)
        m = momentum * m + s
        w -= learning_rate * m
        w -= learning_rate * (momentum * m + s)           instead, if use_nesterov

    `s` is the scaled gradient. The slot variables `a` and `m`, `[rows, dim]`, start at
    0, so a row's first step is about `learning_rate * sign(g)`.

    Source: `tf.tpu.experimental.embedding.AdagradMomentum`, with the formula from its
    TPU operation.

    `m` decays only in steps that look up its row. optax has no equivalent.

    Args:
      learning_rate: scalar or optax schedule.
      momentum: decay of `m`, in [0, 1].
      use_nesterov: True selects Nesterov's step.
      exponent: degree of the root, positive; 2 means the square root.
      beta2: decay of `a`, in [0, 1]; 1 sums the squares.
      epsilon: positive; `epsilon**(-1 / exponent)` must be finite in float32.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of range.

    Example:
      >>> adagrad_momentum(0.1).init(jnp.ones((3, 2)))[0].momenta.shape
      (3, 2)
    """
    # Accumulators start at 0, where an infinite power times a gradient of 0 is NaN.
    is_traced = isinstance(epsilon, Tracer) or isinstance(exponent, Tracer)
    if not is_traced and -math.log(epsilon) / exponent > _LOG_OF_LARGEST:
        raise ValueError(
            "adagrad_momentum: epsilon**(-1 / exponent) must be finite in float32, got "
            f"epsilon {epsilon} and exponent {exponent}. Raise one of them."
        )

    def update(updates, state, params=None):
        del params
        # `optax.inject_hyperparams` traces `beta2`, so Python can't branch on it.
        gain = jnp.where(beta2 == 1, 1, 1 - beta2)
        squares = jnp.square(updates)
        accumulators = beta2 * state.accumulators + gain * squares
        scaled = updates * jnp.power(accumulators + epsilon, -1 / exponent)
        momenta = momentum * state.momenta + scaled
        steps = momentum * momenta + scaled if use_nesterov else momenta
        return steps, AdagradMomentumState(accumulators, momenta)

    return descent(initial_state(AdagradMomentumState), update, learning_rate)


class CountedAdagradState(NamedTuple):
    """Adagrad state for rules whose steps aren't proportional to the learning rate.

    Such rules can't use `descent`, so they evaluate the learning rate at step `count`
    themselves. The accumulators are `[rows, dim]`.
    """

    count: jax.Array
    accumulators: jax.Array


@public_optimizer()
def bounded_adagrad(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    initial_accumulator_value: float = 0.1,
    update_accumulator_first: bool = False,
    max_var_update: float = 0.0,
    max_accumulator: float = 0.0,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes Adagrad with upper bounds on accumulators and steps.

    For a row `w` with summed gradient `g`::

        a_new = min(a + g**2, max_accumulator)
        s = learning_rate * g / sqrt(a)
        s = learning_rate * g / sqrt(a_new)       instead, if update_accumulator_first
        w -= clip(s, -max_var_update, max_var_update)

    A bound of 0 means no bound. The slot variable `a`, `[rows, dim]`, starts at
    `initial_accumulator_value`, and `a_new` is its next value.

    Source: TensorFlow's `BoundedAdagradParameters` (`optimization_parameters.proto`).
    The update itself is not public. As comments in that file suggest, `max_var_update`
    bounds the step `s`, and the accumulator adds the unclipped gradient's square.

    Without bounds and with `update_accumulator_first`, it equals both `adagrad` and
    `optax.adagrad`, if their epsilon is 0.

    Args:
      learning_rate: scalar or optax schedule.
      initial_accumulator_value: positive.
      update_accumulator_first: True divides by `sqrt(a_new)`.
      max_var_update: largest change per element and step, non-negative.
      max_accumulator: largest accumulator, non-negative. The first update reduces a
        larger initial value to this bound.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of range.

    Example:
      >>> optimizer = bounded_adagrad(1.0, 1.0, max_var_update=0.5, max_accumulator=2.0)
      >>> rows = jnp.zeros((1, 2))
      >>> updates, state = optimizer.update(rows + 3.0, optimizer.init(rows))
      >>> updates.tolist(), state.accumulators.tolist()
      ([[-0.5, -0.5]], [[2.0, 2.0]])
    """
    init = initial_state(CountedAdagradState, accumulators=initial_accumulator_value)

    def update(updates: Any, state: Any, params: Any):
        del params
        accumulators = jnp.minimum(
            state.accumulators + jnp.square(updates), _or_infinite(max_accumulator)
        )
        used = accumulators if update_accumulator_first else state.accumulators
        rate = learning_rate_at(learning_rate, state.count)
        bound = _or_infinite(max_var_update)
        steps = jnp.clip(rate * updates * jax.lax.rsqrt(used), -bound, bound)
        return -steps, CountedAdagradState(state.count + 1, accumulators)

    return for_each_array(init, update)


def _or_infinite(bound: Any) -> jax.Array:
    """Maps TensorFlow's 0, which means unbounded, to infinity."""
    bound = jnp.asarray(bound, jnp.float32)
    return jnp.where(bound > 0, bound, jnp.inf)


@public_optimizer()
def proximal_adagrad(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    *,
    l1: float = 0.0,
    l2: float = 0.0,
    initial_accumulator_value: float = 0.1,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes Adagrad followed by a proximal step, which shrinks rows towards zero.

    For a row `w` with summed gradient `g`::

        a += g**2
        eta = learning_rate / sqrt(a)
        z = w - eta * g
        w = sign(z) * max(abs(z) - eta * l1, 0) / (1 + eta * l2)

    `z` is the row after an Adagrad step with size `eta`. The slot variable `a`,
    `[rows, dim]`, starts at `initial_accumulator_value`.

    Source: Duchi and Singer, "Efficient Learning using Forward-Backward Splitting"
    (NIPS 2009), as in TensorFlow's `ProximalAdagradParameters`
    (`optimization_parameters.proto`) and kernel `ResourceSparseApplyProximalAdagrad`.

    Note that rows are regularized only in steps that look them up. optax has no
    equivalent.

    Args:
      learning_rate: scalar or optax schedule.
      l1: L1 regularization strength, non-negative.
      l2: L2 regularization strength, non-negative.
      initial_accumulator_value: positive.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of range.

    Example:
      >>> proximal_adagrad(0.1).init(jnp.ones((3, 2))).accumulators.shape
      (3, 2)
    """
    init = initial_state(CountedAdagradState, accumulators=initial_accumulator_value)

    def update(updates: Any, state: Any, params: Any):
        accumulators = state.accumulators + jnp.square(updates)
        rate = learning_rate_at(learning_rate, state.count)
        eta = rate * jax.lax.rsqrt(accumulators)
        rows = proximal_step(params - eta * updates, eta, l1, l2)
        return rows - params, CountedAdagradState(state.count + 1, accumulators)

    return for_each_array(init, update)


@public_optimizer(initial_accumulator_value=non_negative)
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
    """Makes Adagrad that shortens a table's step if values would change too fast.

    For a row `w` with summed gradient `g`::

        p = 1 / sqrt(a + epsilon)
        d = learning_rate * g * p
        bound = (abs(w) * variable_relative_threshold
                 + p * accumulator_relative_threshold + absolute_threshold)
        scale = min(1, min(bound / abs(d)))
        w -= scale * d
        a += g**2
        a += (scale * g)**2                        instead, if clip_accumulator_update

    `p` is the preconditioner, `d` the unscaled step, and `bound` the largest change per
    element. `scale` shortens the whole table's step. The inner minimum in `scale` is
    over all elements of the table with nonzero `d`. It needs an all-reduce of one
    scalar per table. By default, `p` uses the value of `a` before this step. With
    `use_standard_accumulator_update`, it uses the value after this step. The slot
    variable `a`, `[rows, dim]`, starts at `initial_accumulator_value`.

    Source: Tang et al., "Improving Training Stability for Multitask Ranking Models in
    Recommender Systems" (KDD 2023), as in TensorFlow Recommenders,
    `tfrs.experimental.optimizers.ClippyAdagrad`.

    The result equals applying the rule to all rows, because untouched rows have
    gradient zero. optax has no Clippy.

    Args:
      learning_rate: scalar or optax schedule.
      initial_accumulator_value: non-negative.
      variable_relative_threshold: non-negative.
      accumulator_relative_threshold: non-negative.
      absolute_threshold: non-negative.
      epsilon: positive.
      use_standard_accumulator_update: True updates `a` before `p` is computed.
      clip_accumulator_update: True adds the squares of the scaled gradient. You can't
        combine it with `use_standard_accumulator_update`.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of range, or both flags are set.

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
            "clip_accumulator_update may be True, got both. Set one of them to False."
        )

    init = initial_state(CountedAdagradState, accumulators=initial_accumulator_value)

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
        is_moved = step != 0
        ratio = jnp.where(is_moved, bound / jnp.where(is_moved, jnp.abs(step), 1), 1)
        # Untouched rows have step 0, so the minimum over touched rows is also the
        # minimum over the whole table. If no rows were touched, the minimum is
        # infinite.
        min_ratio = rows.minimum(jnp.min(ratio, axis=1, initial=1))
        scale = rows.per_row(jnp.minimum(1, min_ratio))[:, None]
        if not use_standard_accumulator_update:
            added = scale * updates if clip_accumulator_update else updates
            accumulators = accumulators + jnp.square(added)
        return -scale * step, CountedAdagradState(state.count + 1, accumulators)

    return for_each_array(init, update)


class FrequencyAwareAdagradState(NamedTuple):
    count: jax.Array
    accumulators: jax.Array
    # int32 `[rows]`: the number of steps so far that looked up the row.
    counters: jax.Array


@public_optimizer()
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
    """Makes Adagrad with longer steps for rarely looked-up rows ("F2A").

    For a row `w` with summed gradient `g`, in step `t` counted from 1::

        c += 1
        a = max(accumulator_decay * a + g**2, initial_accumulator_value)
        k = min((t / c)**probability_exponent, max_lr_multiplier)
        w -= learning_rate * (k * g / sqrt(a) + l1 * sign(w) + l2 * w)

    `c / t` is the fraction of steps that looked up the row. If all steps did, `k = 1`.
    The slot variable `a`, `[rows, dim]`, starts at `initial_accumulator_value`. The
    slot variable `c`, `[rows]`, int32, starts at 0.

    Source: jax-tpu-embedding, `sparse_dense_matmul_grad_with_f2a`. The decay and the
    lower bound for `a` come from TensorFlow's `FrequencyAwareAdagradParameters`
    (`optimization_parameters.proto`). If the decay is 1, neither has an effect. Note
    that the formula in that file's comment is wrong: it divides by the accumulator
    instead of the counter, and multiplies by the gradient twice.

    Both sources keep one counter per element. As all counters in a row are equal, this
    rule keeps one per row. Note that rows are regularized only in steps that look them
    up. optax has no equivalent.

    Args:
      learning_rate: scalar or optax schedule.
      initial_accumulator_value: start and lower bound for `a`, positive.
      probability_exponent: non-negative; 0 means plain Adagrad.
      max_lr_multiplier: upper bound for `k`, positive.
      l1: L1 regularization strength, non-negative.
      l2: L2 regularization strength, non-negative.
      accumulator_decay: in [0, 1].
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of range.

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
        # The default driver passes only looked-up rows, so all counters advance.
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
        # Schedules count steps from 0, but the formula counts from 1.
        rate = learning_rate_at(learning_rate, state.count)
        return -rate * steps, FrequencyAwareAdagradState(count, accumulators, counters)

    return for_each_array(init, update)


class FrequencyEstimatorState(NamedTuple):
    count: jax.Array
    # int32 `[rows]`. Steps count from 1, and 0 means never.
    last_hit_step: jax.Array


@public_optimizer()
def frequency_estimator(
    tau: float,
    max_delta: float,
    outlier_threshold: float,
    weight_exponent: float = 1.0,
) -> optax.GradientTransformation:
    """Makes an optimizer that stores the mean interval between lookups as the row.

    For a row `w` in a table with dim 1, in step `t` counted from 1::

        d = t - last_hit_step
        c = min(d, max_delta)
        w = c                                          if d >= outlier_threshold * w
        w = (1 - tau) * w + tau * c                    otherwise
        last_hit_step = t

    `d` is the interval since the row's last lookup, in steps, and `c` is the bounded
    interval. The slot variable `last_hit_step`, `[rows]`, int32, starts at 0.

    The gradient is ignored. Note that a row changes only in steps that look it up. In
    the `TableConfig`, you must set `dim=1` and
    `initializer=jax.nn.initializers.constant(max_delta)`, so that rows start at
    `max_delta`.

    Source: TensorFlow's `FrequencyEstimatorParameters`
    (`optimization_parameters.proto`). In TensorFlow, you pass the step as the learning
    rate, but this rule counts its own updates. optax has no equivalent.

    Args:
      tau: weight for the newest interval, in (0, 1).
      max_delta: upper bound for `c`, in steps, positive.
      outlier_threshold: positive. An interval of at least this many times the row's
        value replaces the value.
      weight_exponent: no effect on the update; pass it to `frequency_weights`.

    Raises:
      ValueError: if a value is out of range, or the table's dim is not 1.

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
                f"must be 1, got rows of shape {params.shape[1:]}. Add a separate "
                "table with dim=1 and the same vocabulary_size."
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
    """Turns looked-up rows from a `frequency_estimator` table into sample weights.

    An interval `delta` has the weight `(delta / max_delta)**weight_exponent`. This is 1
    for ids that were never seen, and less for frequent ids. Multiply your embeddings or
    losses by the weights. TensorFlow documents only the formula.

    Args:
      deltas: activations from a `frequency_estimator` table, in any shape. Look up one
        id per sample.
      max_delta: the `max_delta` that you passed to `frequency_estimator`.
      weight_exponent: the exponent.

    Returns:
      Weights in the shape of `deltas`. No gradient flows through them.

    Example:
      >>> frequency_weights(jnp.array([100.0, 25.0]), 100.0, 0.5).tolist()
      [1.0, 0.5]
    """
    return jnp.power(jax.lax.stop_gradient(deltas) / max_delta, weight_exponent)
