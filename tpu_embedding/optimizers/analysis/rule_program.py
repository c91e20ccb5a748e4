"""Programs of optimizer rules, in which the number of rows is a symbol.

A rule is traced for tables of two sizes. `read_program` reads both jaxprs side by side
into one `RuleProgram`. A dimension that differs between them grows with the table. A
constant that differs was computed from the number of rows.

The analysis thus sees the operations that run. `jax.export`'s symbolic dimensions would
change them: indexing of columns traces to other operations, and NumPy functions of the
number of rows do not trace at all.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

TRACED_SIZES: Final = (65_536, 131_073)
"""The two numbers of rows that rules are traced for.

Both are beyond the thresholds of rules, such as 128 for factored moments in optax. One
is even, the other odd and about twice as large. So a rule that divides the number of
rows, or tests its divisibility, behaves differently for them.
"""

PROBED_SIZES: Final = (258, 511)
"""Two numbers of rows for which a rule is traced first, to find loops over rows.

Tracing unrolls loops, so one over the rows of `TRACED_SIZES` would take minutes. Here
it takes a second, and shows: the larger table has more operations. No power of two lies
between the two, as the threshold of a rule would.
"""


@dataclasses.dataclass(frozen=True)
class RowsDimension:
    """A dimension that depends on the number of rows.

    Attributes:
      sizes: size of the dimension for each of `TRACED_SIZES`.
    """

    sizes: tuple[int, int]

    def __repr__(self) -> str:
        if self.sizes == TRACED_SIZES:
            return "rows"
        return f"<{self.sizes[0]} of {TRACED_SIZES[0]} rows>"


ROWS: Final = RowsDimension(TRACED_SIZES)
"""The symbol for the number of rows."""

Dimension = int | RowsDimension
Shape = tuple[Dimension, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Variable:
    """An input of a program, or a result of an operation."""

    shape: Shape
    dtype: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """A value that is fixed when the rule is traced.

    Attributes:
      shape: shape of the value.
      dtype: type of the value.
      value: the value, in the trace for the smaller table.
      is_literal: whether it is a number written into the operation.
      is_row_count: whether it was computed from the number of rows.
    """

    shape: Shape
    dtype: Any
    value: Any
    is_literal: bool
    is_row_count: bool


Operand = Variable | Constant


@dataclasses.dataclass(frozen=True, eq=False)
class RuleOperation:
    """One operation of a program.

    Attributes:
      name: name of the JAX primitive.
      inputs: operands.
      outputs: results.
      params: parameters. Called jaxprs are `RuleProgram`s, and integers that depend on
        the number of rows are `RowsDimension`s.
      equation: the equation of the jaxpr for the smaller table.
    """

    name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Variable, ...]
    params: dict[str, Any]
    equation: Any

    def bind(self, inputs: list[Any]) -> list[Any]:
        """Runs the operation on arrays; returns its results."""
        primitive = self.equation.primitive
        outputs = primitive.bind(*inputs, **self.equation.params)
        return outputs if primitive.multiple_results else [outputs]


@dataclasses.dataclass(frozen=True, eq=False)
class RuleProgram:
    """The operations of a traced function, in the order in which they run."""

    inputs: tuple[Variable, ...]
    operations: tuple[RuleOperation, ...]
    outputs: tuple[Operand, ...]


class IncomparableValue:
    """Stands for a parameter that differs between two traces of one rule.

    A function that the rule makes anew in each trace is such a parameter. The value
    equals no other.
    """


class SizeDependentError(Exception):
    """A rule does other operations for another number of rows."""


def read_program(first: Any, second: Any | None = None) -> RuleProgram:
    """Reads the closed jaxprs of one function, for both `TRACED_SIZES`.

    Args:
      first: the closed jaxpr for the smaller table.
      second: the one for the larger table; None: dimensions stay the numbers they are.

    Raises:
      SizeDependentError: if the operations of the two differ.

    Example:
      >>> jaxprs = [jax.make_jaxpr(jnp.sin)(jnp.ones((n, 3))) for n in TRACED_SIZES]
      >>> program = read_program(*jaxprs)
      >>> program.operations[0].name, program.inputs[0].shape
      ('sin', (rows, 3))
    """
    programs: tuple[Any, Any] = (first, first if second is None else second)
    jaxprs = (programs[0].jaxpr, programs[1].jaxpr)
    return _read(jaxprs, tuple(_pairs(programs, "consts")))


def _read(
    jaxprs: tuple[Any, Any], constants: tuple[tuple[Any, Any], ...]
) -> RuleProgram:
    """Reads open jaxprs, and the values of their constants."""
    known: dict[Any, Operand] = {}
    for variables, values in zip(_pairs(jaxprs, "constvars"), constants, strict=True):
        known[variables[0]] = _constant(variables, values, is_literal=False)

    def new(variables: tuple[Any, Any]) -> Variable:
        shape, dtype = _type_of(variables)
        known[variables[0]] = variable = Variable(shape, dtype)
        return variable

    def operand(variables: tuple[Any, Any]) -> Operand:
        if not hasattr(variables[0], "val"):
            return known[variables[0]]
        if not hasattr(variables[1], "val"):
            raise SizeDependentError("a constant becomes a variable")
        return _constant(variables, [x.val for x in variables], is_literal=True)

    inputs = tuple(map(new, _pairs(jaxprs, "invars")))
    operations = []
    for equations in _pairs(jaxprs, "eqns"):
        name, other = (equation.primitive.name for equation in equations)
        if name != other:
            raise SizeDependentError(f"{name!r} becomes {other!r}")
        operations.append(
            RuleOperation(
                name=name,
                inputs=tuple(map(operand, _pairs(equations, "invars"))),
                params=_merge(*(equation.params for equation in equations)),
                outputs=tuple(map(new, _pairs(equations, "outvars"))),
                equation=equations[0],
            )
        )
    outputs = tuple(map(operand, _pairs(jaxprs, "outvars")))
    return RuleProgram(inputs, tuple(operations), outputs)


def is_by_row(shape: Shape) -> bool:
    """Returns whether the first dimension, and no other, is the number of rows."""
    return shape[:1] == (ROWS,) and not depends_on_rows(shape[1:])


def depends_on_rows(value: Any) -> bool:
    """Returns whether a shape, or a parameter, contains a `RowsDimension`."""
    if isinstance(value, tuple | list):
        return any(map(depends_on_rows, value))
    return isinstance(value, RowsDimension)


def same_constant(first: Any, second: Any) -> bool:
    """Returns whether two constants are bitwise the same."""
    if first is second:
        return True
    if _is_traced(first) or _is_traced(second):
        return False
    first, second = _as_numpy(first), _as_numpy(second)
    return (first.dtype, first.shape) == (
        second.dtype,
        second.shape,
    ) and first.tobytes() == second.tobytes()


def _pairs(sources: Any, name: str) -> Iterator[tuple[Any, Any]]:
    first, second = (getattr(source, name) for source in sources)
    if len(first) != len(second):
        what = "operations" if name == "eqns" else name
        raise SizeDependentError(f"{len(first)} {what} become {len(second)}")
    return zip(first, second, strict=True)


def _constant(variables: tuple[Any, Any], values: Any, is_literal: bool) -> Constant:
    shape, dtype = _type_of(variables)
    first, second = values
    return Constant(
        shape=shape,
        dtype=dtype,
        value=first,
        is_literal=is_literal,
        is_row_count=not depends_on_rows(shape) and not same_constant(first, second),
    )


def _type_of(variables: tuple[Any, Any]) -> tuple[Shape, Any]:
    first, second = (getattr(variable.aval, "shape", ()) for variable in variables)
    if len(first) != len(second):
        raise SizeDependentError(f"shape {first} becomes {second}")
    return _merge(tuple(first), tuple(second)), getattr(
        variables[0].aval, "dtype", None
    )


def _merge(first: Any, second: Any) -> Any:
    """Merges the values of a parameter for the two numbers of rows."""
    if hasattr(first, "jaxpr") and hasattr(first, "consts"):
        return read_program(first, second)
    if hasattr(first, "eqns"):
        return _read((first, second), ())
    if isinstance(first, dict) and isinstance(second, dict):
        if first.keys() == second.keys():
            return {name: _merge(first[name], second[name]) for name in first}
    elif isinstance(first, tuple | list) and isinstance(second, tuple | list):
        if len(first) == len(second):
            return tuple(map(_merge, first, second))
    elif _is_integer(first) and _is_integer(second):
        return _dimension(first, second)
    elif same_parameter(first, second):
        return first
    return IncomparableValue()


def _dimension(first: Any, second: Any) -> Dimension:
    """Merges two integers."""
    sizes = (int(first), int(second))
    return sizes[0] if sizes[0] == sizes[1] else RowsDimension(sizes)


def same_parameter(first: Any, second: Any) -> bool:
    """Returns whether two parameters, other than programs and tuples, are equal."""
    if isinstance(first, np.ndarray | jax.Array):
        return same_constant(first, second)
    return first is second or (
        type(first) is type(second) and (first == second) is True
    )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_traced(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


def _as_numpy(value: Any) -> np.ndarray:
    if jnp.issubdtype(jnp.result_type(value), jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)
