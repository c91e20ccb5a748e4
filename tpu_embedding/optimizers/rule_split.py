"""Splits a traced optimizer rule into per-step values and arithmetic on rows.

A rule maps gradient, rows and state to updates and a new state. Scalars that do not
depend on rows, such as the step count and a schedule's learning rate, are computed once
per step:

    hyperparameters, new_scalars = split.values(scalars)
    updates, new_slots = split.rows(gradient, rows, is_touched, slots, hyperparameters)

Together the two halves run the rule's own operations. Only scalars are passed from the
first half to the second. An array that does not depend on rows, such as a learning rate
broadcast to all rows, is computed in the second half.

A `Program` is a jaxpr without calls. It can be evaluated by JAX, by NumPy (without
compiling anything), or element by element by a backend.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

_CALLS: Final = dict(
    jit="jaxpr", custom_jvp_call="call_jaxpr", custom_vjp_call="call_jaxpr"
)
"""Operations that call a function, and the parameter that holds the function."""

_RESHAPING: Final = frozenset(
    "broadcast_in_dim copy expand_dims iota reshape squeeze".split()
)
"""Operations whose count in a rule may depend on the number of rows."""


_NAMES: Final = (
    "abs:abs add:add add_any:add and:bitwise_and copy:asarray cos:cos div:divide "
    "eq:equal exp:exp floor:floor ge:greater_equal gt:greater is_finite:isfinite "
    "le:less_equal log:log lt:less max:maximum min:minimum mul:multiply ne:not_equal "
    "neg:negative not:invert or:bitwise_or pow:power sign:sign sin:sin sqrt:sqrt "
    "square:square sub:subtract tanh:tanh"
)
"""Elementwise operations: JAX's name, then NumPy's name."""

_ELEMENTWISE: Final[Mapping[str, Callable[..., Any]]] = {
    name: getattr(np, of_numpy)
    for name, of_numpy in (pair.split(":") for pair in _NAMES.split())
} | {"rsqrt": lambda x: 1 / np.sqrt(x)}

_WITH_PARAMETERS: Final[Mapping[str, Callable[..., Any]]] = {
    "broadcast_in_dim": lambda x, shape, broadcast_dimensions, **_: np.broadcast_to(
        np.expand_dims(x, tuple({*range(len(shape))} - {*broadcast_dimensions})), shape
    ),
    "convert_element_type": lambda x, **_: x,
    "concatenate": lambda *parts, dimension: np.concatenate(parts, dimension),
    "integer_pow": lambda x, y: np.power(x, y),
    "reduce_max": lambda x, axes, **_: np.max(x, axes),
    "reduce_min": lambda x, axes, **_: np.min(x, axes),
    "reduce_sum": lambda x, axes, **_: np.sum(x, axes),
    "reshape": lambda x, new_sizes, **_: np.reshape(x, new_sizes),
    "select_n": lambda which, *cases: np.choose(which, cases),
    "squeeze": lambda x, dimensions: np.squeeze(x, dimensions),
}
"""Operations with parameters. Their results are cast to the traced dtype."""


@dataclasses.dataclass(frozen=True, eq=False)
class Variable:
    """An argument of a program, or the result of an equation.

    Attributes:
      aval: its shape and dtype.
    """

    aval: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """A value that is already known when a rule is traced.

    Attributes:
      value: a NumPy or JAX array.
      aval: its shape and dtype.
    """

    value: Any
    aval: Any


Atom = Variable | Constant


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Equation:
    """An operation of a program.

    Attributes:
      traced: the operation and its parameters.
      inputs: its operands.
      outputs: its results.
    """

    traced: JaxprEqn
    inputs: tuple[Atom, ...]
    outputs: tuple[Variable, ...]

    @property
    def name(self) -> str:
        """Name of the operation."""
        return self.traced.primitive.name


Compute = Callable[[Equation, Sequence[Any]], Sequence[Any]]
"""Computes the results of an equation from its operands."""


def compute_by_jax(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    """Returns an equation's results as arrays, or as tracers within a trace."""
    primitive = equation.traced.primitive
    results = primitive.bind(
        *operands, **primitive.get_bind_params(equation.traced.params)
    )
    return results if primitive.multiple_results else [results]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """A traced function of arrays.

    Attributes:
      inputs: its arguments.
      equations: its operations, in order.
      outputs: its results.
    """

    inputs: tuple[Variable, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Atom, ...]

    def evaluate(
        self,
        arguments: Sequence[Any],
        compute: Compute = compute_by_jax,
        constant: Callable[[Constant], Any] = lambda constant: constant.value,
    ) -> list[Any]:
        """Returns the results for some arguments.

        Args:
          arguments: one per input, in the form that `compute` expects.
          compute: computes one equation.
          constant: returns a constant in the form that `compute` expects.
        """
        values: dict[Atom, Any] = dict(zip(self.inputs, arguments, strict=True))

        def read(atom: Atom) -> Any:
            return constant(atom) if isinstance(atom, Constant) else values[atom]

        for equation in self.equations:
            results = compute(equation, [read(atom) for atom in equation.inputs])
            values.update(zip(equation.outputs, results, strict=True))
        return [read(atom) for atom in self.outputs]

    def needed_for(
        self, outputs: Iterable[Atom], given: Set[Atom], effects: Set[Equation]
    ) -> tuple[Equation, ...]:
        """Returns the equations that compute some outputs from given values.

        Args:
          outputs: values to compute.
          given: values that are already known.
          effects: equations to keep for their side effects.
        """
        equations: list[Equation] = []
        needed = {*outputs} - given
        for equation in reversed(self.equations):
            if equation in effects or not needed.isdisjoint(equation.outputs):
                equations.append(equation)
                needed |= {*equation.inputs} - given
        return tuple(reversed(equations))

    def operations(self) -> list[tuple[str, ...]]:
        """Returns the part of this program that the number of rows must not change.

        For each operation except reshapes, this is its name followed by one text per
        operand: the value of a constant float, or nothing.
        """
        return [
            (equation.name, *map(_float_text, equation.inputs))
            for equation in self.equations
            if equation.name not in _RESHAPING
        ]


