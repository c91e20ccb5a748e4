"""Closed forms of L1 and L2 regularisation that several rules share."""

from typing import Any

import jax
import jax.numpy as jnp


def proximal_step(rows: jax.Array, step_sizes: Any, l1: Any, l2: Any) -> jax.Array:
    """Applies the proximal operator of `l1 * |w| + l2 / 2 * w**2` to each element.

    `sign(w) * max(abs(w) - step_size * l1, 0) / (1 + step_size * l2)`.

    Args:
      rows: `[rows, dim]`, after the gradient step.
      step_sizes: learning rate of each element, `[rows, dim]`.
      l1: strength of L1 regularisation, a non-negative scalar.
      l2: strength of L2 regularisation, a non-negative scalar.
    """
    shrunk = jnp.maximum(jnp.abs(rows) - step_sizes * l1, 0)
    return jnp.sign(rows) * shrunk / (1 + step_sizes * l2)
