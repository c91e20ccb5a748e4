"""L1 and L2 regularization, and the closed form shared by FTRL and online Yogi."""

from typing import Any

import jax
import jax.numpy as jnp


def proximal_step(rows: jax.Array, step_sizes: Any, l1: Any, l2: Any) -> jax.Array:
    """Shrinks rows with the proximal operator for `l1 * |w| + l2 / 2 * w**2`.

    The result is `sign(w) * max(abs(w) - step_size * l1, 0) / (1 + step_size * l2)`,
    with one step size per element.
    """
    shrunk = jnp.maximum(jnp.abs(rows) - step_sizes * l1, 0)
    return jnp.sign(rows) * shrunk / (1 + step_sizes * l2)


def split_zero_rate(rate: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tells if a rate is neither 0 nor subnormal, and makes a safe divisor."""
    # The inverse of a subnormal rate overflows. Callers mask the results for such
    # rates.
    moves = jnp.abs(rate) >= jnp.finfo(jnp.float32).tiny
    return moves, jnp.where(moves, rate, 1)


def ftrl_rows(linears: jax.Array, l1: Any, denominators: jax.Array) -> jax.Array:
    """Finds the rows that minimize FTRL's objective.

    The rows are `(clip(l, -l1, l1) - l) / denominator`, or 0 if the denominator is 0.
    Linears `l` within `[-l1, l1]` also give 0.
    """
    numerators = jnp.clip(linears, -l1, l1) - linears
    # Without `beta` and L2 regularization, an accumulator of 0 gives 0 / 0.
    is_zero = denominators == 0
    return jnp.where(is_zero, 0, numerators / jnp.where(is_zero, 1, denominators))