def _float_text(atom: Atom) -> str:
    """Returns the value of a constant float as text, so that NaN equals NaN."""
    if isinstance(atom, Variable) or atom.aval.shape != ():
        return ""
    is_float = jnp.issubdtype(atom.aval.dtype, jnp.floating)
    return str(float(atom.value)) if is_float else ""


def trace_program(function: Callable[..., Any], *examples: Any) -> tuple[Program, Any]:
    """Traces a function of pytrees of arrays.

    `examples` are arguments, or their shapes and dtypes.

    Returns:
      A program from the arguments' leaves to the result's leaves, and the result's
      shapes and dtypes.

    Example:
      >>> program, shape = trace_program(lambda x: 2 * x, jnp.ones(3))
      >>> program.evaluate([jnp.arange(3.0)])[0].tolist(), shape.shape
      ([0.0, 2.0, 4.0], (3,))
    """
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*examples)
    return program_of(jaxpr), shapes


def program_of(closed_jaxpr: Any) -> Program:
    """Converts a closed jaxpr to a program, with called functions inlined."""
    equations: list[Equation] = []
    inputs = tuple(Variable(x.aval) for x in closed_jaxpr.jaxpr.invars)
    outputs = _inline(closed_jaxpr, inputs, equations)
    return Program(inputs=inputs, equations=tuple(equations), outputs=tuple(outputs))


