"""The rule that writes instead of learning."""

from typing import Any

import jax.numpy as jnp
import optax


def assign() -> optax.GradientTransformation:
    """Sets each looked-up row to its gradient: `w = g`.

    So the row becomes the sum of the gradients of its ids in the step, over samples,
    features and devices; a row whose gradient is 0 becomes 0, one that was not looked
    up stays. No slot variables and no learning rate. TensorFlow: `AssignParameters` of
    the TPU embeddings' protocol buffer. Under `in_sequence` the last occurrence of an
    id wins, where TensorFlow promises none.

    Rows are updated by adding `g - w`, so they equal g to within the float32 rounding
    of the larger of g and the old row.

    Example:
      >>> optimizer = assign()
      >>> rows = jnp.ones((1, 2))
      >>> updates, _ = optimizer.update(5.0 * rows, optimizer.init(rows), rows)
      >>> (rows + updates).tolist()
      [[5.0, 5.0]]
    """

    def replace(gradient: Any, row: Any) -> Any:
        return jnp.subtract(gradient, row)

    return optax.stateless_with_tree_map(replace)
