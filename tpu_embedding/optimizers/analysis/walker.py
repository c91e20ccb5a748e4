"""Goes through programs of rules, and through those that they call.

All analyses of this folder use it: `all_operations` to look at each operation,
`walk` to follow values through a program or to run it, `same_program` to compare two.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tpu_embedding.optimizers.analysis.operations import facts_of
from tpu_embedding.optimizers.analysis.rule_program import (
    Constant,
    Operand,
    RuleOperation,
    RuleProgram,
    Shape,
    Variable,
    same_constant,
    same_parameter,
)

Step = Callable[[RuleOperation, list[Any]], Sequence[Any]]
"""Given an operation and the values of its operands: the values of its results."""

SameShape = Callable[[Shape, Shape], bool]


def called_programs(operation: RuleOperation) -> tuple[tuple[RuleProgram, slice], ...]:
    """Returns the programs that an operation calls, and the operands of each.

    Other programs among the parameters, such as the body of a scan, are not of it:
    nothing is known about when and with what they run.
    """
    params = operation.params
    match facts_of(operation).call:
        case "inline":
            programs = [x for x in params.values() if isinstance(x, RuleProgram)]
            size = len(operation.inputs)
            return tuple((x, slice(None)) for x in programs if len(x.inputs) == size)
        case "cond":
            return tuple((branch, slice(1, None)) for branch in params["branches"])
        case "while":
            body_start = params["cond_nconsts"]
            # The operands of the condition are not contiguous; none is given.
            condition = (params["cond_jaxpr"], slice(0, 0))
            return condition, (params["body_jaxpr"], slice(body_start, None))
        case _:
            return ()


def inlined_program(operation: RuleOperation) -> RuleProgram | None:
    """Returns the program that an operation stands for, if it is a plain call."""
    if facts_of(operation).call != "inline":
        return None
    programs = called_programs(operation)
    return programs[0][0] if len(programs) == 1 else None


def all_operations(program: RuleProgram) -> Iterator[RuleOperation]:
    """Yields each operation of a program, followed by those that it calls."""
    for operation in program.operations:
        yield operation
        for called, _ in called_programs(operation):
            yield from all_operations(called)


def walk(program: RuleProgram, inputs: Sequence[Any], step: Step) -> list[Any]:
    """Follows values through a program, and through the programs that it inlines.

    Args:
      program: the program.
      inputs: a value for each input: an array, or what an analysis knows of it.
      step: the values of an operation's results.

    Returns:
      The values of the outputs. Those of constants are the constants.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from tpu_embedding.optimizers.analysis.rule_program import read_program
      >>> program = read_program(jax.make_jaxpr(lambda x: -jnp.sin(x))(0.0))
      >>> walk(program, ["x"], lambda operation, values: [(operation.name, *values)])
      [('neg', ('sin', 'x'))]
    """
    known: dict[Operand, Any] = dict(zip(program.inputs, inputs, strict=True))

    def value(operand: Operand) -> Any:
        return operand.value if isinstance(operand, Constant) else known[operand]

    for operation in program.operations:
        values = [value(operand) for operand in operation.inputs]
        called = inlined_program(operation)
        results = (
            step(operation, values) if called is None else walk(called, values, step)
        )
        known.update(zip(operation.outputs, results, strict=True))
    return [value(operand) for operand in program.outputs]


def same_program(
    first: RuleProgram, second: RuleProgram, same_shape: SameShape = tuple.__eq__
) -> bool:
    """Returns whether two programs are the same, operation by operation.

    Args:
      first: a program.
      second: another.
      same_shape: compares the shapes of values, and tuples among the parameters.
    """
    return _Comparison(same_shape).of_programs(first, second)


class _Comparison:
    """Two programs, and the variables of one that stand for those of the other."""

    def __init__(self, same_shape: SameShape):
        self._same_shape = same_shape
        self._partners: dict[Variable, Variable] = {}

    def of_programs(self, first: RuleProgram, second: RuleProgram) -> bool:
        return (
            len(first.operations) == len(second.operations)
            and self._pair(first.inputs, second.inputs)
            and all(map(self._same_operation, first.operations, second.operations))
            and self._same_operands(first.outputs, second.outputs)
        )

    def _same_operation(self, first: RuleOperation, second: RuleOperation) -> bool:
        return (
            first.name == second.name
            and self._same_operands(first.inputs, second.inputs)
            and self._same_params(first, second)
            and self._pair(first.outputs, second.outputs)
        )

    def _pair(self, first: tuple[Variable, ...], second: tuple[Variable, ...]) -> bool:
        self._partners.update(zip(first, second, strict=False))
        return len(first) == len(second) and all(map(self._same_type, first, second))

    def _same_type(self, first: Operand, second: Operand) -> bool:
        return first.dtype == second.dtype and self._same_shape(
            first.shape, second.shape
        )

    def _same_operands(
        self, first: tuple[Operand, ...], second: tuple[Operand, ...]
    ) -> bool:
        return len(first) == len(second) and all(map(self._same_operand, first, second))

    def _same_operand(self, first: Operand, second: Operand) -> bool:
        if isinstance(first, Variable) or isinstance(second, Variable):
            return isinstance(first, Variable) and self._partners[first] is second
        return (
            self._same_type(first, second)
            and first.is_row_count == second.is_row_count
            and same_constant(first.value, second.value)
        )

    def _same_params(self, first: RuleOperation, second: RuleOperation) -> bool:
        names = first.params.keys() | second.params.keys()
        if facts_of(first).call == "inline":
            # The others are for derivatives, which nobody takes of a rule.
            names = {x for x in names if isinstance(first.params.get(x), RuleProgram)}
        return all(
            name in first.params
            and name in second.params
            and self._same_param(first.params[name], second.params[name])
            for name in names
        )

    def _same_param(self, first: Any, second: Any) -> bool:
        if isinstance(first, RuleProgram) and isinstance(second, RuleProgram):
            return self.of_programs(first, second)
        if isinstance(first, dict) and isinstance(second, dict):
            return first.keys() == second.keys() and all(
                self._same_param(first[name], second[name]) for name in first
            )
        if isinstance(first, tuple) and isinstance(second, tuple):
            return self._same_shape(first, second) or (
                len(first) == len(second) and all(map(self._same_param, first, second))
            )
        return same_parameter(first, second)
