"""Finds out before a step whether a learning rate would make rows NaN or infinite.

A rate may come from any schedule, or from the state of `optax.inject_hyperparams`. So
the traced rule is followed, not the rate. Values that belong to no row are computed.
For values of rows it is only known whether such a scalar has reached them.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from tpu_embedding.optimizers.analysis.rule_program import (
    Constant,
    Operand,
    RuleOperation,
    depends_on_rows,
)
from tpu_embedding.optimizers.analysis.trace import UntraceableRule, trace_rule
from tpu_embedding.optimizers.analysis.walker import walk
from tpu_embedding.optimizers.row_optimizer import RowOptimizer

_BOUNDS: Final = frozenset(("max", "min", "clamp"))
"""Operations for which infinity means no bound."""


class _OfRows(NamedTuple):
    """Stands for a value of rows.

    Attributes:
      is_bad: True if a scalar that is not finite has reached it; a traced bool, or
        False if no scalar of the step has.
    """

    is_bad: Any


def rates_are_finite(
    optimizer: optax.GradientTransformation | RowOptimizer,
    dim: int,
    state: Sequence[Any],
) -> Bool[Array, ""] | None:
    """Returns False if the next step multiplies rows by a number that is not finite.

    Constants of the rule are not looked at: they are checked when it is made.

    Args:
      optimizer: the rule.
      dim: columns of the table.
      state: leaves of the state; those of slot variables may be anything.

    Returns:
      A bool scalar; None if the rule's numbers never change, or it is not traceable.

    Example:
      >>> rule = optax.sgd(lambda count: 0.1 / count)
      >>> [bool(rates_are_finite(rule, 8, [count])) for count in (0, 1)]
      [False, True]
    """
    trace = trace_rule(optimizer, (dim,))
    if isinstance(trace, UntraceableRule):
        return None
    of_rows = _OfRows(False)
    leaves = [
        of_rows if depends_on_rows(old.shape) else leaf
        for old, leaf in zip(trace.old_state, state, strict=True)
    ]
    facts = [of_rows] * len(trace.row_facts)
    outputs = walk(trace.update, [of_rows, *leaves, of_rows, *facts], _step)
    known = [x.is_bad for x in outputs if isinstance(x, _OfRows)]
    known = [x for x in known if x is not False]
    return ~jnp.any(jnp.stack(known)) if known else None


def _step(operation: RuleOperation, inputs: list[Any]) -> Sequence[Any]:
    """Computes an operation on scalars; notes what reaches the results of any other."""
    operands = (*operation.inputs, *operation.outputs)
    is_of_rows = any(depends_on_rows(x.shape) for x in operands)
    if not is_of_rows and not any(isinstance(x, _OfRows) for x in inputs):
        return operation.bind(inputs)
    if operation.name == "broadcast_in_dim" and not isinstance(inputs[0], _OfRows):
        return inputs[:1]
    is_bad = [
        _is_bad(operation, *pair) for pair in zip(inputs, operation.inputs, strict=True)
    ]
    if operation.name == "select_n" and not isinstance(inputs[0], _OfRows):
        chosen = jnp.stack([jnp.asarray(x) for x in is_bad[1:]])
        return [_OfRows(chosen[jnp.asarray(inputs[0], jnp.int32)])]
    found = [x for x in is_bad if x is not False]
    reached = jnp.any(jnp.stack(found)) if found else False
    return [_OfRows(reached)] * len(operation.outputs)


def _is_bad(operation: RuleOperation, value: Any, operand: Operand) -> Any:
    """Returns whether an operand brings a number that is not finite to rows."""
    if isinstance(value, _OfRows):
        return value.is_bad
    is_arithmetic = operation.name in ("mul", "div", "add", "sub", "select_n", *_BOUNDS)
    if isinstance(operand, Constant) or not is_arithmetic:
        return False
    value = jnp.asarray(value)
    if value.ndim or not jnp.issubdtype(value.dtype, jnp.floating):
        return False
    return jnp.isnan(value) if operation.name in _BOUNDS else ~jnp.isfinite(value)
