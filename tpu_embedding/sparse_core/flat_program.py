"""The operations of a traced function, without calls, to be split and run in part."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

Name = int | np.ndarray
"""The number of a value of a program; of a literal, the value itself."""

_CALLS: Final = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
"""Operations that call a function, and the parameter that holds it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation, on values and literals of a program."""

    primitive: Any
    params: dict[str, Any]
    inputs: tuple[Name, ...]
    outputs: tuple[int, ...]

    @property
    def operands(self) -> set[int]:
        """The inputs that are no literals."""
        return {x for x in self.inputs if isinstance(x, int)}

    def run(self, values: dict[int, Any]) -> None:
        """Adds the results to the values, which are given by their numbers."""
        params = self.primitive.get_bind_params(self.params)
        inputs = [read(values, x) for x in self.inputs]
        results = self.primitive.bind(*inputs, **params)
        results = results if self.primitive.multiple_results else [results]
        values.update(zip(self.outputs, results, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlatProgram:
    """Operations in their order, and the values that they compute.

    Attributes:
      operations: the operations, without calls of functions.
      avals: shape and dtype of each value, by its number. The arguments come first.
      constants: the values that are known, by their numbers.
      outputs: the results.
    """

    operations: list[Operation]
    avals: list[Any]
    constants: dict[int, Any]
    outputs: list[Name]

    def needed(self, outputs: Iterable[Name]) -> list[Operation]:
        """Returns the operations that some values need, in their order."""
        wanted = {x for x in outputs if isinstance(x, int)}
        operations = []
        for operation in reversed(self.operations):
            if wanted & set(operation.outputs):
                wanted |= operation.operands
                operations.append(operation)
        return operations[::-1]

    def dependent(self, inputs: Iterable[int]) -> set[int]:
        """Returns some values, and all that are computed from them."""
        found = set(inputs)
        for operation in self.operations:
            if found & operation.operands:
                found.update(operation.outputs)
        return found


def flat_program(function: Callable[..., Any], *shapes: Any) -> FlatProgram:
    """Traces a function of arrays that returns a list of arrays.

    Example:
      >>> program = flat_program(lambda x: [2 * jax.nn.relu(x)], jax.numpy.ones(3))
      >>> [x.primitive.name for x in program.operations], program.outputs
      (['max', 'mul'], [2])
    """
    traced = jax.make_jaxpr(function)(*shapes)
    program = FlatProgram(operations=[], avals=[], constants={}, outputs=[])
    inputs = [_add_value(program, x.aval) for x in traced.jaxpr.invars]
    outputs = _add_operations(program, traced.jaxpr, traced.consts, inputs)
    program.outputs.extend(outputs)
    return program


def read(values: dict[int, Any], name: Name) -> Any:
    """Returns the value of a name."""
    return values[name] if isinstance(name, int) else name


def _add_operations(
    program: FlatProgram, jaxpr: Jaxpr, constants: Sequence[Any], inputs: Sequence[Name]
) -> list[Name]:
    """Adds the operations of a jaxpr, and returns its results."""
    names: dict[Any, Name] = dict(zip(jaxpr.invars, inputs, strict=True))
    for variable, value in zip(jaxpr.constvars, constants, strict=True):
        number = names[variable] = _add_value(program, variable.aval)
        program.constants[number] = value

    def name_of(atom: Any) -> Name:
        if isinstance(atom, Literal):
            return np.asarray(atom.val, atom.aval.dtype)
        return names[atom]

    for equation in jaxpr.eqns:
        given = [name_of(x) for x in equation.invars]
        called = equation.params.get(_CALLS.get(equation.primitive.name, ""))
        if called is None:
            results = [_add_value(program, x.aval) for x in equation.outvars]
            operation = Operation(
                primitive=equation.primitive,
                params=equation.params,
                inputs=tuple(given),
                outputs=tuple(results),
            )
            program.operations.append(operation)
        elif isinstance(called, ClosedJaxpr):
            results = _add_operations(program, called.jaxpr, called.consts, given)
        else:
            results = _add_operations(program, called, (), given)
        names.update(zip(equation.outvars, results, strict=True))
    return [name_of(x) for x in jaxpr.outvars]


def _add_value(program: FlatProgram, aval: Any) -> int:
    program.avals.append(aval)
    return len(program.avals) - 1
