"""Finds which parts of an optimizer's state are slot variables, and their shapes.

An optimizer for tables is an optax `GradientTransformation` whose state may hold arrays
with one entry per row. They are found by asking for the state of tables of two sizes:
arrays whose shapes differ are slot variables. So any transformation will do, without
marks.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.analysis.rule_program import (
    ROWS,
    Constant,
    Operand,
    RowsDimension,
    RuleOperation,
)
from tpu_embedding.optimizers.analysis.trace import (
    UntraceableRule,
    states_of_sizes,
    trace_rule,
)
from tpu_embedding.optimizers.row_optimizer import RowOptimizer


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
    return jax.tree_util.tree_map_with_path(
        _slot_row_shape, *states_of_sizes(optimizer, row_shape)
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

    Raises:
      ValueError: if the rule cannot be traced.
    """
    trace = trace_rule(optimizer, (dim,))
    if isinstance(trace, UntraceableRule):
        raise ValueError(
            f"The optimizer cannot be traced: {trace.reason}"
        ) from trace.error
    made_by: dict[Operand, RuleOperation] = {
        out: op for op in trace.update.operations for out in op.outputs
    }
    return tuple(
        _is_sum_with(before, made_by.get(after), made_by)
        for before, after in zip(trace.old_state, trace.update.outputs[1:], strict=True)
    )


@functools.lru_cache(maxsize=4096)
def sets_rows(optimizer: optax.GradientTransformation | RowOptimizer, dim: int) -> bool:
    """Returns True if a rule sets rows without reading them, as `w += g - w` does.

    Args:
      optimizer: transformation of float32 rows `[rows, dim]`.
      dim: columns of the table.
    """
    trace = trace_rule(optimizer, (dim,))
    if isinstance(trace, UntraceableRule):
        return False
    row = trace.update.inputs[1 + len(trace.state_names)]
    readers = [op for op in trace.update.operations if row in op.inputs]
    return (
        len(readers) == 1
        and readers[0].name == "sub"
        and readers[0].inputs[0] is not row
        and trace.update.outputs[0] is readers[0].outputs[0]
    )


def _is_sum_with(
    old: Operand, operation: RuleOperation | None, made_by: dict[Operand, RuleOperation]
) -> bool:
    if operation is None or operation.name not in ("add", "add_any"):
        return False
    return any(
        term is old or _is_most_of(old, made_by.get(term)) for term in operation.inputs
    )


def _is_most_of(old: Operand, operation: RuleOperation | None) -> bool:
    if operation is None or operation.name != "mul":
        return False
    factors = [
        x.value for x in operation.inputs if isinstance(x, Constant) and x.is_literal
    ]
    has_old = any(x is old for x in operation.inputs)
    return has_old and len(factors) == 1 and bool(0.5 <= factors[0] <= 1)


def _slot_row_shape(
    path: Any, first: jax.ShapeDtypeStruct, second: jax.ShapeDtypeStruct
) -> jax.ShapeDtypeStruct | None:
    if first.shape == second.shape:
        return None
    rows = RowsDimension((first.shape[0], second.shape[0]))
    is_by_row = (
        rows == ROWS and first.shape[1:] == second.shape[1:] and len(first.shape) <= 2
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
            f"{ROWS.sizes[0]} rows. Use a transformation that works row by row."
        )
    return jax.ShapeDtypeStruct(first.shape[1:], first.dtype)


def _can_be_added_to(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
