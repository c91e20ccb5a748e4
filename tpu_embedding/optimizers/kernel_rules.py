"""Rules in the form that a kernel runs: what is done to each element of a row.

A SparseCore computes with vectors of a few elements, and knows some operations only. So
a rule is traced, and what it does is parted: what belongs to no row (a learning rate
that falls with the step, a bias correction) XLA computes as before; the results, plain
numbers, go to the kernel, which does what is left to each vector of a row.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from tpu_embedding.optimizers.row_local import PROBE_ROWS, runs_on_lines, unknown_rows
from tpu_embedding.optimizers.row_optimizer import RowOptimizer
from tpu_embedding.optimizers.table_rows import among

_LANES: Final = 128

_KNOWN: Final = frozenset(
    """abs add add_any and clamp convert_element_type div eq exp ge gt le log lt max min
    mul ne neg not or rsqrt select_n sign sqrt sub tanh xor""".split()
)
"""Operations that JAX lowers for SparseCores; tests/aot compiles each of them."""

_SAME: Final = frozenset(
    "broadcast_in_dim copy copy_p optimization_barrier stop_gradient".split()
)
"""What leaves each element of a row, or a number for all of them, as it is."""

_MOST_FACTORS: Final = 8
"""Integer powers up to it are products."""

_CALLS: Final = frozenset(
    """jit pjit closed_call core_call custom_jvp_call custom_vjp_call remat
    checkpoint""".split()
)


@dataclasses.dataclass(frozen=True)
class KernelRule:
    """A rule, parted.

    Attributes:
      prepare: given the leaves of the state, with None for slot variables: the numbers
        that the kernel takes, float32 scalars, and the leaves of the new state, with
        None for slot variables.
      run: given vectors of the gradient, of the table's row, of the row of each slot
        variable, and of each number repeated: those of the new rows of the table and of
        each slot variable.
    """

    prepare: Callable[[Sequence[Any]], tuple[list[Float[Array, ""]], list[Any]]]
    run: Callable[..., list[Array]]


@functools.lru_cache(maxsize=256)
def kernel_rule(
    optimizer: optax.GradientTransformation | RowOptimizer, dim: int
) -> KernelRule | None:
    """Parts a rule for rows of `dim`; returns None if no kernel can run it.

    One can where the rule treats each element for itself (`runs_on_lines`), in float32,
    by operations that SparseCores know.

    Example:
      >>> import tpu_embedding as te
      >>> kernel_rule(te.optimizers.adagrad(0.1), 8) is None
      False
      >>> kernel_rule(te.optimizers.rowwise_adagrad(0.1), 8) is None
      True
    """
    if not runs_on_lines(optimizer, dim, _LANES):
        return None
    rows = jax.ShapeDtypeStruct((PROBE_ROWS, dim), jnp.float32)
    with among(unknown_rows(PROBE_ROWS)):
        state = jax.eval_shape(optimizer.init, rows)
        program = jax.make_jaxpr(optimizer.update)(rows, state, rows)
    parts = _Parts(program=program, shape=rows.shape)
    try:
        jax.eval_shape(parts.prepare, parts.outline(jax.tree.leaves(state)))
    except NotImplementedError:
        return None
    return KernelRule(prepare=parts.prepare, run=parts.run)


class _OfRows:
    """Stands for what belongs to rows, where numbers are computed."""


class _OfNone:
    """Stands for what belongs to no row, where rows are computed."""


_ROWS: Final = _OfRows()
_NUMBER: Final = _OfNone()


@dataclasses.dataclass(frozen=True)
class _Parts:
    """A traced update, and the shape of its rows.

    Both parts walk through all of it in the same order: what crosses from numbers to
    rows is written down by one, and read by the other.
    """

    program: Any
    shape: tuple[int, ...]

    def outline(self, state: list[Any]) -> list[Any]:
        return [None if leaf.shape == self.shape else leaf for leaf in state]

    def prepare(self, state: Sequence[Any]) -> tuple[list[Float[Array, ""]], list[Any]]:
        numbers: list[Array] = []

        def step(equation: Any, inputs: list[Any]) -> list[Any]:
            if not self._is_of_rows(equation, inputs):
                return _bind(equation, inputs)
            _check_operation(equation)
            numbers.extend(
                _to_number(x)
                for x, variable in zip(inputs, equation.invars, strict=True)
                if x is not _ROWS and not _is_literal(variable)
            )
            return [_ROWS] * len(equation.outvars)

        leaves = [_ROWS if leaf is None else leaf for leaf in state]
        updates, *new = _walk(self.program, [_ROWS, *leaves, _ROWS], step)
        is_moved = [x is _ROWS for x in (updates, *new)]
        if is_moved != [True, *(leaf is None for leaf in state)]:
            raise NotImplementedError
        return numbers, [None if x is _ROWS else x for x in new]

    def run(self, gradient: Array, row: Array, *vectors: Array) -> list[Array]:
        slots = [v.aval.shape == self.shape for v in self.program.jaxpr.invars[1:-1]]
        num_slots = sum(slots)
        of_slots, numbers = iter(vectors[:num_slots]), iter(vectors[num_slots:])

        def step(equation: Any, inputs: list[Any]) -> list[Any]:
            if not self._is_of_rows(equation, inputs):
                return [_NUMBER] * len(equation.outvars)
            vectors = [
                _full(gradient, variable.val)
                if _is_literal(variable)
                else _from_number(next(numbers), variable.aval.dtype)
                if x is _NUMBER
                else x
                for x, variable in zip(inputs, equation.invars, strict=True)
            ]
            return [_compute(equation, vectors)]

        leaves = [next(of_slots) if is_slot else _NUMBER for is_slot in slots]
        updates, *new = _walk(self.program, [gradient, *leaves, row], step)
        return [row + updates, *(x for x in new if x is not _NUMBER)]

    def _is_of_rows(self, equation: Any, inputs: list[Any]) -> bool:
        made = any(v.aval.shape == self.shape for v in equation.outvars)
        return made or any(
            getattr(v.aval, "shape", None) == self.shape
            for v in equation.invars
            if not _is_literal(v)
        )


def _walk(
    program: Any,
    arguments: Sequence[Any],
    step: Callable[[Any, list[Any]], list[Any]],
) -> list[Any]:
    """Runs a closed jaxpr, and those that it calls, operation by operation."""
    jaxpr = program.jaxpr
    known = dict(zip(jaxpr.constvars, program.consts, strict=True))
    known.update(zip(jaxpr.invars, arguments, strict=True))

    def read(variable: Any) -> Any:
        return variable.val if _is_literal(variable) else known[variable]

    for equation in jaxpr.eqns:
        inputs = [read(v) for v in equation.invars]
        if equation.primitive.name in _CALLS:
            inner = [v for v in equation.params.values() if hasattr(v, "consts")]
            if len(inner) != 1:
                raise NotImplementedError(equation.primitive.name)
            outputs = _walk(inner[0], inputs, step)
        else:
            outputs = step(equation, inputs)
        known.update(zip(equation.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _check_operation(equation: Any) -> None:
    name = equation.primitive.name
    is_power = name == "integer_pow" and abs(equation.params["y"]) <= _MOST_FACTORS
    if not (name in _KNOWN or name in _SAME or name == "square" or is_power):
        raise NotImplementedError(name)
    for variable in (*equation.invars, *equation.outvars):
        if variable.aval.dtype not in (jnp.float32, jnp.bool_):
            raise NotImplementedError(name)


def _compute(equation: Any, vectors: list[Array]) -> Array:
    name = equation.primitive.name
    if name in _SAME:
        return vectors[0]
    if name == "square":
        return vectors[0] * vectors[0]
    if name == "integer_pow":
        return _power(vectors[0], equation.params["y"])
    return equation.primitive.bind(*vectors, **equation.params)


def _power(vector: Array, exponent: int) -> Array:
    product = functools.reduce(jnp.multiply, [vector] * abs(exponent))
    return product if exponent > 0 else 1 / product


def _bind(equation: Any, inputs: list[Any]) -> list[Any]:
    outputs = equation.primitive.bind(*inputs, **equation.params)
    return outputs if equation.primitive.multiple_results else [outputs]


def _to_number(value: Any) -> Float[Array, ""]:
    if np.shape(value) != () or jnp.result_type(value) not in (jnp.float32, jnp.bool_):
        raise NotImplementedError
    return jnp.asarray(value, jnp.float32)


def _from_number(vector: Array, dtype: Any) -> Array:
    return vector != 0 if dtype == jnp.bool_ else vector


def _full(like: Array, value: Any) -> Array:
    return jnp.full(like.shape, value, np.asarray(value).dtype)


def _is_literal(variable: Any) -> bool:
    return hasattr(variable, "val")
