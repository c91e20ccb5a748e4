"""Adam, Yogi, RMSProp and Adadelta, by default lazy and without bias correction.

They follow TensorFlow, and moments decay only in steps that look up their row. The
forms in `lazy_adam.py` follow optax.
"""

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.argument_checks import invalid
from tpu_embedding.optimizers.array_rules import descent, for_each_array, initial_state
from tpu_embedding.optimizers.checks import non_negative, positive
from tpu_embedding.optimizers.learning_rates import learning_rate_at
from tpu_embedding.optimizers.options import CommonOptions, public_optimizer
from tpu_embedding.optimizers.row_optimizer import every_row
from tpu_embedding.optimizers.rules._proximal import (
    ftrl_rows,
    proximal_step,
    split_zero_rate,
)


class AdamState(NamedTuple):
    """Both moments, `[rows, dim]`. In `rowwise`, velocities may be `[rows]`."""

    count: jax.Array
    momenta: jax.Array
    velocities: jax.Array


@public_optimizer()
def adam(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-7,
    *,
    lazy_adam: bool = True,
    sum_inside_sqrt: bool = True,
    bias_correction: bool = False,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes Adam in TensorFlow's TPU form, by default lazy and without bias correction.

    For a row `w` with summed gradient `g`::

        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g**2
        w -= c * learning_rate * m / sqrt(v + epsilon**2)        if sum_inside_sqrt
        w -= c * learning_rate * m / (sqrt(v) + epsilon)         otherwise
        c = sqrt(1 - beta_2**t) / (1 - beta_1**t)     if bias_correction, else 1

    `c` is the bias correction. `t` is the step counted from 1, and is the same for all
    rows. The slot variables `m` and `v`, `[rows, dim]`, start at 0.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (ICLR 2015), as
    in `tf.tpu.experimental.embedding.Adam`.

    It differs from `optax.adam` and Keras' Adam in three ways:

    * A row's moments decay only in steps that look up the row. `lazy_adam=False`
      updates every row in every step, at the cost of a pass over the table.
    * The bias is corrected only if you pass `bias_correction=True`.
    * Epsilon is inside the root unless you pass `sum_inside_sqrt=False`.

    With all three arguments, it equals Keras' Adam. However, `optax.adam` still
    differs: it adds epsilon after the bias correction.

    Args:
      learning_rate: scalar or optax schedule.
      beta_1: decay of `m`, in [0, 1).
      beta_2: decay of `v`, in [0, 1).
      epsilon: positive. With `sum_inside_sqrt=True`, at least 1.1e-19, because the
        square of a smaller epsilon is 0 in float32.
      lazy_adam: False updates every row in every step, as dense Adam does.
      sum_inside_sqrt: True adds epsilon inside the root.
      bias_correction: True multiplies the learning rate by `c`.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of range, or options contradict each other.

    Example:
      >>> optimizer = adam(0.1)
      >>> state = optimizer.init(jnp.zeros((1, 2)))
      >>> updates, state = optimizer.update(jnp.ones((1, 2)), state)
      >>> [round(x, 4) for x in updates[0].tolist()]
      [-0.3162, -0.3162]
    """
    # `v` may be 0. If the square of epsilon were 0 as well, the step would be 0 / 0.
    if sum_inside_sqrt and positive(epsilon**2).problem:
        rule = "be at least 1.1e-19 with sum_inside_sqrt=True, which squares it"
        fix = "Raise it, or set sum_inside_sqrt=False."
        raise invalid("adam: epsilon", rule, epsilon, fix)

    def update(updates, state, params=None):
        del params
        count = state.count + 1
        momenta = beta_1 * state.momenta + (1 - beta_1) * updates
        velocities = beta_2 * state.velocities + (1 - beta_2) * jnp.square(updates)
        if sum_inside_sqrt:
            steps = momenta * jax.lax.rsqrt(velocities + epsilon**2)
        else:
            steps = momenta / (jnp.sqrt(velocities) + epsilon)
        # Scales the whole step, as in Keras. optax corrects `v` before it adds epsilon.
        if bias_correction:
            t = count.astype(steps.dtype)
            steps *= jnp.sqrt(1 - beta_2**t) / (1 - beta_1**t)
        return steps, AdamState(count, momenta, velocities)

    rule = descent(initial_state(AdamState), update, learning_rate)
    return rule if lazy_adam else every_row(rule)


class ProximalYogiState(NamedTuple):
    """Slot variables `[rows, dim]` and an update count."""

    count: jax.Array
    v: jax.Array
    m: jax.Array


@public_optimizer(initial_accumulator_value=non_negative)
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
    """Makes Yogi followed by a proximal step, which shrinks rows towards zero.

    For a row `w` with summed gradient `g`::

        v -= (1 - beta_2) * sign(v - g**2) * g**2
        m = beta_1 * m + (1 - beta_1) * g
        eta = learning_rate / (sqrt(v) + epsilon)
        z = w - eta * m
        w = sign(z) * max(abs(z) - eta * l1, 0) / (1 + eta * l2)

    Yogi is similar to Adam, but bounds the change in `v`. `z` is the row after a Yogi
    step with size `eta`. The slot variables are `[rows, dim]`: `v` starts at
    `initial_accumulator_value`, and `m` starts at 0.

    Source: Zaheer et al., "Adaptive Methods for Nonconvex Optimization" (NeurIPS 2018),
    as in TensorFlow's `ProximalYogiParameters` (`optimization_parameters.proto`), with
    the defaults in `tensorflow/python/tpu/tpu_embedding.py`. TensorFlow publishes the
    parameters but not the formula. This rule assumes the proximal step of
    `proximal_adagrad`.

    Unlike `optax.yogi`, it does not correct the bias. To correct the bias as in
    TensorFlow, multiply the learning rate by `sqrt(1 - beta_2**t) / (1 - beta_1**t)`,
    where `t` is the step counted from 1. Regularization and the decay of slot variables
    apply only to rows that the step looks up.

    Args:
      learning_rate: scalar or optax schedule.
      beta_1: decay of `m`, in [0, 1).
      beta_2: decay of `v`, in [0, 1).
      epsilon: positive.
      l1: L1 regularization strength, non-negative.
      l2: L2 regularization strength, non-negative.
      initial_accumulator_value: non-negative.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of range.

    Example:
      >>> optimizer = proximal_yogi(0.1, beta_1=0.0, beta_2=0.0, epsilon=1.0)
      >>> rows = jnp.zeros((1, 2))
      >>> updates, _ = optimizer.update(rows + 1.0, optimizer.init(rows), rows)
      >>> [round(x, 4) for x in updates[0].tolist()]
      [-0.05, -0.05]
    """
    init = initial_state(ProximalYogiState, v=initial_accumulator_value)

    def update(updates: Any, state: Any, params: Any):
        v = _second_moment(updates, state.v, beta_2)
        m = beta_1 * state.m + (1 - beta_1) * updates
        rate = learning_rate_at(learning_rate, state.count)
        eta = rate / (jnp.sqrt(v) + epsilon)
        rows = proximal_step(params - eta * m, eta, l1, l2)
        return rows - params, ProximalYogiState(state.count + 1, v, m)

    return for_each_array(init, update)


class OnlineYogiState(NamedTuple):
    """Slot variables `[rows, dim]` and an update count."""

    count: jax.Array
    vs: jax.Array
    linears: jax.Array


@public_optimizer()
def online_yogi(
    learning_rate: optax.ScalarOrSchedule = 0.01,
    l1: float = 0.0,
    l2: float = 0.0,
    beta_2: float = 0.999,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes FTRL with Yogi's second moment: rows are recomputed from slot variables.

    For a row `w` with summed gradient `g`::

        v_new = v - (1 - beta_2) * sign(v - g**2) * g**2
        l += g - (sqrt(v_new) - sqrt(v)) * w / learning_rate
        w = (clip(l, -l1, l1) - l) / (sqrt(v_new) / learning_rate + 2 * l2)

    If the denominator is 0, the row becomes 0. If the learning rate is 0, the row and
    its slot variables do not change. The slot variables `v` and `l`, `[rows, dim]`,
    start at 0, and `v_new` is the next value of `v`. Because `l` starts at 0, the first
    update to a row discards its initial value.

    Source: Zaheer et al. (NeurIPS 2018), as in TensorFlow's `OnlineYogiParameters`
    (`optimization_parameters.proto`). That file cites the paper "plus some extensions
    based on FTRL" but gives no formula. This rule is an interpretation: `ftrl` with the
    root of `v` instead of the power of the accumulator.

    As in `proximal_yogi`, you can correct the bias through the learning rate. optax has
    no equivalent.

    Args:
      learning_rate: scalar or optax schedule.
      l1: L1 regularization strength, non-negative.
      l2: L2 regularization strength, non-negative.
      beta_2: decay of `v`, in [0, 1).
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of range.

    Example:
      >>> optimizer = online_yogi(0.5, beta_2=0.0)
      >>> rows = jnp.zeros((1, 2))
      >>> updates, _ = optimizer.update(rows + 3.0, optimizer.init(rows), rows)
      >>> updates.tolist()
      [[-0.5, -0.5]]
    """
    init = initial_state(OnlineYogiState)

    def update(updates: Any, state: Any, params: Any):
        rate = learning_rate_at(learning_rate, state.count)
        moves, divisor = split_zero_rate(rate)
        # A gradient of 0 leaves `v` and the linears as they are.
        updates = jnp.where(moves, updates, 0)
        vs = _second_moment(updates, state.vs, beta_2)
        roots = jnp.sqrt(vs)
        change = roots - jnp.sqrt(state.vs)
        linears = state.linears + updates - change * params / divisor
        rows = ftrl_rows(linears, l1, roots / divisor + 2 * l2)
        rows = jnp.where(moves, rows, params)
        return rows - params, OnlineYogiState(state.count + 1, vs, linears)

    return for_each_array(init, update)


def _second_moment(gradients: jax.Array, v: jax.Array, beta_2: float) -> jax.Array:
    """Moves `v` towards the squared gradients, as in Yogi."""
    squares = jnp.square(gradients)
    return v - (1 - beta_2) * jnp.sign(v - squares) * squares


class RMSPropState(NamedTuple):
    """Slot variables `[rows, dim]` and an update count."""

    count: jax.Array
    ms: jax.Array
    mom: jax.Array
    # None unless the rule is centered.
    mg: jax.Array | None


@public_optimizer()
def rmsprop(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    *,
    rho: float = 0.9,
    momentum: float = 0.0,
    epsilon: float = 1e-7,
    initial_ms: float = 0.0,
    centered: bool = False,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes RMSProp with momentum, optionally centered by the mean gradient.

    For a row `w` with summed gradient `g`::

        ms = rho * ms + (1 - rho) * g**2
        mg = rho * mg + (1 - rho) * g                     if centered, else 0
        mom = momentum * mom + learning_rate * g / sqrt(max(ms - mg**2, 0) + epsilon)
        w -= mom

    The slot variables are `[rows, dim]`: `ms` starts at `initial_ms`, and `mom` and
    `mg` start at 0. `mg` exists only if centered.

    Source: Tieleman and Hinton, "Lecture 6.5 - RMSProp" (2012). The centered form is
    from Graves, "Generating Sequences With Recurrent Neural Networks" (2013). Both are
    as in TensorFlow's `RmsPropParameters` and `CenteredRmsPropParameters`
    (`optimization_parameters.proto`) and kernels `ResourceSparseApplyRMSProp` and
    `ResourceSparseApplyCenteredRMSProp`.

    Slot variables decay only in steps that look up their row, whereas `optax.rmsprop`
    and Keras update every row in each step. `ms` starts at 1 in TensorFlow 1 and at 0
    in Keras.

    Args:
      learning_rate: scalar or optax schedule.
      rho: decay of `ms` and `mg`, in [0, 1].
      momentum: decay of `mom`, in [0, 1].
      epsilon: positive.
      initial_ms: start of `ms`, non-negative.
      centered: True subtracts the squared mean gradient.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of range.

    Example:
      >>> rmsprop(0.1).init(jnp.ones((3, 2))).ms.shape
      (3, 2)
    """
    mg = 0 if centered else None
    init = initial_state(RMSPropState, ms=initial_ms, mg=mg)

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        del params
        rate = learning_rate_at(learning_rate, state.count)
        ms = rho * state.ms + (1 - rho) * jnp.square(updates)
        mg, variance = None, ms
        if centered:
            mg = rho * state.mg + (1 - rho) * updates
            # Rounding can make the difference negative if gradients repeat.
            variance = jnp.maximum(ms - jnp.square(mg), 0)
        # As in TensorFlow, `mom` sums steps that include their learning rates. With
        # `descent`, a schedule would also rescale earlier steps.
        step = rate * updates * jax.lax.rsqrt(variance + epsilon)
        mom = momentum * state.mom + step
        return -mom, RMSPropState(state.count + 1, ms, mom, mg)

    return for_each_array(init, update)


class AdadeltaState(NamedTuple):
    """Mean squares of gradients and updates, `[rows, dim]`."""

    accumulators: jax.Array
    updates: jax.Array


@public_optimizer()
def adadelta(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    rho: float = 0.95,
    epsilon: float = 1e-7,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes Adadelta, which scales gradients to the size of past updates.

    For a row `w` with summed gradient `g`::

        a = rho * a + (1 - rho) * g**2
        x = g * sqrt(u + epsilon) / sqrt(a + epsilon)
        u = rho * u + (1 - rho) * x**2
        w -= learning_rate * x

    `x` is the update. The slot variables `a` and `u`, `[rows, dim]`, start at 0.

    Source: Zeiler, "ADADELTA: An Adaptive Learning Rate Method" (2012), as in
    TensorFlow's `AdadeltaParameters` (`optimization_parameters.proto`) and kernel
    `ResourceSparseApplyAdadelta`.

    Slot variables decay only in steps that look up their row, whereas `optax.adadelta`
    and Keras update every row in each step.

    Args:
      learning_rate: scalar or optax schedule.
      rho: decay of both slot variables, in [0, 1].
      epsilon: positive.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of range.

    Example:
      >>> adadelta(1.0).init(jnp.ones((3, 2)))[0].updates.shape
      (3, 2)
    """

    def update(updates, state, params=None):
        del params
        a = rho * state.accumulators + (1 - rho) * jnp.square(updates)
        x = updates * jnp.sqrt(state.updates + epsilon) * jax.lax.rsqrt(a + epsilon)
        return x, AdadeltaState(a, rho * state.updates + (1 - rho) * jnp.square(x))

    return descent(initial_state(AdadeltaState), update, learning_rate)
