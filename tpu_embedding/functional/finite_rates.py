"""Tells before a step whether the learning rates of all tables are finite."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from tpu_embedding.optimizers.probe import rates_are_finite
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.update.every_row import KeptGradientState
from tpu_embedding.update.lazy_update import values_of
from tpu_embedding.update.table_writer import RoundedState


@functools.partial(jax.jit, static_argnames="plan")
def finite_rates(slots: dict[str, Any], plan: EmbeddingPlan) -> Bool[Array, ""]:
    """Returns False if the next step has a learning rate that is NaN or infinite.

    `apply_gradients` leaves the rows of such a table as they are, and advances its step
    count. So ask before each step, as for `te.gradients.all_finite`.

    Args:
      slots: stack name to optimizer state, from `init_slots`.
      plan: plan of the layer.

    Example:
      >>> import optax
      >>> import tpu_embedding as te
      >>> rule = optax.sgd(lambda step: 0.1 / step)
      >>> table = te.TableConfig(
      ...     vocabulary_size=10, dim=4, name="movie", optimizer=rule)
      >>> plan = te.make_plan(te.FeatureConfig(table=table))
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> slots = te.functional.init_slots(tables, plan)
      >>> bool(te.functional.finite_rates(slots, plan))
      False
    """
    result = jnp.ones((), bool)
    for stack in plan.trained_stacks:
        state = slots[stack.name]
        while isinstance(state, RoundedState | KeptGradientState):
            state = state.inner
        is_finite = rates_are_finite(stack.optimizer, stack.dim, values_of(state))
        result &= True if is_finite is None else is_finite
    return result
