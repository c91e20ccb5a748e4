"""FBGEMM's optimizers with one scalar per row, or with steps scaled by row norms.

The formulas follow `fbgemm_gpu/codegen/genscript/optimizers.py`. The names follow
`split_embedding_configs.EmbOptimType`, which TorchRec uses. As in FBGEMM, slot
variables decay only in steps that look up their row, while bias correction counts all
steps.
"""

from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.array_rules import descent, for_each_array, initial_state
from tpu_embedding.optimizers.checks import fraction_below_one, may_be_positive
from tpu_embedding.optimizers.options import CommonOptions, public_optimizer
from tpu_embedding.optimizers.rules.adam import AdamState

VelocityOf = Literal["element", "row"]


@public_optimizer()
def partial_rowwise_adam(
    learning_rate: optax.ScalarOrSchedule = 0.01,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-8,
    *,
    weight_decay: float = 0.0,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes bias-corrected Adam with one velocity per row.

    For a row `w` with summed gradient `g`, in step `t` counted from 1::

        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * mean(g**2)             mean over the row
        u = m / (1 - beta_1**t) / (sqrt(v / (1 - beta_2**t)) + epsilon)
        w -= learning_rate * (u + weight_decay * w)

    `u` is the Adam step. The slot variables `m`, `[rows, dim]`, and `v`, `[rows]`,
    start at 0.

    Source: FBGEMM's `PARTIAL_ROWWISE_ADAM`, with the same defaults.

    Rows that the step does not look up do not change, not even by weight decay. optax
    lacks row-wise Adam.

    Args:
      learning_rate: scalar or optax schedule.
      beta_1: decay of `m`, in [0, 1).
      beta_2: decay of `v`, in [0, 1).
      epsilon: positive.
      weight_decay: non-negative, decoupled from the moments.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of range.

    Example:
      >>> state = partial_rowwise_adam(0.1).init(jnp.ones((3, 2)))
      >>> state[0].momenta.shape, state[0].velocities.shape
      ((3, 2), (3,))
    """
    steps = _moment_steps((beta_1, beta_2), epsilon, weight_decay, "row")
    return optax.chain(*steps, optax.scale_by_learning_rate(learning_rate))


@public_optimizer()
def lamb(
    learning_rate: optax.ScalarOrSchedule = 0.01,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-8,
    *,
    weight_decay: float = 0.0,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes LAMB with rows as layers: an Adam step, scaled to the row's norm.

    For a row `w` with summed gradient `g`, in step `t` counted from 1::

        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * g**2
        u = m / (1 - beta_1**t) / (sqrt(v / (1 - beta_2**t)) + epsilon)
            + weight_decay * w
        w -= learning_rate * norm(w) / norm(u) * u            Euclidean norms of the row

    `u` is the Adam step with weight decay. If either norm is 0, their ratio is replaced
    by 1, as in `optax.lamb`. The slot variables `m` and `v`, `[rows, dim]`, start at 0.

    Source: You et al., "Large Batch Optimization for Deep Learning" (ICLR 2020), as in
    FBGEMM's `LAMB`, with the same defaults. However, in FBGEMM, a row of zeros never
    changes, and a step `u` of zeros gives NaN.

    `optax.lamb` takes norms over the whole table, so tables reject it as not row-local.

    Args:
      learning_rate: scalar or optax schedule.
      beta_1: decay of `m`, in [0, 1).
      beta_2: decay of `v`, in [0, 1).
      epsilon: positive.
      weight_decay: non-negative. `norm(u)` includes the decay.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of range.

    Example:
      >>> optimizer = lamb(0.5)
      >>> rows = jnp.array([[3.0, 4.0]])
      >>> updates, _ = optimizer.update(rows, optimizer.init(rows), rows)
      >>> [round(x, 4) for x in updates[0].tolist()]
      [-1.7678, -1.7678]
    """
    steps = _moment_steps((beta_1, beta_2), epsilon, weight_decay, "element")
    rate = optax.scale_by_learning_rate(learning_rate)
    return optax.chain(*steps, scale_by_row_trust_ratio(), rate)


@public_optimizer()
def partial_rowwise_lamb(
    learning_rate: optax.ScalarOrSchedule = 0.01,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-8,
    *,
    weight_decay: float = 0.0,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes LAMB with rows as layers, and one velocity per row.

    For a row `w` with summed gradient `g`, in step `t` counted from 1::

        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * mean(g**2)             mean over the row
        u = m / (1 - beta_1**t) / (sqrt(v / (1 - beta_2**t)) + epsilon)
            + weight_decay * w
        w -= learning_rate * norm(w) / norm(u) * u            Euclidean norms of the row

    `u` is the Adam step with weight decay. The slot variables `m`, `[rows, dim]`, and
    `v`, `[rows]`, start at 0.

    Source: FBGEMM's `PARTIAL_ROWWISE_LAMB`, with the same defaults. This rule differs
    from FBGEMM and `optax.lamb` in the same ways as `lamb` does.

    Args:
      learning_rate: scalar or optax schedule.
      beta_1: decay of `m`, in [0, 1).
      beta_2: decay of `v`, in [0, 1).
      epsilon: positive.
      weight_decay: non-negative. `norm(u)` includes the decay.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of range.

    Example:
      >>> partial_rowwise_lamb(0.1).init(jnp.ones((3, 2)))[0].velocities.shape
      (3,)
    """
    steps = _moment_steps((beta_1, beta_2), epsilon, weight_decay, "row")
    rate = optax.scale_by_learning_rate(learning_rate)
    return optax.chain(*steps, scale_by_row_trust_ratio(), rate)


class RowwiseRMSPropState(NamedTuple):
    """Moving averages of each row's mean squared gradient, `[rows]`."""

    ms: jax.Array


@public_optimizer(rho=fraction_below_one)
def rowwise_rmsprop(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    rho: float = 0.9,
    epsilon: float = 1e-7,
    **options: Unpack[CommonOptions],
) -> optax.GradientTransformation:
    """Makes RMSProp with one mean square per row.

    For a row `w` with summed gradient `g`::

        ms = rho * ms + (1 - rho) * mean(g**2)                 mean over the row
        w -= learning_rate * g / sqrt(ms + epsilon)

    The slot variable `ms`, `[rows]`, starts at 0.

    Source: FBGEMM's `rowwise_rmsprop_ar` with `ar_alpha=0`. However, FBGEMM adds
    epsilon outside the root. optax lacks row-wise RMSProp.

    Args:
      learning_rate: scalar or optax schedule.
      rho: decay of `ms`, in [0, 1).
      epsilon: positive.
      **options: see `with_options`.

    Raises:
      ValueError: if a value is out of range.

    Example:
      >>> rowwise_rmsprop(0.1).init(jnp.ones((3, 2)))[0].ms.shape
      (3,)
    """

    def update(updates: Any, state: Any, params: Any):
        del params
        ms = rho * state.ms + (1 - rho) * jnp.mean(jnp.square(updates), axis=1)
        steps = updates * jax.lax.rsqrt(ms + epsilon)[:, None]
        return steps, RowwiseRMSPropState(ms)

    init = initial_state(RowwiseRMSPropState, by_row=("ms",))
    return descent(init, update, learning_rate)


def scale_by_row_trust_ratio() -> optax.GradientTransformation:
    """Scales steps to their rows' norms: `u * norm(w) / norm(u)`; see `lamb`."""

    def scale(step: Any, row: Any) -> Any:
        step_norms = jnp.linalg.norm(step, axis=1, keepdims=True)
        row_norms = jnp.linalg.norm(row, axis=1, keepdims=True)
        is_zero = (step_norms == 0) | (row_norms == 0)
        ratios = row_norms / jnp.where(is_zero, 1, step_norms)
        return step * jnp.where(is_zero, 1, ratios)

    return optax.stateless_with_tree_map(scale)


def _moment_steps(
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
    velocity_of: VelocityOf,
) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """Builds the steps that Adam and LAMB share: moments, then weight decay."""
    beta_1, beta_2 = betas
    by_row = ("velocities",) if velocity_of == "row" else ()

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
        return steps, AdamState(count, momenta, velocities)

    # Without weight decay, rows are not read. Both choices for `decay` have an empty
    # state, so the state remains valid if a later step passes a traced weight decay.
    decays = may_be_positive(weight_decay)
    decay = optax.add_decayed_weights(weight_decay) if decays else optax.identity()
    return for_each_array(initial_state(AdamState, by_row=by_row), update), decay
