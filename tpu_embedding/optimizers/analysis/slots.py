"""Which parts of an optimizer's state are slot variables, and what shape they have.

An optimizer for tables is an optax `GradientTransformation` whose state may hold arrays
with one entry per row. They are found by asking for the state of tables of two sizes
and seeing which shapes differ: that works for any transformation, without marks.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.analysis.row_local import unknown_rows
from tpu_embedding.optimizers.row_optimizer import RowOptimizer
from tpu_embedding.optimizers.table_rows import table_rows_context

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
    return slot_shapes(optimizer, (dim,))


def slot_shapes(
    optimizer: optax.GradientTransformation | RowOptimizer, row_shape: tuple[int, ...]
) -> Any:
    """As `slot_row_shapes`, for a table whose rows have any shape."""

    def state_of(num_rows: int) -> Any:
        table = jax.ShapeDtypeStruct((num_rows, *row_shape), jnp.float32)
        with table_rows_context(unknown_rows(num_rows)):
            return jax.eval_shape(optimizer.init, table)

    return jax.tree_util.tree_map_with_path(
        _slot_row_shape, *(state_of(num_rows) for num_rows in _PROBE_ROWS)
    )


@functools.lru_cache(maxsize=4096)
def moved_by_adding(
    optimizer: optax.GradientTransformation | RowOptimizer, dim: int
) -> tuple[bool, ...]:
    """Finds the parts of the state that an update moves by adding to them.

    For `new = old + x`, and `new = b * old + x` with b from 1/2 to 1, the difference
    `new - old` added to `old` gives `new` to the precision that the rule itself has.
    Another rule may forget `old`, and a difference then loses a small `new`.

    Args:
      optimizer: transformation of float32 rows `[rows, dim]`.
      dim: columns of the table.

    Returns:
      For each leaf of the state, whether that is so; False where it is not known.
    """
    rows = jax.ShapeDtypeStruct((_PROBE_ROWS[0], dim), jnp.float32)
    with table_rows_context(unknown_rows(_PROBE_ROWS[0])):
        state = jax.eval_shape(optimizer.init, rows)
        jaxpr = jax.make_jaxpr(optimizer.update)(rows, state, rows).jaxpr
    num_leaves = len(jax.tree.leaves(state))
    made_by: dict[Any, Any] = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    old = jaxpr.invars[1 : 1 + num_leaves]
    new = jaxpr.outvars[len(jaxpr.outvars) - num_leaves :]
    return tuple(
        _is_sum_with(
            before, None if hasattr(after, "val") else made_by.get(after), made_by
        )
        for before, after in zip(old, new, strict=True)
    )


def _is_sum_with(old: Any, equation: Any, made_by: dict[Any, Any]) -> bool:
    if equation is None or equation.primitive.name not in ("add", "add_any"):
        return False
    return any(
        term is old or _is_most_of(old, made_by.get(term))
        for term in equation.invars
        if not hasattr(term, "val")
    )


def _is_most_of(old: Any, equation: Any) -> bool:
    if equation is None or equation.primitive.name != "mul":
        return False
    factors = [v.val for v in equation.invars if hasattr(v, "val")]
    has_old = any(v is old for v in equation.invars)
    return has_old and len(factors) == 1 and bool(0.5 <= factors[0] <= 1)


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
