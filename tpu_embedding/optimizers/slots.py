"""Finds which parts of an optimizer's state are slot variables, and their shapes.

An optimizer for tables is an optax `GradientTransformation` whose state may hold arrays
with one entry per row. They are found by asking for the state of tables of two sizes:
arrays whose shapes differ are slot variables. So any transformation will do, without
marks.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.row_optimizer import RowOptimizer
from tpu_embedding.optimizers.table_rows import some_rows, table_rows_context

_SIZES: Final = (5, 7)
"""Numbers of rows. No dim of a table in use is one of them by chance in both."""


def slot_row_shapes(
    optimizer: optax.GradientTransformation | RowOptimizer, row_shape: tuple[int, ...]
) -> Any:
    """Finds the slot variables of an optimizer.

    Args:
      optimizer: transformation of float32 rows `[rows, *row_shape]`.
      row_shape: the shape of one row, `(dim,)`.

    Returns:
      The state's pytree with, for each leaf that is a slot variable, the
      `jax.ShapeDtypeStruct` of one row of it (shape `(dim,)` or `()`), and None
      for every other leaf.

    Raises:
      ValueError: if a part of the state grows with the table in another way than one
        entry per row along the first axis.
    """

    def init(rows: Any) -> Any:
        with table_rows_context(some_rows(rows.shape[0])):
            return optimizer.init(rows)

    states = [
        jax.eval_shape(init, jax.ShapeDtypeStruct((size, *row_shape), jnp.float32))
        for size in _SIZES
    ]
    return jax.tree_util.tree_map_with_path(_slot_row_shape, *states)


def _slot_row_shape(
    path: Any, first: jax.ShapeDtypeStruct, second: jax.ShapeDtypeStruct
) -> jax.ShapeDtypeStruct | None:
    if first.shape == second.shape:
        return None
    is_by_row = (
        (first.shape[:1], second.shape[:1]) == tuple((size,) for size in _SIZES)
        and first.shape[1:] == second.shape[1:]
        and len(first.shape) <= 2
    )
    name = jax.tree_util.keystr(path)
    if not is_by_row:
        raise ValueError(
            "An optimizer's state must have one entry per row of the table along its "
            f"first axis, or not depend on the number of rows; the part {name} has "
            f"shape {first.shape} for a table of {_SIZES[0]} rows. Use a "
            "transformation that works row by row."
        )
    if not jnp.issubdtype(first.dtype, jnp.number):
        raise ValueError(
            "A slot variable must be of a float or integer type, because it is updated "
            f"by adding; the part {name} of the optimizer's state has dtype "
            f"{first.dtype}. Keep it as int8, say."
        )
    return jax.ShapeDtypeStruct(first.shape[1:], first.dtype)
