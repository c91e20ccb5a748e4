"""Keras' ways to scale and clip a gradient, for rows of tables and dense arrays."""

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
    """Bounds of gradients, of which at most one is given; see `adafactor`.

    Attributes:
      loss_scale_factor: the loss was multiplied by it; None: by 1.
      clipvalue: largest absolute value of an element; None: no bound.
      clipnorm: largest norm of an array, or of a table's gradient.
      global_clipnorm: largest norm of the gradients of the whole model.
      clipnorm_of: "occurrences" takes the norm of the gradients of all occurrences.
    """

    loss_scale_factor: Any
    clipvalue: Any
    clipnorm: Any
    global_clipnorm: Any
    clipnorm_of: ClipnormOf

    def __call__(self, gradient: jax.Array, tables: TableRows | None) -> jax.Array:
        """Unscales a gradient, and clips it.

        Args:
          gradient: `[rows, dim]` of some tables; or a dense array of any rank.
          tables: the tables of the rows; None for a dense array, which is whole.
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
    """Tells a rule the norm of all its dense arrays, if no model knows that of more.

    The model's norm is that of one step's gradients. So a rule that is given the mean
    of several steps takes the norm of its own arrays.
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
