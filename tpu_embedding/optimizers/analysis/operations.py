"""The table of operations: what each does with rows.

`OPERATIONS` names each JAX primitive that may occur in a row-local rule. An operation
that is not in it is taken to mix rows.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Final, Literal

from tpu_embedding.optimizers.analysis.rule_program import (
    ROWS,
    RuleOperation,
    depends_on_rows,
    is_by_row,
)

Call = Literal["inline", "cond", "while"]
"""The way in which an operation calls programs.

"inline": one program, with the operands of the operation. "cond": one of several, with
all operands but the first. "while": a condition and a body, until the condition fails.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationFacts:
    """The facts about one kind of operation.

    Attributes:
      keeps_rows: function of an operation. It returns True if row `i` of each result
        depends only on row `i` of the operands. Rows must be the first axis of every
        array that has rows.
      makes_rows: function of an operation whose operands have no rows. It returns True
        if all rows of the result are equal, as those of a broadcast are.
      is_elementwise: True if each element of the result depends only on the elements
        at the same place in the operands.
      moves_elements: True if the results hold elements of the first operand, unchanged.
      call: kind of call, for an operation that runs other programs; else None.
      gives_totals: True if the results are totals over all rows of a table, which the
        layer computes.
      neutral: element that leaves a reduction unchanged, such as 0 for a sum. None if
        the reduction cannot become a total over the table.
    """

    keeps_rows: Callable[[RuleOperation], bool]
    makes_rows: Callable[[RuleOperation], bool] = lambda operation: False
    is_elementwise: bool = False
    moves_elements: bool = False
    call: Call | None = None
    gives_totals: bool = False
    neutral: Any = None


def facts_of(operation: RuleOperation) -> OperationFacts:
    """Returns the facts about an operation; an unknown one is taken to mix rows."""
    return OPERATIONS.get(operation.name, _UNKNOWN)


def _always(operation: RuleOperation) -> bool:
    del operation
    return True


def _never(operation: RuleOperation) -> bool:
    del operation
    return False


def _without_row_count(operation: RuleOperation) -> bool:
    return not depends_on_rows(tuple(operation.params.values()))


def _not_along_rows(parameter: str) -> Callable[[RuleOperation], bool]:
    """Returns a `keeps_rows`: True if the axes of a parameter leave out the rows."""

    def keeps_rows(operation: RuleOperation) -> bool:
        axes = operation.params[parameter]
        return 0 not in axes if isinstance(axes, tuple) else axes != 0

    return keeps_rows


def _starts_with_rows(parameter: str) -> Callable[[RuleOperation], bool]:
    """Returns a `keeps_rows`: True if the parameter lists axis 0, the rows, first."""
    return lambda operation: operation.params[parameter][:1] == (0,)


def _slice_keeps_rows(operation: RuleOperation) -> bool:
    strides = operation.params["strides"] or (1,)
    return operation.params["limit_indices"][0] == ROWS and strides[0] == 1


def _pad_keeps_rows(operation: RuleOperation) -> bool:
    return operation.params["padding_config"][0] == (0, 0, 0)


def _dot_keeps_rows(operation: RuleOperation) -> bool:
    contracted, batched = operation.params["dimension_numbers"]
    left, right = (operand.shape for operand in operation.inputs)
    if depends_on_rows(left) and depends_on_rows(right):
        return batched[0][:1] == (0,) == batched[1][:1]
    return is_by_row(left) and 0 not in contracted[0] and not batched[0]


_UNKNOWN: Final = OperationFacts(keeps_rows=_never)

_ELEMENTWISE: Final = """abs acos acosh add add_any and asin asinh atan atan2 atanh
    bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil clamp clz conj
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2
    expm1 floor ge gt igamma imag integer_pow is_finite le lgamma log log1p logistic lt
    max min mul ne neg nextafter not optimization_barrier or polygamma population_count
    pow pvary real reduce_precision regularized_incomplete_beta rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor zeta""".split()


def _elementwise(name: str) -> OperationFacts:
    return OperationFacts(
        keeps_rows=_without_row_count,
        is_elementwise=True,
        moves_elements=name == "copy",
    )


_NEUTRAL: Final = {"reduce_sum": 0, "reduce_and": True, "reduce_or": False}


def _reduction(name: str) -> OperationFacts:
    return OperationFacts(
        keeps_rows=_not_along_rows("axes"),
        neutral=_NEUTRAL.get(name),
        moves_elements=name in ("reduce_max", "reduce_min", "reduce_and", "reduce_or"),
    )


_REDUCTIONS: Final = """argmax argmin reduce_and reduce_max reduce_min reduce_or
    reduce_prod reduce_sum reduce_xor""".split()
_CUMULATIVE: Final = "cumlogsumexp cummax cummin cumprod cumsum".split()
_INLINED: Final = """checkpoint closed_call core_call custom_jvp_call
    custom_jvp_call_jaxpr custom_vjp_call custom_vjp_call_jaxpr jit pjit remat
    remat2""".split()

OPERATIONS: Final[dict[str, OperationFacts]] = {
    **{name: _elementwise(name) for name in _ELEMENTWISE},
    **{name: _reduction(name) for name in _REDUCTIONS},
    **{
        name: OperationFacts(keeps_rows=_not_along_rows("axis"))
        for name in [*_CUMULATIVE, "split", "stack"]
    },
    **{
        name: OperationFacts(keeps_rows=_not_along_rows("dimension"))
        for name in ("concatenate", "sort")
    },
    **{name: OperationFacts(keeps_rows=_always, call="inline") for name in _INLINED},
    "cond": OperationFacts(keeps_rows=_always, call="cond"),
    "while": OperationFacts(keeps_rows=_always, call="while"),
    "broadcast_in_dim": OperationFacts(
        keeps_rows=_starts_with_rows("broadcast_dimensions"),
        makes_rows=_always,
        moves_elements=True,
    ),
    "dot_general": OperationFacts(keeps_rows=_dot_keeps_rows),
    "expand_dims": OperationFacts(keeps_rows=_always, moves_elements=True),
    "iota": OperationFacts(keeps_rows=_never, makes_rows=_not_along_rows("dimension")),
    "pad": OperationFacts(keeps_rows=_pad_keeps_rows),
    "reshape": OperationFacts(keeps_rows=_always, moves_elements=True),
    "rev": OperationFacts(keeps_rows=_not_along_rows("dimensions")),
    "slice": OperationFacts(keeps_rows=_slice_keeps_rows),
    "squeeze": OperationFacts(keeps_rows=_always, moves_elements=True),
    "top_k": OperationFacts(keeps_rows=_always),
    "table_total": OperationFacts(keeps_rows=_always, gives_totals=True),
    "transpose": OperationFacts(
        keeps_rows=_starts_with_rows("permutation"), moves_elements=True
    ),
}
