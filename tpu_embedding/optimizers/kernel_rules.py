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

_OF_FLOATS: Final = frozenset(
    """abs add add_any clamp convert_element_type div eq exp ge gt le log lt max min mul
    ne neg rsqrt select_n sign sqrt sub tanh""".split()
)
"""What JAX lowers for SparseCores; test_kernel_rules.py has each of it compiled."""

_OF_BOOLS: Final = frozenset(
    "and convert_element_type eq ne not or select_n xor".split()
)
"""The same."""

_COMPARISONS: Final = frozenset("eq ge gt le lt ne".split())

_SAME: Final = frozenset("broadcast_in_dim copy copy_p optimization_barrier".split())
"""What leaves each element of a row, or a number for all of them, as it is."""

_MOST_FACTORS: Final = 8
"""Integer powers up to it are products."""

_CALLS: Final = frozenset(
    "jit pjit closed_call core_call custom_jvp_call custom_vjp_call".split()
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


def kernel_rule(
    optimizer: optax.GradientTransformation | RowOptimizer, dim: int
) -> KernelRule | None:
    """Parts a rule for rows of `dim`; returns None if no kernel can run it.

    One can where the rule treats each element for itself (`runs_on_lines`), in float32,
    by operations that SparseCores know. What is traced belongs to the mesh that it is
    traced under, so it is not kept.

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
    leaves = jax.tree.leaves(state)
    moved = [parts.is_rows(v) for v in program.jaxpr.outvars]
    if moved != [True, *(leaf.shape == rows.shape for leaf in leaves)]:
        return None
    outline = [None if leaf.shape == rows.shape else leaf for leaf in leaves]
    try:
        jax.eval_shape(parts.prepare, outline)
    except NotImplementedError:
        return None
    return KernelRule(prepare=parts.prepare, run=parts.run)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """A traced update, and the shape of its rows.

    Both parts walk through all of it in the same order, and tell by its shape what
    belongs to rows. What an operation on rows takes that does not is a number: one part
    writes it down, the other reads it. A part knows nothing (None) of what is not its
    own.
    """

    program: Any
    shape: tuple[int, ...]

    def is_rows(self, variable: Any) -> bool:
        return getattr(variable.aval, "shape", None) == self.shape

    def prepare(self, state: Sequence[Any]) -> tuple[list[Float[Array, ""]], list[Any]]:
        numbers: list[Array] = []

        def step(equation: Any, inputs: list[Any]) -> list[Any]:
            if not any(map(self.is_rows, equation.outvars)):
                if any(map(self.is_rows, equation.invars)):
                    raise NotImplementedError(equation.primitive.name)
                return _bind(equation, inputs)
            _check_operation(equation)
            numbers.extend(
                _to_number(x)
                for x, variable in zip(inputs, equation.invars, strict=True)
                if not _is_literal(variable) and not self.is_rows(variable)
            )
            return [None]

        _, *new = self._walk(self.program, [None, *state, None], step)
        outvars = self.program.jaxpr.outvars[1:]
        new = [
            None if self.is_rows(v) else x for x, v in zip(new, outvars, strict=True)
        ]
        return numbers, new

    def run(self, gradient: Array, row: Array, *vectors: Array) -> list[Array]:
        jaxpr = self.program.jaxpr
        of_slots = [self.is_rows(variable) for variable in jaxpr.invars[1:-1]]
        remaining = iter(vectors)
        leaves = [next(remaining) if is_slot else None for is_slot in of_slots]
        numbers = remaining

        def step(equation: Any, inputs: list[Any]) -> list[Any]:
            if not any(map(self.is_rows, equation.outvars)):
                return [None] * len(equation.outvars)
            vectors = [
                jnp.full(gradient.shape, variable.val, variable.aval.dtype)
                if _is_literal(variable)
                else x
                if self.is_rows(variable)
                else _from_number(next(numbers), variable.aval.dtype)
                for x, variable in zip(inputs, equation.invars, strict=True)
            ]
            return [_compute(equation, vectors)]

        updates, *new = self._walk(self.program, [gradient, *leaves, row], step)
        slots = [x for x, is_slot in zip(new, of_slots, strict=True) if is_slot]
        return [row + updates, *slots]

    def _walk(
        self,
        program: Any,
        arguments: Sequence[Any],
        step: Callable[[Any, list[Any]], list[Any]],
    ) -> list[Any]:
        """Runs a closed jaxpr, and those that it calls, operation by operation."""
        jaxpr = program.jaxpr
        if any(map(self.is_rows, jaxpr.constvars)):
            raise NotImplementedError("a constant for each row")
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
                outputs = self._walk(inner[0], inputs, step)
            else:
                outputs = step(equation, inputs)
            known.update(zip(equation.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]


def _check_operation(equation: Any) -> None:
    name = equation.primitive.name
    is_power = name == "integer_pow" and 0 < abs(equation.params["y"]) <= _MOST_FACTORS
    is_same = name in _SAME and len(equation.invars) == 1
    if not (name in _OF_FLOATS | _OF_BOOLS or name == "square" or is_power or is_same):
        raise NotImplementedError(name)
    (made,) = equation.outvars
    dtypes = {variable.aval.dtype for variable in equation.invars}
    if name not in _COMPARISONS:
        dtypes.add(made.aval.dtype)
    if not dtypes <= {jnp.dtype(jnp.float32), jnp.dtype(bool)}:
        raise NotImplementedError(name)
    if jnp.dtype(bool) in dtypes and not (name in _OF_BOOLS or is_same):
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
        raise NotImplementedError("a number that is none of a vector")
    return jnp.asarray(value, jnp.float32)


def _from_number(vector: Array, dtype: Any) -> Array:
    return vector != 0 if dtype == jnp.bool_ else vector


def _is_literal(variable: Any) -> bool:
    return hasattr(variable, "val")
