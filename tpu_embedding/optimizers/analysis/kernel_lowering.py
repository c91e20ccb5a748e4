"""Rules in the form that a kernel runs: what is done to each vector of a row.

A SparseCore computes with vectors of a few elements, and knows some operations only. So
a rule is traced, and what it does is parted: what belongs to no row (a learning rate
that falls with the step, a bias correction) XLA computes as before; the results, plain
numbers, go to the kernel, which does what is left to each vector of a row. What belongs
to a row as a whole (its mean square, an accumulator of it) fills such a vector, too;
where a sum over the row is wanted, all of its vectors are gone through first.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from tpu_embedding.optimizers.analysis.row_local import PROBE_ROWS, unknown_rows
from tpu_embedding.optimizers.row_optimizer import RowOptimizer
from tpu_embedding.optimizers.table_rows import table_rows_context
from tpu_embedding.rows.kernels.kernel_bodies import KernelBody

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

_SAME: Final = frozenset(
    """broadcast_in_dim copy copy_p optimization_barrier reduce_sum reshape
    squeeze""".split()
)
"""What leaves elements, a value of each row or a number for all of them as they are.

(A sum over one axis of a value of each row; sums over rows are seen to before.)
"""

_MAX_FACTORS: Final = 8
"""Integer powers up to it are products."""

_CALLS: Final = frozenset(
    "jit pjit closed_call core_call custom_jvp_call custom_vjp_call".split()
)


@dataclasses.dataclass(frozen=True)
class LoweredRule:
    """A rule, parted.

    Attributes:
      prepare: given the leaves of the state, with None for slot variables: the numbers
        that the kernel takes, float32 scalars, and the leaves of the new state, with
        None for slot variables.
      kernel_body: what the kernel does. Its arrays are the table and the slot variables
        with elements as the table has, its values those with one value of each row.
    """

    prepare: Callable[[Sequence[Any]], tuple[list[Float[Array, ""]], list[Any]]]
    kernel_body: KernelBody


def lower_to_kernel(
    optimizer: optax.GradientTransformation | RowOptimizer, dim: int
) -> LoweredRule | None:
    """Parts a rule for rows of `dim`; returns None if no kernel can run it.

    One can where all that the rule does to rows is done to each element for itself, to
    one value of each row, or is a sum over the row; in float32, by operations that
    SparseCores know. What is traced belongs to the mesh that it is traced under, so it
    is not kept.

    Example:
      >>> import tpu_embedding as te
      >>> lower_to_kernel(te.optimizers.adagrad(0.1), 8).kernel_body.num_sums
      0
      >>> lower_to_kernel(te.optimizers.rowwise_adagrad(0.1), 8).kernel_body.num_sums
      1
      >>> lower_to_kernel(te.optimizers.adafactor(0.1), 8) is None
      True
    """
    if isinstance(optimizer, RowOptimizer) and optimizer.takes_totals:
        return None
    rows = jax.ShapeDtypeStruct((PROBE_ROWS, dim), jnp.float32)
    with table_rows_context(unknown_rows(PROBE_ROWS)):
        state = jax.eval_shape(optimizer.init, rows)
        program = jax.make_jaxpr(optimizer.update)(rows, state, rows)
    parts = TracedRule(program=program, dim=dim)
    leaves = jax.tree.leaves(state)
    kinds = [parts.kind_of_shape(leaf) for leaf in leaves]
    if [parts.kind_of(v) for v in program.jaxpr.outvars] != ["rows", *kinds]:
        return None
    for leaf, kind in zip(leaves, kinds, strict=True):
        is_of_rows = PROBE_ROWS in leaf.shape
        if is_of_rows and (kind is None or leaf.dtype != jnp.float32):
            return None
    outline = [None if kind else leaf for leaf, kind in zip(leaves, kinds, strict=True)]
    try:
        jax.eval_shape(parts.prepare, outline)
    except NotImplementedError:
        return None
    kernel_body = KernelBody(run=parts.run, num_sums=parts.count_sums())
    return LoweredRule(prepare=parts.prepare, kernel_body=kernel_body)


_Kind = Literal["rows", "values", None]
"""Elements of rows, a value of each row, or what belongs to no row."""


@dataclasses.dataclass(frozen=True)
class TracedRule:
    """A traced update, and the size of its rows.

    All parts walk through all of it in the same order, and tell by its shape what
    belongs to rows. What an operation on rows takes that does not is a number: one part
    writes it down, the other reads it. A part knows nothing (None) of what is not its
    own, or not yet known.
    """

    program: Any
    dim: int

    def kind_of(self, variable: Any) -> _Kind:
        """Returns what a variable of the program belongs to."""
        return self.kind_of_shape(variable.aval)

    def kind_of_shape(self, array: Any) -> _Kind:
        """Returns what an array of this shape belongs to."""
        shape = getattr(array, "shape", ())
        if shape == (PROBE_ROWS, self.dim):
            return "rows"
        return "values" if shape in ((PROBE_ROWS,), (PROBE_ROWS, 1)) else None

    def prepare(self, state: Sequence[Any]) -> tuple[list[Float[Array, ""]], list[Any]]:
        """Computes the scalars and the part of the state that belongs to no row."""
        numbers: list[Array] = []

        def step(equation: Any, inputs: list[Any]) -> list[Any]:
            if not any(map(self.kind_of, equation.outvars)):
                if any(map(self.kind_of, equation.invars)):
                    raise NotImplementedError(equation.primitive.name)
                return _bind(equation, inputs)
            if not self._is_sum(equation):
                _check_operation(equation)
            numbers.extend(
                _to_number(x)
                for x, variable in zip(inputs, equation.invars, strict=True)
                if not _is_literal(variable) and not self.kind_of(variable)
            )
            return [None]

        _, *new = self._walk(self.program, [None, *state, None], step)
        outvars = self.program.jaxpr.outvars[1:]
        new = [
            None if self.kind_of(v) else x for x, v in zip(new, outvars, strict=True)
        ]
        return numbers, new

    def run(self, sums: Sequence[Array], gradient: Array, *vectors: Array) -> Any:
        """Runs the row part on vectors."""
        row, *remaining = vectors
        kinds = [self.kind_of(x) for x in self.program.jaxpr.invars[1:-1]]
        arrays, values = kinds.count("rows"), kinds.count("values")
        of_kind = {
            "rows": iter(remaining[:arrays]),
            "values": iter(remaining[arrays : arrays + values]),
        }
        leaves = [None if kind is None else next(of_kind[kind]) for kind in kinds]
        numbers = iter(remaining[arrays + values :])
        summands: list[Array] = []

        def step(equation: Any, inputs: list[Any]) -> list[Any]:
            if not any(map(self.kind_of, equation.outvars)):
                return [None] * len(equation.outvars)
            vectors = [
                jnp.full(gradient.shape, variable.val, variable.aval.dtype)
                if _is_literal(variable)
                else x
                if self.kind_of(variable)
                else _from_number(next(numbers), variable.aval.dtype)
                for x, variable in zip(inputs, equation.invars, strict=True)
            ]
            if self._is_sum(equation):
                summands.append(vectors[0])
                is_known = len(summands) <= len(sums)
                return [sums[len(summands) - 1] if is_known else None]
            if any(vector is None for vector in vectors):
                return [None]
            return [_compute(equation, vectors)]

        updates, *new = self._walk(self.program, [gradient, *leaves, row], step)
        if len(sums) < len(summands):
            return summands[len(sums)]
        by_kind = [
            [x for x, of_leaf in zip(new, kinds, strict=True) if of_leaf == kind]
            for kind in ("rows", "values")
        ]
        return [row + updates, *by_kind[0], *by_kind[1]]

    def count_sums(self) -> int:
        """Counts the sums over rows."""
        found = []

        def step(equation: Any, inputs: list[Any]) -> list[Any]:
            del inputs
            if self._is_sum(equation):
                found.append(equation)
            return [None] * len(equation.outvars)

        self._walk(self.program, [None] * len(self.program.jaxpr.invars), step)
        return len(found)

    def _is_sum(self, equation: Any) -> bool:
        return (
            equation.primitive.name == "reduce_sum"
            and self.kind_of(equation.invars[0]) == "rows"
            and equation.params["axes"] == (1,)
        )

    def _walk(
        self,
        program: Any,
        arguments: Sequence[Any],
        step: Callable[[Any, list[Any]], list[Any]],
    ) -> list[Any]:
        """Runs a closed jaxpr, and those that it calls, operation by operation."""
        jaxpr = program.jaxpr
        if any(map(self.kind_of, jaxpr.constvars)):
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
    is_power = name == "integer_pow" and 0 < abs(equation.params["y"]) <= _MAX_FACTORS
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
