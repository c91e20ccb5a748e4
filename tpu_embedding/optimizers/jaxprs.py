"""Evaluates a rule's jaxpr with NumPy, and finds which values depend on rows.

`probe` uses NumPy because JAX compiles each operation before its first use, which takes
far longer than computing a few rows.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

ClosedJaxpr: TypeAlias = jex.core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
"""A jaxpr with its constants. In JAX 0.12, this class and `Jaxpr` are the same."""

_CALLS: Final = dict(
    jit="jaxpr", custom_jvp_call="call_jaxpr", custom_vjp_call="call_jaxpr"
)
"""Operations that call a function, and the parameter that holds the function."""

_NAMES: Final = (
    "abs:abs add:add add_any:add and:bitwise_and copy:asarray cos:cos div:divide "
    "eq:equal exp:exp floor:floor ge:greater_equal gt:greater is_finite:isfinite "
    "le:less_equal log:log lt:less max:maximum min:minimum mul:multiply ne:not_equal "
    "neg:negative not:invert or:bitwise_or pow:power sign:sign sin:sin sqrt:sqrt "
    "square:square sub:subtract tanh:tanh"
)
"""Elementwise operations. JAX's name comes first, then NumPy's name."""

_ELEMENTWISE: Final[Mapping[str, Callable[..., Any]]] = {
    name: getattr(np, of_numpy)
    for name, of_numpy in (pair.split(":") for pair in _NAMES.split())
} | {"rsqrt": lambda x: 1 / np.sqrt(x)}

# `convert_element_type` returns its operand, because `_compute_by_numpy` casts all
# results.
_WITH_PARAMETERS: Final[Mapping[str, Callable[..., Any]]] = {
    "broadcast_in_dim": lambda x, shape, broadcast_dimensions, **_: np.broadcast_to(
        np.expand_dims(x, tuple({*range(len(shape))} - {*broadcast_dimensions})), shape
    ),
    "convert_element_type": lambda x, **_: x,
    "concatenate": lambda *parts, dimension: np.concatenate(parts, dimension),
    "integer_pow": lambda x, y: np.power(x, y),
    "reduce_and": lambda x, axes, **_: np.bitwise_and.reduce(x, axes),
    "reduce_max": lambda x, axes, **_: np.max(x, axes),
    "reduce_min": lambda x, axes, **_: np.min(x, axes),
    "reduce_or": lambda x, axes, **_: np.bitwise_or.reduce(x, axes),
    "reduce_sum": lambda x, axes, **_: np.sum(x, axes),
    "reshape": lambda x, new_sizes, **_: np.reshape(x, new_sizes),
    "select_n": lambda which, *cases: np.choose(which, cases),
    "slice": lambda x, start_indices, limit_indices, strides: x[
        tuple(map(slice, start_indices, limit_indices, strides or x.ndim * [None]))
    ],
    "squeeze": lambda x, dimensions: np.squeeze(x, dimensions),
}
"""Operations with parameters, by their names in JAX."""

Compute = Callable[[JaxprEqn, Sequence[Any]], Sequence[Any]]
"""Computes the results of an operation from its operands."""


def compute_by_jax(equation: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """Computes an operation with JAX, which also works on tracers."""
    primitive = equation.primitive
    results = primitive.bind(*operands, **primitive.get_bind_params(equation.params))
    return results if primitive.multiple_results else [results]


def evaluate(
    closed: ClosedJaxpr, arguments: Sequence[Any], compute: Compute = compute_by_jax
) -> list[Any]:
    """Evaluates a jaxpr one operation at a time, and inlines the functions it calls.

    Example:
      >>> closed = jax.make_jaxpr(lambda x: 2 * x)(jnp.ones(3))
      >>> evaluate(closed, [jnp.arange(3.0)])[0].tolist()
      [0.0, 2.0, 4.0]
    """
    jaxpr = closed.jaxpr
    values: dict[Var, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Literal | Var) -> Any:
        if isinstance(atom, Literal):
            # Literals may be Python numbers, which NumPy would widen to 64 bits.
            aval: Any = atom.aval
            return np.asarray(atom.val, aval.dtype)
        return values[atom]

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        called = called_function(equation)
        if called is not None:
            results: Sequence[Any] = evaluate(called, operands, compute)
        else:
            results = compute(equation, operands)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def called_function(equation: JaxprEqn) -> ClosedJaxpr | None:
    """Finds the function that an operation calls, if any."""
    return equation.params.get(_CALLS.get(equation.primitive.name, ""))


def evaluate_by_numpy(closed: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr to NumPy arrays. Random keys remain JAX arrays.

    Example:
      >>> closed = jax.make_jaxpr(lambda x: 2 * x)(np.ones(3, np.float32))
      >>> evaluate_by_numpy(closed, [np.float32([1, 2, 3])])[0].tolist()
      [2.0, 4.0, 6.0]
    """
    return [_on_host(x) for x in evaluate(closed, arguments, _compute_by_numpy)]


def _compute_by_numpy(equation: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    name = equation.primitive.name
    if name == "cond":
        # JAX would compile all branches. The index is clamped, as in JAX.
        index, *arguments = operands
        branches = equation.params["branches"]
        branch = branches[np.clip(int(index), 0, len(branches) - 1)]
        return evaluate(branch, arguments, _compute_by_numpy)
    operation = _ELEMENTWISE.get(name)
    if operation is None and name in _WITH_PARAMETERS:
        operation = functools.partial(_WITH_PARAMETERS[name], **equation.params)
    if operation is not None:
        # NumPy promotes types differently, so results get the traced dtype.
        aval: Any = equation.outvars[0].aval
        if not _is_key(aval):
            return [np.asarray(operation(*operands), aval.dtype)]
    # Other operations, such as random bits, are rare in rules, so JAX computes them.
    results = compute_by_jax(equation, [jnp.asarray(x) for x in operands])
    return [_on_host(x) for x in results]


def _on_host(value: Any) -> Any:
    return value if _is_key(value) else np.asarray(value)


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def dependent_values(jaxpr: Jaxpr, is_given: Sequence[bool]) -> set[Var]:
    """Finds the values in a jaxpr that depend on the given arguments."""
    arguments = zip(jaxpr.invars, is_given, strict=True)
    dependent = {argument for argument, given in arguments if given}
    for equation in jaxpr.eqns:
        operands = are_among(equation.invars, dependent)
        if not any(operands):
            continue
        # Functions and branches often pass on a value, such as a count, that doesn't
        # depend on all operands. So the search continues inside them.
        called = called_function(equation)
        if called is not None:
            results = _dependent_results(called.jaxpr, operands)
        elif equation.primitive.name == "cond" and not operands[0]:
            branches = [
                _dependent_results(branch.jaxpr, operands[1:])
                for branch in equation.params["branches"]
            ]
            results = [any(each) for each in zip(*branches, strict=True)]
        else:
            results = [True] * len(equation.outvars)
        pairs = zip(equation.outvars, results, strict=True)
        dependent |= {value for value, is_dependent in pairs if is_dependent}
    return dependent


def _dependent_results(jaxpr: Jaxpr, is_given: Sequence[bool]) -> list[bool]:
    return are_among(jaxpr.outvars, dependent_values(jaxpr, is_given))


def are_among(atoms: Iterable[Literal | Var], values: set[Var]) -> list[bool]:
    return [isinstance(atom, Var) and atom in values for atom in atoms]
