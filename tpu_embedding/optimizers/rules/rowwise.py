"""Rules that keep one number per row, or scale a row's step by its norm, of FBGEMM.

The formulas are those of `fbgemm_gpu/codegen/genscript/optimizers.py`, the names those
of `fbgemm_gpu.split_embedding_configs.EmbOptimType`, which TorchRec uses. As there,
slots decay only in steps that look their row up, while bias correction counts all
steps.
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
    fraction_below_one,
    non_negative,
    one_of,
    positive,
)

VelocityOf = Literal["element", "row"]


@takes_common_options
def partial_rowwise_adam(
    learning_rate: optax.ScalarOrSchedule = 0.01,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Adam with one velocity per row, and bias correction.

    With t the step, from 1, and the mean over the row:

        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * mean(g**2)
        u = m / (1 - beta_1**t) / (sqrt(v / (1 - beta_2**t)) + epsilon)
        w -= learning_rate * (u + weight_decay * w)

    FBGEMM: `PARTIAL_ROWWISE_ADAM`, with its defaults. Lazy: a row that is not looked
    up keeps moments and values, and does not lose weight.

    Args:
      learning_rate: number or schedule of the step, counted from 0.
      beta_1: decay of the momenta, in [0, 1).
      beta_2: decay of the velocities, in [0, 1).
      epsilon: positive.
      weight_decay: not negative; decoupled from the moments.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of its range.

    Example:
      >>> state = partial_rowwise_adam().init(jnp.ones((3, 2)))
      >>> state[0].momenta.shape, state[0].velocities.shape
      ((3, 2), (3,))
    """
    _check_moments("partial_rowwise_adam", beta_1, beta_2, epsilon, weight_decay)
    rule = optax.chain(
        scale_by_corrected_moments(beta_1, beta_2, epsilon, velocity_of="row"),
        _add_decayed_rows(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )
    return with_options(rule, learning_rate=learning_rate, **options)


@takes_common_options
def lamb(
    learning_rate: optax.ScalarOrSchedule = 0.01,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """LAMB with rows as layers: Adam's step at the length of the row times the rate.

    With t the step, from 1, and the norms of the row:

        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g**2
        u = m / (1 - beta_1**t) / (sqrt(v / (1 - beta_2**t)) + epsilon)
            + weight_decay * w
        w -= learning_rate * |w| / |u| * u

    FBGEMM: `LAMB`, with its defaults; You et al., "Large Batch Optimization for Deep
    Learning" (ICLR 2020). Where either norm is 0 the ratio is 1, as in `optax.lamb`: in
    FBGEMM a row of zeros stays so for ever, and a step of zeros gives NaN. `optax.lamb`
    takes the norms over the whole table, which a table's layer refuses.

    Args:
      learning_rate: number or schedule of the step, counted from 0.
      beta_1: decay of the momenta, in [0, 1).
      beta_2: decay of the velocities, in [0, 1).
      epsilon: positive.
      weight_decay: not negative; part of the step before its norm is taken.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of its range.

    Example:
      >>> optimizer = lamb(0.5)
      >>> rows = jnp.array([[3.0, 4.0]])
      >>> updates, _ = optimizer.update(rows, optimizer.init(rows), rows)
      >>> [round(x, 4) for x in updates[0].tolist()]
      [-1.7678, -1.7678]
    """
    _check_moments("lamb", beta_1, beta_2, epsilon, weight_decay)
    rule = optax.chain(
        scale_by_corrected_moments(beta_1, beta_2, epsilon),
        _add_decayed_rows(weight_decay),
        scale_by_row_trust_ratio(),
        optax.scale_by_learning_rate(learning_rate),
    )
    return with_options(rule, learning_rate=learning_rate, **options)


@takes_common_options
def partial_rowwise_lamb(
    learning_rate: optax.ScalarOrSchedule = 0.01,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """LAMB by rows with one velocity per row: `lamb` with the mean of `g**2` in `v`.

    FBGEMM: `PARTIAL_ROWWISE_LAMB`, with its defaults; see `lamb` for what differs.

    Args:
      learning_rate: number or schedule of the step, counted from 0.
      beta_1: decay of the momenta, in [0, 1).
      beta_2: decay of the velocities, in [0, 1).
      epsilon: positive.
      weight_decay: not negative; part of the step before its norm is taken.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of its range.

    Example:
      >>> partial_rowwise_lamb().init(jnp.ones((3, 2)))[0].velocities.shape
      (3,)
    """
    _check_moments("partial_rowwise_lamb", beta_1, beta_2, epsilon, weight_decay)
    rule = optax.chain(
        scale_by_corrected_moments(beta_1, beta_2, epsilon, velocity_of="row"),
        _add_decayed_rows(weight_decay),
        scale_by_row_trust_ratio(),
        optax.scale_by_learning_rate(learning_rate),
    )
    return with_options(rule, learning_rate=learning_rate, **options)


@takes_common_options
def rowwise_rmsprop(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    rho: float = 0.9,
    epsilon: float = 1e-7,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """RMSProp with one mean square per row.

        ms = rho * ms + (1 - rho) * mean(g**2)            the mean over the row
        w -= learning_rate * g / sqrt(ms + epsilon)

    `rmsprop` without momentum at 1 / dim of the memory of `ms`. FBGEMM has it as
    `rowwise_rmsprop_ar` with `ar_alpha=0`, and there epsilon is outside the root.

    Args:
      learning_rate: number or schedule of the step, counted from 0.
      rho: decay of `ms`, in [0, 1).
      epsilon: positive.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of its range.

    Example:
      >>> rowwise_rmsprop(0.1).init(jnp.ones((3, 2)))[0].ms.shape
      (3,)
    """
    rule = optax.chain(
        scale_by_rowwise_rms(rho, epsilon),
        optax.scale_by_learning_rate(learning_rate),
    )
    return with_options(rule, learning_rate=learning_rate, **options)


class ScaleByCorrectedMomentsState(NamedTuple):
    """Slots `momenta` `[rows, dim]`, `velocities` that or `[rows]`; updates so far."""

    count: jax.Array
    momenta: jax.Array
    velocities: jax.Array


def scale_by_corrected_moments(
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-8,
    *,
    velocity_of: VelocityOf = "element",
) -> optax.GradientTransformation:
    """Scales by bias-corrected moments, with a velocity of each element or row.

    `m / (1 - beta_1**t) / (sqrt(v / (1 - beta_2**t)) + epsilon)`; see
    `partial_rowwise_adam`.
    """
    check_hyperparameters(
        "scale_by_corrected_moments", velocity_of=one_of(velocity_of, VelocityOf)
    )

    def init(params):
        shape = params.shape if velocity_of == "element" else params.shape[:1]
        return ScaleByCorrectedMomentsState(
            count=jnp.zeros((), jnp.int32),
            momenta=jnp.zeros_like(params),
            velocities=jnp.zeros(shape, params.dtype),
        )

    def update(updates: Any, state: Any, params: Any):
        del params
        count = state.count + 1
        t = count.astype(updates.dtype)
        squares = jnp.square(updates)
        if velocity_of == "row":
            squares = jnp.mean(squares, axis=1)
        momenta = beta_1 * state.momenta + (1 - beta_1) * updates
        velocities = beta_2 * state.velocities + (1 - beta_2) * squares
        scales = 1 / (jnp.sqrt(velocities / (1 - beta_2**t)) + epsilon)
        if velocity_of == "row":
            scales = scales[:, None]
        steps = momenta / (1 - beta_1**t) * scales
        return steps, ScaleByCorrectedMomentsState(count, momenta, velocities)

    return for_each_array(init, update)


def scale_by_row_trust_ratio() -> optax.GradientTransformation:
    """Makes each row's step as long as the row: `u * |w| / |u|`; see `lamb`."""

    def scale(step: Any, row: Any) -> Any:
        step_norms = jnp.linalg.norm(step, axis=1, keepdims=True)
        row_norms = jnp.linalg.norm(row, axis=1, keepdims=True)
        is_zero = (step_norms == 0) | (row_norms == 0)
        ratios = row_norms / jnp.where(is_zero, 1, step_norms)
        return step * jnp.where(is_zero, 1, ratios)

    return optax.stateless_with_tree_map(scale)


class ScaleByRowwiseRmsState(NamedTuple):
    """`ms`: decaying means of the rows' mean squares, `[rows]`."""

    ms: jax.Array


def scale_by_rowwise_rms(
    rho: float = 0.9, epsilon: float = 1e-7
) -> optax.GradientTransformation:
    """Divides by the root of a decaying mean of the rows' mean squares."""
    check_hyperparameters(
        "rowwise_rmsprop", rho=fraction_below_one(rho), epsilon=positive(epsilon)
    )

    def init(params):
        return ScaleByRowwiseRmsState(jnp.zeros(params.shape[:1], params.dtype))

    def update(updates: Any, state: Any, params: Any):
        del params
        ms = rho * state.ms + (1 - rho) * jnp.mean(jnp.square(updates), axis=1)
        return (
            updates * jax.lax.rsqrt(ms + epsilon)[:, None],
            ScaleByRowwiseRmsState(ms),
        )

    return for_each_array(init, update)


def _check_moments(
    owner: str, beta_1: float, beta_2: float, epsilon: float, weight_decay: float
) -> None:
    check_hyperparameters(
        owner,
        beta_1=fraction_below_one(beta_1),
        beta_2=fraction_below_one(beta_2),
        epsilon=positive(epsilon),
        weight_decay=non_negative(weight_decay),
    )


def _add_decayed_rows(weight_decay: float) -> optax.GradientTransformation:
    """Adds `weight_decay * w` to the step; nothing, and no read of w, if it is 0."""
    decays = positive(weight_decay).is_in_range
    # Both have an empty state, so a decay that is traced in later steps fits as well.
    return optax.add_decayed_weights(weight_decay) if decays else optax.identity()
