"""Which parts of an optimizer's state are slot variables, and what shape they have.

An optimizer for tables is an optax `GradientTransformation` whose state may hold arrays
with one entry per row. They are found by asking for the state of tables of two sizes
and seeing which shapes differ: that works for any transformation, without marks.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.row_optimizer import RowOptimizer

# Two numbers of rows that no hyper-parameter and no dim is likely to equal.
_PROBE_ROWS = (1_000_003, 1_000_033)


def slot_row_shapes(
    optimizer: optax.GradientTransformation | RowOptimizer, dim: int
) -> Any:
    """Finds the slot variables of an optimizer.

    Args:
      optimizer: transformation of float32 rows `[rows, dim]`.
      dim: columns of the table.

    Returns:
      The state's pytree with, for each leaf that is a slot variable, the
      `jax.ShapeDtypeStruct` of one row of it (shape `(dim,)` or `()`), and None
      for every other leaf.

    Raises:
      ValueError: if a part of the state grows with the table in another way than one
        entry per row along the first axis.
    """

    def state_of(num_rows: int) -> Any:
        table = jax.ShapeDtypeStruct((num_rows, dim), jnp.float32)
        return jax.eval_shape(optimizer.init, table)

    return jax.tree_util.tree_map_with_path(
        _slot_row_shape, *(state_of(num_rows) for num_rows in _PROBE_ROWS)
    )


def _slot_row_shape(path, first, second) -> jax.ShapeDtypeStruct | None:
    if first.shape == second.shape:
        return None
    is_by_row = (
        first.shape[:1] == _PROBE_ROWS[:1]
        and first.shape[1:] == second.shape[1:]
        and len(first.shape) <= 2
    )
    if is_by_row and not _can_be_added_to(first.dtype):
        raise ValueError(
            "A slot variable must be of a float or integer type, because it is updated "
            f"by adding; the part {jax.tree_util.keystr(path)} of the optimizer's "
            f"state has dtype {first.dtype}. Keep it as int8, say."
        )
    if not is_by_row:
        raise ValueError(
            "An optimizer's state must have one entry per row of the table along its "
            "first axis, or not depend on the number of rows; the part "
            f"{jax.tree_util.keystr(path)} has shape {first.shape} for a table of "
            f"{_PROBE_ROWS[0]} rows. Use a transformation that works row by row."
        )
    return jax.ShapeDtypeStruct(first.shape[1:], first.dtype)


def _can_be_added_to(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
