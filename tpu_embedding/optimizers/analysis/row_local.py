"""Checks that an optimizer rule treats each row of a table separately.

A table's gradient reaches its owner as `[rows, dim]` with the touched rows only, in
several pieces if ids are skewed. A rule is right on such pieces if it is row-local:
what it does to a row depends on that row of gradient, slot variables and table, and on
values that belong to no row. So each operation of the traced rule that sees rows must
be known to keep them apart.
"""

import functools
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from tpu_embedding.optimizers.analysis.operations import facts_of
from tpu_embedding.optimizers.analysis.rule_program import (
    Constant,
    Operand,
    RuleOperation,
    RuleProgram,
    depends_on_rows,
    is_by_row,
)
from tpu_embedding.optimizers.analysis.trace import (
    NotRowLocalError,
    Rule,
    TracedRule,
    UntraceableRule,
    trace_rule,
)
from tpu_embedding.optimizers.analysis.walker import all_operations
from tpu_embedding.optimizers.row_optimizer import RowOptimizer

_COLLECTS: Final = "collects gradients and applies them in some steps only"
_BOUND_TO_STEPS: Final = {
    "MultiStepsState": _COLLECTS,
    "ApplyEvery": _COLLECTS,
    "SAMState": _COLLECTS,
    # Its weight of an update falls with the step, whether the row was there or not.
    "ScheduleFreeState": "averages rows over all steps",
}
"""States of optax rules in which a row must take part in every step."""


@functools.lru_cache(maxsize=256)
def check_rows_apart(optimizer: RowOptimizer, dim: int) -> None:
    """Refuses a resolved optimizer that mixes rows; see `check_row_local`."""
    trace = _check(optimizer, (dim,))
    if optimizer.rows == "every":
        return
    for name in trace.state_types:
        if name in _BOUND_TO_STEPS:
            raise NotRowLocalError(
                f"The optimizer is not row-local in time: {name} "
                f"{_BOUND_TO_STEPS[name]}, but a row is updated in the steps that look "
                "it up. Use tpu_embedding.optimizers.every_row."
            )


@functools.lru_cache(maxsize=256)
def check_elementwise(optimizer: Rule) -> None:
    """Refuses an optimizer that mixes elements, of different rows or of one.

    Args:
      optimizer: an optax transformation.

    Raises:
      NotRowLocalError: naming the operation.
    """
    # Rows without columns are elements.
    _check(optimizer, ())


def _check(optimizer: Rule, row_shape: tuple[int, ...]) -> TracedRule:
    trace = trace_rule(optimizer, row_shape)
    shape = ", ".join(map(str, ("rows", *row_shape)))
    if isinstance(trace, UntraceableRule):
        raise NotRowLocalError(
            "The optimizer is not row-local: it cannot be applied to a single array "
            f"of shape [{shape}] by update(gradient, state, rows), without the loss or "
            f"other arguments; {trace.reason}{_way_out(trace)}"
        ) from trace.error
    for part, program in (("init", trace.init), ("update", trace.update)):
        for operation in _mixing_operations(program):
            raise NotRowLocalError(
                f"The optimizer is not row-local: its {part} has the operation "
                f"{operation.name!r}, which {_fault_and_way_out(operation)}, or apply "
                "this one to the dense parameters only."
            )
    if not trace.returns_rows:
        raise NotRowLocalError(
            "The optimizer is not row-local: its update of a single array of shape "
            f"[{shape}] does not return one array of that shape."
        )
    return trace


def _way_out(trace: UntraceableRule) -> str:
    """Returns what to do about a learning rate that is a function without arguments."""
    if "takes 0 positional arguments" not in trace.reason:
        return ""
    return (
        ". A schedule is a function of the step, counted from 0; for a function "
        "without arguments, see te.nn.set_each_step"
    )


def _fault_and_way_out(operation: RuleOperation) -> str:
    """Returns what is wrong with an operation that mixes rows, and what to do."""
    are_there = "only the rows of this step's ids, spread over shards, are there"
    if any(isinstance(x, Constant) and x.is_row_count for x in operation.inputs):
        return (
            "divides by the number of rows, or computes with it in another way, but "
            f"{are_there}. Means over rows, as of optax.clip_by_block_rms, do this. "
            "Use sums: clip_by_block_rms(c) of a table is "
            "optax.clip_by_global_norm(c * math.sqrt(vocabulary_size * dim))"
        )
    return (
        f"mixes rows of a table, but {are_there}. Global norms, trust ratios, factored "
        "moments, noise and counts of finite values do this. Use transformations that "
        "treat each row separately"
    )


def _mixing_operations(program: RuleProgram) -> Iterator[RuleOperation]:
    return (x for x in all_operations(program) if not _keeps_rows(x))


def _keeps_rows(operation: RuleOperation) -> bool:
    facts = facts_of(operation)
    if any(map(_is_of_shard, operation.inputs)):
        return False
    if facts.gives_totals or facts.call is not None:
        return True
    if not _sees_rows(operation.inputs):
        # A value for all rows is fine. Numbers by position are not, because positions
        # depend on shards and rounds.
        return not _sees_rows(operation.outputs) or facts.makes_rows(operation)
    return (
        all(is_by_row(x.shape) for x in operation.outputs)
        and all(is_by_row(x.shape) for x in operation.inputs if _sees_rows([x]))
        and facts.keeps_rows(operation)
    )


def _sees_rows(operands: Any) -> bool:
    return any(depends_on_rows(operand.shape) for operand in operands)


def _is_of_shard(operand: Operand) -> bool:
    """Returns whether a constant comes from the rows at hand, not from the table.

    Such are the number of rows, and numbers by the position of a row.
    """
    if not isinstance(operand, Constant):
        return False
    if not depends_on_rows(operand.shape):
        return operand.is_row_count
    value = np.asarray(operand.value)
    return not is_by_row(operand.shape) or bool((value != value[:1]).any())
