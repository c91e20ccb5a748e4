"""Adagrad, with an accumulator per element or per row.

Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and
Stochastic Optimization", JMLR 12 (2011).
"""

from typing import Any, Literal, NamedTuple, Unpack

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
    one_of,
    positive,
)

WeightDecayMode = Literal["l2", "decoupled"]


class ScaleByAdagradState(NamedTuple):
    """`accumulators`: sums of squared gradients, `[rows, dim]` or `[rows]`."""

    accumulators: jax.Array


@takes_common_options
def adagrad(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    initial_accumulator_value: float = 0.1,
    *,
    epsilon: float = 0.0,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Adagrad: `a += g**2; w -= learning_rate * g / sqrt(a + epsilon)`.

    TensorFlow: `tf.tpu.experimental.embedding.Adagrad`, which has no epsilon; Keras'
    Adagrad is `epsilon=1e-7`. Equal to the dense rule, since a row that was not looked
    up has gradient zero.

    Args:
      learning_rate: number or schedule of the step, counted from 0.
      initial_accumulator_value: start of `a`, positive.
      epsilon: not negative.
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
    rule = optax.chain(
        scale_by_adagrad(initial_accumulator_value, epsilon=epsilon),
        optax.scale_by_learning_rate(learning_rate),
    )
    return with_options(rule, learning_rate=learning_rate, **options)


@takes_common_options
def rowwise_adagrad(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    initial_accumulator_value: float = 0.1,
    *,
    epsilon: float = 0.0,
    weight_decay: float = 0.0,
    weight_decay_mode: WeightDecayMode = "l2",
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Adagrad with one accumulator per row: 1 / dim of the memory.

        g += weight_decay * w                             in mode "l2"
        a += mean(g**2)                                   the mean over the row
        w -= learning_rate * g / (sqrt(a) + epsilon)
        w -= learning_rate * weight_decay * w_before      in mode "decoupled"

    FBGEMM and TorchRec: `EXACT_ROWWISE_ADAGRAD` with `WeightDecayMode.L2` or
    `DECOUPLE`, after `fbgemm_gpu/codegen/genscript/optimizers.py`. There accumulators
    start at 0 and epsilon is 1e-8: that is `initial_accumulator_value=0.0` and
    `epsilon=1e-8`. Rows lose weight only in steps that look them up; without weight
    decay it equals the dense rule.

    Args:
      learning_rate: number or schedule of the step, counted from 0.
      initial_accumulator_value: start of `a`, positive, or 0 with an epsilon.
      epsilon: not negative; outside the root, unlike that of `adagrad`.
      weight_decay: not negative.
      weight_decay_mode: see above.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of its range.

    Example:
      >>> rowwise_adagrad(0.1).init(jnp.ones((3, 2)))[0].accumulators.shape
      (3,)
    """
    rule = optax.chain(
        scale_by_rowwise_adagrad(
            initial_accumulator_value,
            epsilon=epsilon,
            weight_decay=weight_decay,
            weight_decay_mode=weight_decay_mode,
        ),
        optax.scale_by_learning_rate(learning_rate),
    )
    return with_options(rule, learning_rate=learning_rate, **options)


def scale_by_adagrad(
    initial_accumulator_value: float = 0.1, *, epsilon: float = 0.0
) -> optax.GradientTransformation:
    """Divides by the root of the sum of squares so far, element by element."""
    check_hyperparameters(
        "adagrad",
        initial_accumulator_value=positive(initial_accumulator_value),
        epsilon=non_negative(epsilon),
    )

    def init(params):
        return ScaleByAdagradState(jnp.full_like(params, initial_accumulator_value))

    def update(updates, state, params=None):
        del params
        accumulators = state.accumulators + jnp.square(updates)
        return (
            updates * jax.lax.rsqrt(accumulators + epsilon),
            ScaleByAdagradState(accumulators),
        )

    return for_each_array(init, update)


def scale_by_rowwise_adagrad(
    initial_accumulator_value: float = 0.1,
    *,
    epsilon: float = 0.0,
    weight_decay: float = 0.0,
    weight_decay_mode: WeightDecayMode = "l2",
) -> optax.GradientTransformation:
    """Divides by the root of the sum of the rows' mean squares so far.

    Weight decay is part of it, since in one mode it precedes and in the other follows
    the division; see `rowwise_adagrad`.
    """
    has_epsilon = positive(epsilon).is_in_range
    decays = positive(weight_decay).is_in_range
    check_hyperparameters(
        "rowwise_adagrad",
        initial_accumulator_value=(
            non_negative(initial_accumulator_value)
            if has_epsilon
            else positive(initial_accumulator_value)
        ),
        epsilon=non_negative(epsilon),
        weight_decay=non_negative(weight_decay),
        weight_decay_mode=one_of(weight_decay_mode, WeightDecayMode),
    )

    def init(params):
        return ScaleByAdagradState(
            jnp.full(params.shape[:1], initial_accumulator_value, params.dtype)
        )

    def update(updates: Any, state: Any, params: Any = None):
        if decays and weight_decay_mode == "l2":
            updates = updates + weight_decay * params
        accumulators = state.accumulators + jnp.mean(jnp.square(updates), axis=1)
        steps = updates / (jnp.sqrt(accumulators) + epsilon)[:, None]
        if decays and weight_decay_mode == "decoupled":
            steps = steps + weight_decay * params
        return steps, ScaleByAdagradState(accumulators)

    return for_each_array(init, update)


class ScaleByAdagradMomentumState(NamedTuple):
    """Slot variables `[rows, dim]`."""

    accumulators: jax.Array
    momenta: jax.Array


@takes_common_options
def adagrad_momentum(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    momentum: float = 0.0,
    use_nesterov: bool = False,
    exponent: float = 2,
    beta2: float = 1,
    epsilon: float = 1e-10,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Adagrad with a momentum over the scaled gradients.

        a += g**2                              if beta2 == 1
        a = beta2 * a + (1 - beta2) * g**2     otherwise
        s = g * (a + epsilon)**(-1 / exponent)
        m = momentum * m + s
        w -= learning_rate * m                       or, with Nesterov,
        w -= learning_rate * (momentum * m + s)

    TensorFlow: `tf.tpu.experimental.embedding.AdagradMomentum`; the rule is that of its
    SparseCore operation. Momenta decay only in steps that look their row up. Both slot
    variables begin at 0, so the first step of a row is about `learning_rate * sign(g)`.

    Args:
      learning_rate: number or schedule of the step, counted from 0.
      momentum: decay of the momenta.
      use_nesterov: see above.
      exponent: positive.
      beta2: decay of the accumulators; 1 sums them up.
      epsilon: positive.
      **options: see `with_options`.

    Raises:
      ValueError: if `exponent` or `epsilon` is not positive.

    Example:
      >>> adagrad_momentum(0.1).init(jnp.ones((3, 2)))[0].momenta.shape
      (3, 2)
    """
    rule = optax.chain(
        scale_by_adagrad_momentum(momentum, use_nesterov, exponent, beta2, epsilon),
        optax.scale_by_learning_rate(learning_rate),
    )
    return with_options(rule, learning_rate=learning_rate, **options)


def scale_by_adagrad_momentum(
    momentum: float = 0.0,
    use_nesterov: bool = False,
    exponent: float = 2,
    beta2: float = 1,
    epsilon: float = 1e-10,
) -> optax.GradientTransformation:
    """Scales by accumulators and takes the momentum; see `adagrad_momentum`."""
    check_hyperparameters(
        "adagrad_momentum", exponent=positive(exponent), epsilon=positive(epsilon)
    )
    gain = jnp.where(beta2 == 1, 1, 1 - beta2)

    def init(params):
        return ScaleByAdagradMomentumState(
            accumulators=jnp.zeros_like(params), momenta=jnp.zeros_like(params)
        )

    def update(updates, state, params=None):
        del params
        squares = jnp.square(updates)
        accumulators = beta2 * state.accumulators + gain * squares
        scaled = updates * jnp.power(accumulators + epsilon, -1 / exponent)
        momenta = momentum * state.momenta + scaled
        steps = momentum * momenta + scaled if use_nesterov else momenta
        return steps, ScaleByAdagradMomentumState(accumulators, momenta)

    return for_each_array(init, update)
