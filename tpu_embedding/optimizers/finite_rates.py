"""Tells before a step whether a learning rate would make rows NaN or infinite.

A rate may come from any schedule, or from the state of `optax.inject_hyperparams`. So
the rule runs on a few rows of ones: a rate that is not finite makes all of their
updates NaN or infinite. Only clipping of rows hides an infinite rate.
"""

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from tpu_embedding.optimizers.row_optimizer import RowOptimizer, row_optimizer_of
from tpu_embedding.optimizers.table_rows import (
    model_gradient_context,
    some_rows,
    table_rows_context,
)

_NUM_ROWS: Final = 3


def rates_are_finite(
    optimizer: optax.GradientTransformation | RowOptimizer,
    dim: int,
    state: Sequence[Any],
) -> Bool[Array, ""] | None:
    """Returns False if the next step has a learning rate that is NaN or infinite.

    Constants of the rule are not looked at: they are checked when it is made.

    Args:
      optimizer: the rule.
      dim: columns of the table.
      state: leaves of the state; those of slot variables may be anything.

    Returns:
      A bool scalar; None if the state holds no scalar, so that rates never change.

    Example:
      >>> rule = optax.sgd(lambda count: 0.1 / count)
      >>> [bool(rates_are_finite(rule, 8, [count])) for count in (0, 1)]
      [False, True]
    """
    optimizer = row_optimizer_of(optimizer)
    rows = jnp.ones((_NUM_ROWS, dim), jnp.float32)
    with (
        table_rows_context(some_rows(_NUM_ROWS)),
        model_gradient_context(lambda: jnp.ones(())),
    ):
        start, tree = jax.tree.flatten(optimizer.init(rows))
        is_scalar = [jnp.ndim(leaf) == 0 for leaf in start]
        if not any(is_scalar):
            return None
        leaves = [
            jnp.asarray(now) if is_now else leaf
            for leaf, now, is_now in zip(start, state, is_scalar, strict=True)
        ]
        updates, new_state = optimizer.update(rows, tree.unflatten(leaves), rows)
    new_leaves = zip(tree.flatten_up_to(new_state), is_scalar, strict=True)
    of_rows = [updates, *(leaf for leaf, is_now in new_leaves if not is_now)]
    return jnp.all(jnp.stack([jnp.any(jnp.isfinite(x)) for x in of_rows]))
