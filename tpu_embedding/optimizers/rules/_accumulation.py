"""Collects the gradients of several steps for dense arrays, outside of a layer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.table_rows import model_gradient_context


class AccumulationState(NamedTuple):
    """State of a rule that updates once in several steps.

    Attributes:
      step: int32, steps since the latest update.
      gradients: sum of the gradients of these steps.
      inner: state of the rule.
    """

    step: jax.Array
    gradients: Any
    inner: Any


def collect_gradients(
    rule: optax.GradientTransformation, gradient_steps: int
) -> optax.GradientTransformation:
    """Applies a rule once in several steps, to the mean of their gradients.

    The steps between return updates of 0.

    Args:
      rule: a transformation of this package.
      gradient_steps: number of steps; 1 leaves the rule as it is.
    """
    if gradient_steps == 1:
        return rule

    def init(params: Any) -> Any:
        return AccumulationState(
            step=jnp.zeros((), jnp.int32),
            gradients=jax.tree.map(jnp.zeros_like, params),
            inner=rule.init(params),
        )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        gradients = jax.tree.map(jnp.add, state.gradients, updates)

        def apply() -> tuple[Any, Any, Any]:
            mean = jax.tree.map(lambda x: x / gradient_steps, gradients)
            # The model's norm is that of one step's gradients, not of their mean.
            with model_gradient_context(None):
                updates, inner = rule.update(mean, state.inner, params)
            return updates, inner, jax.tree.map(jnp.zeros_like, gradients)

        def wait() -> tuple[Any, Any, Any]:
            shapes = jax.eval_shape(apply)[0]
            updates = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            return updates, state.inner, gradients

        is_due = state.step + 1 >= gradient_steps
        updates, inner, gradients = jax.lax.cond(is_due, apply, wait)
        step = jnp.where(is_due, 0, state.step + 1)
        return updates, AccumulationState(step, gradients, inner)

    return optax.GradientTransformation(init, update)
