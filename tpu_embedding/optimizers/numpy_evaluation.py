"""Evaluates a program by NumPy, which compiles nothing.

The probe runs each rule a few times on small arrays. NumPy has most of the operations
that rules consist of. JAX evaluates the others, one by one.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embedding.optimizers.rule_split import (
    Equation,
    Program,
    compute_by_jax,
)

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


def evaluate_by_numpy(program: Program, *arguments: Any) -> list[Any]:
    """Returns the results of a program as NumPy arrays; random keys stay JAX's.

    Args:
      program: from `trace_program`.
      *arguments: pytrees of arrays, whose leaves are its arguments.

    Example:
      >>> from tpu_embedding.optimizers.rule_split import trace_program
      >>> program, _ = trace_program(lambda x: 2 * x, np.ones(3, np.float32))
      >>> evaluate_by_numpy(program, np.float32([1, 2, 3]))[0].tolist()
      [2.0, 4.0, 6.0]
    """
    results = program.evaluate(jax.tree.leaves(arguments), compute_by_numpy)
    return [_on_host(x) for x in results]


def compute_by_numpy(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    """Returns the results of an equation, of arrays of NumPy."""
    name, params = equation.name, equation.traced.params
    operation = _ELEMENTWISE.get(name)
    if operation is None and name in _WITH_PARAMETERS:
        operation = functools.partial(_WITH_PARAMETERS[name], **params)
    if operation is not None and not _is_key(equation.outputs[0].aval):
        return [np.asarray(operation(*operands), equation.outputs[0].aval.dtype)]
    results = compute_by_jax(equation, [jnp.asarray(x) for x in operands])
    return [_on_host(x) for x in results]


def _on_host(value: Any) -> Any:
    """Returns an array of NumPy; random keys as they are."""
    return value if _is_key(value) else np.asarray(value)


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
