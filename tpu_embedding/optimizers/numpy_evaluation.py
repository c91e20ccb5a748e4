"""Evaluates a traced function by NumPy, which compiles nothing.

The probe runs each rule a few times on small arrays. NumPy has most of the operations
that rules consist of. JAX evaluates the others, one by one.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

_NAMES: Final = (
    "abs:abs add:add add_any:add and:bitwise_and copy:asarray cos:cos div:divide "
    "eq:equal exp:exp floor:floor ge:greater_equal gt:greater is_finite:isfinite "
    "le:less_equal log:log lt:less max:maximum min:minimum mul:multiply ne:not_equal "
    "neg:negative not:invert or:bitwise_or pow:power sign:sign sin:sin sqrt:sqrt "
    "square:square sub:subtract tanh:tanh"
)
"""Operations on elements: JAX's name and NumPy's."""

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
"""Operations with parameters; their results are cast to the type of the trace."""

_CALLS: Final = dict(
    jit="jaxpr", custom_jvp_call="call_jaxpr", custom_vjp_call="call_jaxpr"
)
"""Operations that call a function, and the parameter that holds it."""


def trace(function: Callable[..., Any], *examples: Any) -> tuple[Any, Any]:
    """Traces a function of pytrees of arrays.

    Args:
      function: the function.
      *examples: its arguments, or shapes and dtypes of them.

    Returns:
      A function of NumPy arrays that returns such arrays; and the shapes and dtypes of
      its results. Random keys stay arrays of JAX.

    Example:
      >>> double, shape = trace(lambda x: 2 * x, jnp.ones(3))
      >>> double(np.float32([1, 2, 3])).tolist(), shape.shape
      ([2.0, 4.0, 6.0], (3,))
    """
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*examples)
    tree = jax.tree.structure(shapes)

    def evaluate(*arguments: Any) -> Any:
        return tree.unflatten(_evaluate(jaxpr, jax.tree.leaves(arguments)))

    return evaluate, shapes


def _evaluate(jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
    """Returns the results of a closed jaxpr."""
    names = dict(zip(jaxpr.jaxpr.invars, inputs, strict=True))
    names |= zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True)

    def read(atom: Any) -> Any:
        if isinstance(atom, Literal):
            return np.asarray(atom.val)
        return names[atom]

    for equation in jaxpr.jaxpr.eqns:
        results = _compute(equation, [read(x) for x in equation.invars])
        names |= zip(equation.outvars, results, strict=True)
    return [_on_host(read(x)) for x in jaxpr.jaxpr.outvars]


def _compute(equation: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    """Returns the results of an operation."""
    name, params = equation.primitive.name, equation.params
    shapes: list[Any] = [x.aval for x in equation.outvars]
    if called := params.get(_CALLS.get(name, "")):
        return _evaluate(called, values)
    operation = _ELEMENTWISE.get(name)
    if operation is None and name in _WITH_PARAMETERS:
        operation = functools.partial(_WITH_PARAMETERS[name], **params)
    if operation is not None and not _is_key(shapes[0]):
        return [np.asarray(operation(*values), shapes[0].dtype)]
    params = equation.primitive.get_bind_params(params)
    results = equation.primitive.bind(*map(jnp.asarray, values), **params)
    results = results if equation.primitive.multiple_results else [results]
    return [_on_host(x) for x in results]


def _on_host(value: Any) -> Any:
    """Returns an array of NumPy; random keys as they are."""
    return value if _is_key(value) else np.asarray(value)


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
