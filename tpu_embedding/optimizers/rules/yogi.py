"""Yogi, whose second moment moves by a step of bounded size, with regularisation.

Zaheer et al., "Adaptive Methods for Nonconvex Optimization" (NeurIPS 2018).
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
    fraction_below_one,
    non_negative,
    positive,
)
from tpu_embedding.optimizers.rules._rates import learning_rate_at
from tpu_embedding.optimizers.rules._regularization import ftrl_rows, proximal_step


class ProximalYogiState(NamedTuple):
    """Slot variables `[rows, dim]`, and the number of updates so far."""

    count: jax.Array
    v: jax.Array
    m: jax.Array


@takes_common_options
def proximal_yogi(
    learning_rate: optax.ScalarOrSchedule = 0.01,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-3,
    l1: float = 0.0,
    l2: float = 0.0,
    initial_accumulator_value: float = 1e-6,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Yogi followed by a proximal step.

        v -= (1 - beta_2) * sign(v - g**2) * g**2
        m = beta_1 * m + (1 - beta_1) * g
        eta = learning_rate / (sqrt(v) + epsilon)
        z = w - eta * m
        w = sign(z) * max(abs(z) - eta * l1, 0) / (1 + eta * l2)

    TensorFlow: `ProximalYogiParameters` of the TPU embeddings' protocol buffer and of
    `tensorflow/python/tpu/tpu_embedding.py`, whose defaults these are. It names the
    paper and the parameters, not the formula; the proximal step is read as that of
    `proximal_adagrad`. Bias correction is not part of it: TensorFlow asks for a
    learning rate that is multiplied by `sqrt(1 - beta_2**t) / (1 - beta_1**t)`, with
    the step t from 1; `optax.yogi` corrects by itself. Slots decay, and rows are
    regularised, only in steps that look the row up.

    Args:
      learning_rate: number or schedule of the step, counted from 0.
      beta_1: decay of `m`, in [0, 1).
      beta_2: decay of `v`, in [0, 1).
      epsilon: positive.
      l1: not negative.
      l2: not negative.
      initial_accumulator_value: start of `v`, not negative; `m` starts at 0.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of its range.

    Example:
      >>> optimizer = proximal_yogi(0.1, beta_1=0.0, beta_2=0.0, epsilon=1.0)
      >>> rows = jnp.zeros((1, 2))
      >>> updates, _ = optimizer.update(rows + 1.0, optimizer.init(rows), rows)
      >>> [round(x, 4) for x in updates[0].tolist()]
      [-0.05, -0.05]
    """
    check_hyperparameters(
        "proximal_yogi",
        beta_1=fraction_below_one(beta_1),
        beta_2=fraction_below_one(beta_2),
        epsilon=positive(epsilon),
        l1=non_negative(l1),
        l2=non_negative(l2),
        initial_accumulator_value=non_negative(initial_accumulator_value),
    )

    def init(params):
        return ProximalYogiState(
            count=jnp.zeros((), jnp.int32),
            v=jnp.full_like(params, initial_accumulator_value),
            m=jnp.zeros_like(params),
        )

    def update(updates: Any, state: Any, params: Any):
        v = _second_moment(updates, state.v, beta_2)
        m = beta_1 * state.m + (1 - beta_1) * updates
        rate = learning_rate_at(learning_rate, state.count)
        eta = rate / (jnp.sqrt(v) + epsilon)
        rows = proximal_step(params - eta * m, eta, l1, l2)
        return rows - params, ProximalYogiState(state.count + 1, v, m)

    rule = for_each_array(init, update)
    return with_options(rule, learning_rate=learning_rate, **options)


class OnlineYogiState(NamedTuple):
    """Slot variables `[rows, dim]`, and the number of updates so far."""

    count: jax.Array
    vs: jax.Array
    linears: jax.Array


@takes_common_options
def online_yogi(
    learning_rate: optax.ScalarOrSchedule = 0.01,
    l1: float = 0.0,
    l2: float = 0.0,
    beta_2: float = 0.999,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """FTRL with Yogi's second moment: the row is computed anew from its slots.

        v' = v - (1 - beta_2) * sign(v - g**2) * g**2
        l += g - (sqrt(v') - sqrt(v)) * w / learning_rate
        w = (clip(l, -l1, l1) - l) / (sqrt(v') / learning_rate + 2 * l2)

    A denominator of 0 gives a row of 0. TensorFlow: `OnlineYogiParameters` of the TPU
    embeddings' protocol buffer, which names the paper "plus some extensions based on
    FTRL" and no formula: this reading is `ftrl` with the root of `v` in place of the
    power of its accumulator. Bias correction is left to the learning rate, as in
    `proximal_yogi`. The first update of a row forgets its initial value, since both
    slots begin at 0; only steps that look a row up change it.

    Args:
      learning_rate: number or schedule of the step, counted from 0. Never 0: the
        formula divides by it.
      l1: not negative.
      l2: not negative.
      beta_2: decay of `v`, in [0, 1).
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of its range.

    Example:
      >>> optimizer = online_yogi(0.5, beta_2=0.0)
      >>> rows = jnp.zeros((1, 2))
      >>> updates, _ = optimizer.update(rows + 3.0, optimizer.init(rows), rows)
      >>> updates.tolist()
      [[-0.5, -0.5]]
    """
    check_hyperparameters(
        "online_yogi",
        l1=non_negative(l1),
        l2=non_negative(l2),
        beta_2=fraction_below_one(beta_2),
    )

    def init(params):
        return OnlineYogiState(
            count=jnp.zeros((), jnp.int32),
            vs=jnp.zeros_like(params),
            linears=jnp.zeros_like(params),
        )

    def update(updates: Any, state: Any, params: Any):
        rate = learning_rate_at(learning_rate, state.count)
        vs = _second_moment(updates, state.vs, beta_2)
        roots = jnp.sqrt(vs)
        change = roots - jnp.sqrt(state.vs)
        linears = state.linears + updates - change * params / rate
        rows = ftrl_rows(linears, l1, roots / rate + 2 * l2)
        return rows - params, OnlineYogiState(state.count + 1, vs, linears)

    rule = for_each_array(init, update)
    return with_options(rule, learning_rate=learning_rate, **options)


def _second_moment(gradients: jax.Array, v: jax.Array, beta_2: float) -> jax.Array:
    """Moves v towards the squares by at most `(1 - beta_2)` of them; never below 0."""
    squares = jnp.square(gradients)
    return v - (1 - beta_2) * jnp.sign(v - squares) * squares
