"""Adagrad, with an accumulator per element or per row; bounded and proximal Adagrad.

Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and
Stochastic Optimization", JMLR 12 (2011). Duchi and Singer, "Efficient Learning using
Forward-Backward Splitting" (NIPS 2009).
"""

import math
from typing import Any, Final, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from tpu_embedding.optimizers.array_rules import for_each_array
from tpu_embedding.optimizers.checks import (
    check_hyperparameters,
    may_be_positive,
    non_negative,
    positive,
)
from tpu_embedding.optimizers.learning_rates import learning_rate_at
from tpu_embedding.optimizers.options import CommonOptions, takes_common_options
from tpu_embedding.optimizers.rules._clipping import proximal_step

WeightDecayMode = Literal["l2", "decoupled"]

_LOG_OF_LARGEST: Final = math.log(np.finfo(np.float32).max)


class AdagradState(NamedTuple):
    """State of `adagrad` and `rowwise_adagrad`.

    Attributes:
      accumulators: sums of squared gradients, `[rows, dim]`; row-wise `[rows]`.
    """

    accumulators: jax.Array


@takes_common_options(epsilon=non_negative)
def adagrad(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    initial_accumulator_value: float = 0.1,
    *,
    epsilon: float = 0.0,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes Adagrad, which divides steps by the root of the summed squared gradients.

    For a row `w` with the summed gradient `g`::

        a += g**2
        w -= learning_rate * g / sqrt(a + epsilon)

    The slot variable `a`, `[rows, dim]`, starts at `initial_accumulator_value`.

    Source: Duchi et al. (2011), as `tf.tpu.experimental.embedding.Adagrad`, which has
    no epsilon. Keras' Adagrad is `epsilon=1e-7`.

    With equal hyper-parameters the result equals `optax.adagrad` on the dense gradient,
    because a row that the step does not look up has gradient zero.

    Args:
      learning_rate: scalar, or schedule of the step counted from 0.
      initial_accumulator_value: start of `a`, positive.
      epsilon: non-negative.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of its range.

    Example:
      >>> optimizer = adagrad(0.1, initial_accumulator_value=1.0)
      >>> rows = jnp.ones((1, 2))
      >>> state = optimizer.init(rows)
      >>> updates, state = optimizer.update(jnp.sqrt(3.0) * rows, state)
      >>> [round(x, 4) for x in updates[0].tolist()]
      [-0.0866, -0.0866]
    """

    def init(params):
        return AdagradState(jnp.full_like(params, initial_accumulator_value))

    def update(updates, state, params=None):
        del params
        accumulators = state.accumulators + jnp.square(updates)
        steps = updates * jax.lax.rsqrt(accumulators + epsilon)
        return steps, AdagradState(accumulators)

    return optax.chain(
        for_each_array(init, update), optax.scale_by_learning_rate(learning_rate)
    )


@takes_common_options(epsilon=non_negative, initial_accumulator_value=non_negative)
def rowwise_adagrad(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    initial_accumulator_value: float = 0.1,
    *,
    epsilon: float = 0.0,
    weight_decay: float = 0.0,
    weight_decay_mode: WeightDecayMode = "l2",
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes Adagrad with one accumulator per row, 1 / dim of the memory.

    For a row `w` with the summed gradient `g`::

        g += weight_decay * w                                  in mode "l2"
        a += mean(g**2)                                        mean over the row
        w -= learning_rate * g / (sqrt(a) + epsilon)
        w -= learning_rate * weight_decay * w_before           in mode "decoupled"

    `w_before` is the row before the step. The slot variable `a`, `[rows]`, starts at
    `initial_accumulator_value`.

    Source: `EXACT_ROWWISE_ADAGRAD` of FBGEMM and TorchRec, with `WeightDecayMode.L2` or
    `DECOUPLE`, in `fbgemm_gpu/codegen/genscript/optimizers.py`. FBGEMM's defaults are
    `initial_accumulator_value=0.0` and `epsilon=1e-8`.

    Rows lose weight only in steps that look them up. Without weight decay, the result
    equals the dense rule. optax has no row-wise Adagrad.

    Args:
      learning_rate: scalar, or schedule of the step counted from 0.
      initial_accumulator_value: start of `a`, positive; 0 is allowed with an epsilon.
      epsilon: non-negative; outside the root, unlike that of `adagrad`.
      weight_decay: non-negative.
      weight_decay_mode: `"l2"` adds the decay to the gradient; `"decoupled"` takes it
        from the row.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of its range.

    Example:
      >>> rowwise_adagrad(0.1).init(jnp.ones((3, 2)))[0].accumulators.shape
      (3,)
    """
    if not may_be_positive(epsilon):
        check_hyperparameters(
            "rowwise_adagrad",
            initial_accumulator_value=positive(initial_accumulator_value),
        )
    decays = may_be_positive(weight_decay)

    def init(params):
        return AdagradState(
            jnp.full(params.shape[:1], initial_accumulator_value, params.dtype)
        )

    def update(updates: Any, state: Any, params: Any = None):
        if decays and weight_decay_mode == "l2":
            updates = updates + weight_decay * params
        accumulators = state.accumulators + jnp.mean(jnp.square(updates), axis=1)
        steps = updates / (jnp.sqrt(accumulators) + epsilon)[:, None]
        if decays and weight_decay_mode == "decoupled":
            steps = steps + weight_decay * params
        return steps, AdagradState(accumulators)

    return optax.chain(
        for_each_array(init, update), optax.scale_by_learning_rate(learning_rate)
    )


class AdagradMomentumState(NamedTuple):
    """State of `adagrad_momentum`: two slot variables `[rows, dim]`."""

    accumulators: jax.Array
    momenta: jax.Array


@takes_common_options()
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

    For a row `w` with the summed gradient `g`::

        a += g**2                                         if beta2 == 1
        a = beta2 * a + (1 - beta2) * g**2                otherwise
        s = g * (a + epsilon)**(-1 / exponent)
        m = momentum * m + s
        w -= learning_rate * m
        w -= learning_rate * (momentum * m + s)           instead, if use_nesterov

    `s` is the scaled gradient. The slot variables `a` and `m`, `[rows, dim]`, start at
    0. So the first step of a row is about `learning_rate * sign(g)`.

    Source: `tf.tpu.experimental.embedding.AdagradMomentum`, with the formula of its
    TPU operation.

    The momentum decays only in steps that look its row up. optax has no such optimizer.

    Args:
      learning_rate: scalar, or schedule of the step counted from 0.
      momentum: decay of `m`, in [0, 1].
      use_nesterov: True selects Nesterov's step.
      exponent: root that divides the gradient, positive; 2 is the square root.
      beta2: decay of `a`, in [0, 1]. 1 sums the squares.
      epsilon: positive; `epsilon**(-1 / exponent)` must be finite in float32.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of its range.

    Example:
      >>> adagrad_momentum(0.1).init(jnp.ones((3, 2)))[0].momenta.shape
      (3, 2)
    """
    is_traced = isinstance(epsilon, Tracer) or isinstance(exponent, Tracer)
    if not is_traced and -math.log(epsilon) / exponent > _LOG_OF_LARGEST:
        raise ValueError(
            "adagrad_momentum: epsilon**(-1 / exponent) must be finite in float32, got "
            f"epsilon {epsilon} and exponent {exponent}. Raise one of them."
        )

    def init(params):
        return AdagradMomentumState(
            accumulators=jnp.zeros_like(params), momenta=jnp.zeros_like(params)
        )

    def update(updates, state, params=None):
        del params
        gain = jnp.where(beta2 == 1, 1, 1 - beta2)
        squares = jnp.square(updates)
        accumulators = beta2 * state.accumulators + gain * squares
        scaled = updates * jnp.power(accumulators + epsilon, -1 / exponent)
        momenta = momentum * state.momenta + scaled
        steps = momentum * momenta + scaled if use_nesterov else momenta
        return steps, AdagradMomentumState(accumulators, momenta)

    return optax.chain(
        for_each_array(init, update), optax.scale_by_learning_rate(learning_rate)
    )


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
