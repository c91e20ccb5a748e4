"""Adagrad, with an accumulator per element or per row.

Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and
Stochastic Optimization", JMLR 12 (2011).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers._checks import check_hyperparameters, positive


class ScaleByAdagradState(NamedTuple):
    """`accumulators`: sums of squared gradients, `[rows, dim]` or `[rows]`."""

    accumulators: jax.Array


def adagrad(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    initial_accumulator_value: float = 0.1,
) -> optax.GradientTransformation:
    """Adagrad: `a += g**2; w -= learning_rate * g / sqrt(a)`.

    TensorFlow: `tf.tpu.experimental.embedding.Adagrad`, which has no epsilon either.
    Equal to the dense rule, since a row that was not looked up has gradient zero.

    Args:
      learning_rate: number or schedule of the step, counted from 0.
      initial_accumulator_value: start of `a`, positive.

    Raises:
      ValueError: if `initial_accumulator_value` is not positive.

    Example:
      >>> optimizer = adagrad(0.1, initial_accumulator_value=1.0)
      >>> rows = jnp.ones((1, 2))
      >>> state = optimizer.init(rows)
      >>> updates, state = optimizer.update(jnp.sqrt(3.0) * rows, state)
      >>> [round(x, 4) for x in updates[0].tolist()]
      [-0.0866, -0.0866]
    """
    return optax.chain(
        scale_by_adagrad(initial_accumulator_value),
        optax.scale_by_learning_rate(learning_rate),
    )


def rowwise_adagrad(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    initial_accumulator_value: float = 0.1,
) -> optax.GradientTransformation:
    """Adagrad with one accumulator per row: 1 / dim of the memory.

    `a += mean(g**2); w -= learning_rate * g / sqrt(a)`, the mean over the row. Known
    from FBGEMM and TorchRec as `EXACT_ROWWISE_ADAGRAD` (there with `sqrt(a) + eps`).

    Args:
      learning_rate: number or schedule of the step, counted from 0.
      initial_accumulator_value: start of `a`, positive.

    Raises:
      ValueError: if `initial_accumulator_value` is not positive.

    Example:
      >>> rowwise_adagrad(0.1).init(jnp.ones((3, 2)))[0].accumulators.shape
      (3,)
    """
    return optax.chain(
        scale_by_rowwise_adagrad(initial_accumulator_value),
        optax.scale_by_learning_rate(learning_rate),
    )


def scale_by_adagrad(
    initial_accumulator_value: float = 0.1,
) -> optax.GradientTransformation:
    """Divides by the root of the sum of squares so far, element by element."""
    check_hyperparameters(initial_accumulator_value=positive(initial_accumulator_value))

    def init(params):
        return ScaleByAdagradState(jnp.full_like(params, initial_accumulator_value))

    def update(updates, state, params=None):
        del params
        accumulators = state.accumulators + jnp.square(updates)
        return (
            updates * jax.lax.rsqrt(accumulators),
            ScaleByAdagradState(accumulators),
        )

    return optax.GradientTransformation(init, update)


def scale_by_rowwise_adagrad(
    initial_accumulator_value: float = 0.1,
) -> optax.GradientTransformation:
    """Divides by the root of the sum of the rows' mean squares so far."""
    check_hyperparameters(initial_accumulator_value=positive(initial_accumulator_value))

    def init(params):
        return ScaleByAdagradState(
            jnp.full(params.shape[:1], initial_accumulator_value, params.dtype)
        )

    def update(updates, state, params=None):
        del params
        accumulators = state.accumulators + jnp.mean(jnp.square(updates), axis=1)
        return (
            updates * jax.lax.rsqrt(accumulators)[:, None],
            ScaleByAdagradState(accumulators),
        )

    return optax.GradientTransformation(init, update)
