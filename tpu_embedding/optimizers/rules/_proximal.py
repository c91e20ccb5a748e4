"""L1 and L2 regularisation of rows, and rows that FTRL recomputes."""

from typing import Any

import jax
import jax.numpy as jnp


def proximal_step(rows: jax.Array, step_sizes: Any, l1: Any, l2: Any) -> jax.Array:
    """Applies the proximal operator of `l1 * |w| + l2 / 2 * w**2` to each element.

    The result is `sign(w) * max(abs(w) - step_size * l1, 0) / (1 + step_size * l2)`.

    Args:
      rows: `[rows, dim]`, after the gradient step.
      step_sizes: each element's learning rate, `[rows, dim]`.
      l1: strength of L1 regularisation, a non-negative scalar.
      l2: strength of L2 regularisation, a non-negative scalar.
    """
    shrunk = jnp.maximum(jnp.abs(rows) - step_sizes * l1, 0)
    return jnp.sign(rows) * shrunk / (1 + step_sizes * l2)


def split_zero_rate(rate: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns whether a rate is neither 0 nor subnormal, and a safe divisor.

    FTRL's linears have units of `1 / rate`, so a step with rate 0 must not change them.
    The caller masks such a step.
    """
    # The inverse of a subnormal number overflows.
    moves = jnp.abs(rate) >= jnp.finfo(jnp.float32).tiny
    return moves, jnp.where(moves, rate, 1)


def ftrl_rows(linears: jax.Array, l1: Any, denominators: jax.Array) -> jax.Array:
    """Returns the rows that minimise FTRL's objective, given its slot variables.

    They are `(clip(l, -l1, l1) - l) / denominator`, or 0 if the denominator is 0.

    Args:
      linears: `l`, `[rows, dim]`.
      l1: bound on the linears that leave a row at 0, a non-negative scalar.
      denominators: `[rows, dim]`, non-negative.
    """
    numerators = jnp.clip(linears, -l1, l1) - linears
    is_zero = denominators == 0
    return jnp.where(is_zero, 0, numerators / jnp.where(is_zero, 1, denominators))