def _inline(
    closed_jaxpr: Any, inputs: Sequence[Atom], equations: list[Equation]
) -> list[Atom]:
    """Appends a jaxpr's equations, and returns its results."""
    jaxpr = closed_jaxpr.jaxpr
    atoms: dict[Any, Atom] = dict(zip(jaxpr.invars, inputs, strict=True))
    for variable, value in zip(jaxpr.constvars, closed_jaxpr.consts, strict=True):
        atoms[variable] = Constant(value, variable.aval)

    def read(atom: Any) -> Atom:
        if isinstance(atom, Literal):
            return Constant(np.asarray(atom.val, atom.aval.dtype), atom.aval)
        return atoms[atom]

    for traced in jaxpr.eqns:
        operands = tuple(read(x) for x in traced.invars)
        called = traced.params.get(_CALLS.get(traced.primitive.name, ""))
        if called is not None:
            results: Sequence[Atom] = _inline(called, operands, equations)
        else:
            results = tuple(Variable(x.aval) for x in traced.outvars)
            equations.append(Equation(traced=traced, inputs=operands, outputs=results))
        atoms.update(zip(traced.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def evaluate_by_numpy(program: Program, arguments: Sequence[Any]) -> list[Any]:
    """Returns a program's results as NumPy arrays; random keys remain JAX arrays.

    Example:
      >>> program, _ = trace_program(lambda x: 2 * x, np.ones(3, np.float32))
      >>> evaluate_by_numpy(program, [np.float32([1, 2, 3])])[0].tolist()
      [2.0, 4.0, 6.0]
    """
    return [_on_host(x) for x in program.evaluate(arguments, _compute_by_numpy)]


def _compute_by_numpy(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    """Returns an equation's results, computed by NumPy where possible."""
    name, params = equation.name, equation.traced.params
    operation = _ELEMENTWISE.get(name)
    if operation is None and name in _WITH_PARAMETERS:
        operation = functools.partial(_WITH_PARAMETERS[name], **params)
    if operation is not None and not _is_key(equation.outputs[0].aval):
        return [np.asarray(operation(*operands), equation.outputs[0].aval.dtype)]
    results = compute_by_jax(equation, [jnp.asarray(x) for x in operands])
    return [_on_host(x) for x in results]


def _on_host(value: Any) -> Any:
    """Converts a value to a NumPy array. Random keys are unchanged."""
    return value if _is_key(value) else np.asarray(value)


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


Evaluate = Callable[[Program, Sequence[Any]], list[Any]]
"""Returns a program's results: `Program.evaluate` or `evaluate_by_numpy`."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SplitRule:
    """A rule traced for a number of rows, in two halves.

    Attributes:
      value_program: maps the state's scalars, which all rows share, to the
        hyperparameters and the new scalars.
      row_program: maps gradient, rows, `is_touched`, slot variables and hyperparameters
        to updates and new slot variables.
      num_hyperparameters: number of scalars that `value_program` passes to
        `row_program`.
      scalars_depend_on_rows: True if a new scalar depends on rows. The result of
        `values` is then wrong.
    """

    value_program: Program
    row_program: Program
    num_hyperparameters: int
    scalars_depend_on_rows: bool

    def values(
        self, scalars: Sequence[Any], evaluate: Evaluate = Program.evaluate
    ) -> tuple[list[Any], list[Any]]:
        """Returns a step's hyperparameters, and the scalars after the step."""
        results = evaluate(self.value_program, scalars)
        return results[: self.num_hyperparameters], results[self.num_hyperparameters :]

    def rows(
        self,
        gradient: Any,
        rows: Any,
        is_touched: Any,
        slots: Sequence[Any],
        hyperparameters: Sequence[Any],
        evaluate: Evaluate = Program.evaluate,
    ) -> tuple[Any, list[Any]]:
        """Returns the rows' updates, and their slot variables after the step."""
        arguments = [gradient, rows, is_touched, *slots, *hyperparameters]
        updates, *new_slots = evaluate(self.row_program, arguments)
        return updates, new_slots

    def has_operations_of(self, other: "SplitRule") -> bool:
        """Returns True if a split for another row count has the same operations."""
        return all(
            first.operations() == second.operations()
            for first, second in (
                (self.value_program, other.value_program),
                (self.row_program, other.row_program),
            )
        )


def split_program(program: Program, is_slot: Sequence[bool]) -> SplitRule:
    """Splits a rule's program.

    The program maps gradient, rows, `is_touched` and the state's leaves to updates and
    the new leaves. `is_slot` is True for each leaf that is a slot variable.
    """
    depends = rows_dependence(program, [True, True, True, *is_slot])
    scalars, slots = partition(program.inputs[3:], is_slot)
    new_scalars, new_slots = partition(program.outputs[1:], is_slot)
    row_inputs = (*program.inputs[:3], *slots)
    row_outputs = (program.outputs[0], *new_slots)

    # Operations with side effects are kept, because users may print a rule's values.
    effects = {x for x in program.equations if x.traced.effects}
    row_effects = {x for x in effects if not depends.isdisjoint(x.inputs)}

    # Only scalars are passed between the halves. Arrays such as a rate broadcast to all
    # rows are computed with the rows.
    results = (x for equation in program.equations for x in equation.outputs)
    crossing = [
        x
        for x in (*program.inputs, *results)
        if x in scalars or (x.aval.shape == () and x not in depends)
    ]
    row_equations = program.needed_for(
        row_outputs, {*row_inputs, *crossing}, row_effects
    )
    used = {*row_outputs, *(x for equation in row_equations for x in equation.inputs)}
    hyperparameters = tuple(x for x in crossing if x in used)
    values = (*hyperparameters, *new_scalars)
    # A conditional may compute both scalars and arrays of rows. This half drops the
    # arrays.
    value_equations = program.needed_for(
        values, {*scalars, *depends}, effects - row_effects
    )

    def without_rows(atoms: Sequence[Atom]) -> tuple[Atom, ...]:
        """Returns the atoms, with zeros for values that depend on rows."""
        return tuple(
            Constant(np.zeros(x.aval.shape, x.aval.dtype), x.aval)
            if x in depends
            else x
            for x in atoms
        )

    return SplitRule(
        value_program=Program(
            inputs=tuple(scalars),
            equations=tuple(
                dataclasses.replace(equation, inputs=without_rows(equation.inputs))
                for equation in value_equations
            ),
            outputs=without_rows(values),
        ),
        row_program=Program(
            inputs=(*row_inputs, *hyperparameters),
            equations=row_equations,
            outputs=row_outputs,
        ),
        num_hyperparameters=len(hyperparameters),
        scalars_depend_on_rows=not depends.isdisjoint(new_scalars),
    )


def partition(
    leaves: Sequence[Any], is_slot: Sequence[bool]
) -> tuple[list[Any], list[Any]]:
    """Splits a state's leaves into scalars and slot variables."""
    scalars = [x for x, of_rows in zip(leaves, is_slot, strict=True) if not of_rows]
    slots = [x for x, of_rows in zip(leaves, is_slot, strict=True) if of_rows]
    return scalars, slots


def rows_dependence(program: Program, is_by_row: Sequence[bool]) -> set[Atom]:
    """Returns the values of a program that depend on rows.

    `is_by_row` is True for each argument that belongs to rows.
    """
    arguments = zip(program.inputs, is_by_row, strict=True)
    depends: set[Atom] = {atom for atom, by_row in arguments if by_row}
    for equation in program.equations:
        operands = [atom in depends for atom in equation.inputs]
        if not any(operands):
            continue
        by_row = [True] * len(equation.outputs)
        if equation.name == "cond" and not operands[0]:
            by_row = [False] * len(equation.outputs)
            for branch in map(program_of, equation.traced.params["branches"]):
                inner = rows_dependence(branch, operands[1:])
                by_row = [
                    before or atom in inner
                    for before, atom in zip(by_row, branch.outputs, strict=True)
                ]
        pairs = zip(equation.outputs, by_row, strict=True)
        depends |= {atom for atom, is_dependent in pairs if is_dependent}
    return depends
