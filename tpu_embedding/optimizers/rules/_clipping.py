"""Gradient scaling and clipping as in Keras, and L1 and L2 regularisation.

Clipping works on tables' rows and on dense arrays.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.table_rows import (
    TableRows,
    is_in_layer,
    model_gradient_context,
    model_gradient_squares,
)

ClipnormOf = Literal["sum", "occurrences"]


@dataclasses.dataclass(frozen=True)
class Clipping:
    """A gradient scale and at most one bound; see `adafactor`.

    Attributes:
      loss_scale_factor: factor that the loss was multiplied by. `None` means 1.
      clipvalue: largest absolute value of an element, or `None`.
      clipnorm: largest norm of a dense array's or table's gradient, or `None`.
      global_clipnorm: largest norm of the whole model's gradients, or `None`.
      clipnorm_of: `"occurrences"` takes the norm over all occurrences of ids.
    """

    loss_scale_factor: Any
    clipvalue: Any
    clipnorm: Any
    global_clipnorm: Any
    clipnorm_of: ClipnormOf

    def __call__(self, gradient: jax.Array, tables: TableRows | None) -> jax.Array:
        """Unscales and clips a gradient.

        Args:
          gradient: `[rows, dim]` of some tables, or a dense array of any rank.
          tables: the rows' tables, or `None` for a whole dense array.
        """
        scale = 1.0 if self.loss_scale_factor is None else self.loss_scale_factor
        gradient = gradient / scale
        if self.clipvalue is not None:
            return jnp.clip(gradient, -self.clipvalue, self.clipvalue)
        bound, squares = self.clipnorm, None
        if self.global_clipnorm is not None:
            bound, squares = self.global_clipnorm, model_gradient_squares()
        elif self.clipnorm_of == "occurrences" and tables is not None:
            squares = tables.occurrence_squares
        if bound is None:
            return gradient
        if squares is not None:
            squares = squares / scale**2
        elif tables is None:
            squares = jnp.sum(jnp.square(gradient))
        else:
            squares = tables.total(jnp.sum(jnp.square(gradient), axis=1))
        norms = jnp.sqrt(squares)
        factors = jnp.where(norms > bound, bound / norms, 1)
        if factors.ndim and tables is not None:
            factors = tables.per_row(factors)[:, None]
        return gradient * factors


def with_norm_of_arrays(
    rule: optax.GradientTransformation, gradient_steps: int
) -> optax.GradientTransformation:
    """Gives a rule the norm of all its dense arrays, unless a model provides a norm.

    A model's norm covers the gradients of one step. A rule that is applied to the mean
    gradient of several steps therefore uses the norm of its own arrays.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        is_known = gradient_steps == 1 and model_gradient_squares() is not None
        if is_known or is_in_layer():
            return rule.update(updates, state, params)
        arrays = [jnp.asarray(x, jnp.float32) for x in jax.tree.leaves(updates)]
        squares = sum((jnp.sum(jnp.square(x)) for x in arrays), jnp.zeros(()))
        with model_gradient_context(lambda: squares):
            return rule.update(updates, state, params)

    return optax.GradientTransformation(rule.init, update)


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
