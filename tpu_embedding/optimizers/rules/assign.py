"""Assignment: rows are set instead of trained."""

from typing import Any

import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.equal_calls import equal_calls_are_one
from tpu_embedding.optimizers.row_optimizer import declare


@equal_calls_are_one
def assign() -> optax.GradientTransformation:
    """Makes the optimizer that sets each touched row to its gradient.

    For a row `w` with the summed gradient `g`::

        w = g

    The sum is over samples, features and devices. A row with gradient 0 becomes 0. A
    row that the step does not look up stays. There are no slot variables and no
    learning rate.

    Source: `AssignParameters` of TensorFlow's `optimization_parameters.proto`. Under
    `in_sequence` the last occurrence of an id wins; TensorFlow promises no order. optax
    has no such transformation.

    The layer clears a row before it adds `g`. So the row equals `g`, also if it was NaN
    or infinite. Outside of a layer, `g - w` is added, as optax does.

    Example:
      >>> optimizer = assign()
      >>> rows = jnp.ones((1, 2))
      >>> updates, _ = optimizer.update(5.0 * rows, optimizer.init(rows), rows)
      >>> (rows + updates).tolist()
      [[5.0, 5.0]]
    """

    def replace(gradient: Any, row: Any) -> Any:
        return jnp.subtract(gradient, row)

    return declare(optax.stateless_with_tree_map(replace), sets_rows=True)
