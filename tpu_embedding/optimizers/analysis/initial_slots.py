"""Finds the slot variables that start with one number in all elements.

Most do: with zero, or with the rule's initial accumulator. Such a slot variable can be
filled in the form in which it is stored. Any other initial value is computed for all
rows first, and takes the memory of the slot variable once more.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from tpu_embedding.optimizers.analysis.operations import facts_of
from tpu_embedding.optimizers.analysis.rule_program import (
    Constant,
    RuleOperation,
    RuleProgram,
    depends_on_rows,
)
from tpu_embedding.optimizers.analysis.trace import (
    Rule,
    UntraceableRule,
    trace_rule,
)
from tpu_embedding.optimizers.analysis.walker import all_operations, walk


@functools.lru_cache(maxsize=4096)
def constant_parts(optimizer: Rule, dim: int) -> tuple[np.ndarray | None, ...] | None:
    """Finds the parts of the initial state that have one value in all elements.

    Args:
      optimizer: transformation of float32 rows `[rows, dim]`.
      dim: columns of the table.

    Returns:
      For each leaf of the state, the value as an array without axes; None for a leaf
      whose elements may differ. None in place of all leaves: nothing is known.

    Example:
      >>> import optax
      >>> [float(x) for x in constant_parts(optax.scale_by_rss(0.1), 8)]
      [0.10000000149011612]
    """
    trace = trace_rule(optimizer, (dim,))
    if isinstance(trace, UntraceableRule) or _counts_rows(trace.init):
        return None
    # None stands for a value whose elements may differ, or are not known.
    inputs = [None] * len(trace.init.inputs)
    return tuple(map(_as_constant, walk(trace.init, inputs, _step)))


@functools.lru_cache(maxsize=4096)
def initial_slot_values(optimizer: Rule, dim: int) -> tuple[float | None, ...]:
    """Finds the value that slot variables hold before the first step.

    Values that the program of `init` does not show are computed, for a few rows.

    Args:
      optimizer: transformation of float32 rows `[rows, dim]`.
      dim: columns of the table.

    Returns:
      For each slot variable, in the order of the state's leaves, the value of all its
      elements; None if they may differ. An empty tuple: nothing is known.
    """
    trace = trace_rule(optimizer, (dim,))
    if isinstance(trace, UntraceableRule):
        return ()
    is_slot = [depends_on_rows(leaf.shape) for leaf in trace.old_state]
    values = constant_parts(optimizer, dim) or [None] * len(is_slot)
    slots = [value for value, of_rows in zip(values, is_slot, strict=True) if of_rows]
    computed = [None] * len(slots)
    if any(value is None for value in slots):
        computed = _computed_slot_values(optimizer, dim, is_slot)
    return tuple(
        other if value is None else float(value)
        for value, other in zip(slots, computed, strict=True)
    )


def _computed_slot_values(
    optimizer: Rule, dim: int, is_slot: Sequence[bool]
) -> list[float | None]:
    """Returns the value of each slot variable that is one value for unequal rows."""
    rows = jnp.arange(5.0 * dim, dtype=jnp.float32).reshape(5, dim)
    # Another number of rows, too: a value may come from it.
    states = [jax.tree.leaves(optimizer.init(x)) for x in (rows, -rows[:3])]
    values = []
    for of_rows, *leaves in zip(is_slot, *states, strict=True):
        if of_rows:
            elements = np.concatenate([np.float64(leaf).ravel() for leaf in leaves])
            is_one = elements.size > 0 and bool(np.all(elements == elements[0]))
            values.append(float(elements[0]) if is_one else None)
    return values


def _step(operation: RuleOperation, values: list[Any]) -> Sequence[Any]:
    """Returns the value of all elements of the results, if there is one."""
    value = _as_constant(values[0]) if len(values) == 1 else None
    if value is not None and facts_of(operation).moves_elements:
        return [value]
    if value is not None and operation.name == "convert_element_type":
        # A literal may hold more digits than its type.
        value = value.astype(operation.inputs[0].dtype)
        return [value.astype(operation.params["new_dtype"])]
    return [None] * len(operation.outputs)


def _as_constant(value: Any) -> np.ndarray | None:
    if value is None or isinstance(value, jax.core.Tracer) or np.ndim(value) > 0:
        return None
    dtype = jnp.result_type(value)
    is_number = jnp.issubdtype(dtype, np.number) or dtype == np.bool_
    return np.asarray(value) if is_number else None


def _counts_rows(program: RuleProgram) -> bool:
    """Returns whether a number in the program comes from the number of rows."""
    operands = [x for op in all_operations(program) for x in op.inputs]
    return any(
        isinstance(x, Constant) and x.is_row_count
        for x in (*operands, *program.outputs)
    )
