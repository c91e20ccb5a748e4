"""Lowers an optimizer rule to a kernel body, and scalars that are computed outside it.

A SparseCore computes with vectors of a few elements, and knows some operations only. So
a traced rule is split in two. XLA computes the values that belong to no row, such as a
learning rate that falls with the step, or a bias correction. They are scalars, which
the kernel receives. The kernel does the rest, vector by vector. A value of the
row as a whole, such as its mean square, fills a vector of its own. For a sum over the
row, the kernel first goes through all vectors of the row.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from tpu_embedding.optimizers.analysis.operations import facts_of, runs_in_kernels
from tpu_embedding.optimizers.analysis.rule_program import (
    ROWS,
    Constant,
    RuleOperation,
    Shape,
    depends_on_rows,
)
from tpu_embedding.optimizers.analysis.trace import (
    TracedRule,
    UntraceableRule,
    trace_rule,
)
from tpu_embedding.optimizers.analysis.walker import walk
from tpu_embedding.optimizers.row_optimizer import RowOptimizer
from tpu_embedding.rows.kernels.kernel_access import KernelBody


@dataclasses.dataclass(frozen=True)
class LoweredRule:
    """An optimizer rule lowered to a kernel body plus the scalars computed outside it.

    Attributes:
      prepare: given the leaves of the state, with None for slot variables, returns the
        scalars that the kernel takes, float32, and the leaves of the new state, with
        None for slot variables.
      kernel_body: what the kernel does. Its arrays are the table and the slot variables
        `[rows, dim]`, its values the slot variables `[rows]`.
    """

    prepare: Callable[[Sequence[Any]], tuple[list[Float[Array, ""]], list[Any]]]
    kernel_body: KernelBody


@dataclasses.dataclass(frozen=True)
class Refusal:
    """The answer that a rule cannot be lowered.

    Attributes:
      reason: why, as in "it takes totals over the rows of a table".
    """

    reason: str


@functools.lru_cache(maxsize=256)
def lower_to_kernel(
    optimizer: optax.GradientTransformation | RowOptimizer, dim: int
) -> LoweredRule | Refusal:
    """Lowers a rule to a kernel body for rows of `dim`.

    That is possible if all arithmetic on rows is float32, by operations that
    SparseCores run, and is done to each element, to one value of each row, or is a sum
    over the row.

    Args:
      optimizer: a rule of rows `[rows, dim]`.
      dim: columns of the table.

    Returns:
      The lowered rule, or a `Refusal` with the reason.

    Example:
      >>> import tpu_embedding as te
      >>> lower_to_kernel(te.optimizers.adagrad(0.1), 8).kernel_body.num_sums
      0
      >>> lower_to_kernel(te.optimizers.rowwise_adagrad(0.1), 8).kernel_body.num_sums
      1
      >>> lower_to_kernel(te.optimizers.adafactor(0.1), 8)
      Refusal(reason='it takes totals over the rows of a table')
    """
    trace = trace_rule(optimizer, (dim,))
    if isinstance(trace, UntraceableRule):
        return Refusal(f"it cannot be traced: {trace.reason}")
    if trace.takes_totals:
        return Refusal("it takes totals over the rows of a table")
    lowering = _Lowering(trace)
    try:
        lowering.check()
    except _CannotLowerError as error:
        return Refusal(str(error))
    kernel_body = KernelBody(run=lowering.run, num_sums=lowering.count_sums())
    return LoweredRule(prepare=lowering.prepare, kernel_body=kernel_body)


class _CannotLowerError(Exception):
    """A rule does something that no kernel can."""


_Kind = Literal["rows", "row_scalars", None]
"""Elements of rows, one scalar for each row, or a value that belongs to no row."""


@dataclasses.dataclass(frozen=True)
class _Lowering:
    """The steps of lowering one traced rule.

    `prepare` and `run` walk through the same program in the same order. A scalar that
    an operation on rows takes is appended to a list by `prepare`, and read from it by
    `run`. Each knows nothing (None) of the values that the other computes.
    """

    trace: TracedRule

    def kind_of(self, value: Any) -> _Kind:
        """Returns what an operand, or a result, belongs to."""
        shape: Shape = value.shape
        if shape == (ROWS, *self.trace.row_shape):
            return "rows"
        return "row_scalars" if shape in ((ROWS,), (ROWS, 1)) else None

    def check(self) -> None:
        """Raises `_CannotLowerError` if no kernel can run the rule."""
        trace = self.trace
        if not trace.returns_rows:
            raise _CannotLowerError("its updates are not one row for each row")
        new_state = trace.update.outputs[1:]
        leaves = zip(trace.state_names, trace.old_state, new_state, strict=True)
        for name, old, new in leaves:
            if self.kind_of(old) != self.kind_of(new):
                raise _CannotLowerError(f"{name!r} of its state changes its shape")
            if not depends_on_rows(old.shape):
                continue
            if self.kind_of(old) is None:
                raise _CannotLowerError(f"slot variable {name!r} is not one per row")
            if old.dtype != jnp.float32:
                raise _CannotLowerError(f"slot variable {name!r} is {old.dtype}")
        uses = [x for operation in trace.update.operations for x in operation.inputs]
        if any(fact in (*uses, *new_state) for fact in trace.row_facts):
            raise _CannotLowerError("it asks which rows are used or looked up")
        outline = [
            None if self.kind_of(x) else jax.ShapeDtypeStruct(x.shape, x.dtype)
            for x in trace.old_state
        ]
        jax.eval_shape(self.prepare, outline)

    def prepare(self, state: Sequence[Any]) -> tuple[list[Float[Array, ""]], list[Any]]:
        """Computes the scalars and the part of the state that belongs to no row."""
        scalars: list[Array] = []

        def step(operation: RuleOperation, inputs: list[Any]) -> Sequence[Any]:
            self._check_operands(operation)
            if not any(map(self.kind_of, operation.outputs)):
                return operation.bind(inputs)
            scalars.extend(
                _to_scalar(operation, x)
                for x, operand in zip(inputs, operation.inputs, strict=True)
                if not self.kind_of(operand) and not _is_literal(operand)
            )
            return [None]

        facts = [None] * len(self.trace.row_facts)
        _, *new = walk(self.trace.update, [None, *state, None, *facts], step)
        outputs = self.trace.update.outputs[1:]
        new = [
            None if self.kind_of(operand) else x
            for x, operand in zip(new, outputs, strict=True)
        ]
        return scalars, new

    def run(self, sums: Sequence[Array], gradient: Array, *vectors: Array) -> Any:
        """Computes the part of the rule that belongs to rows, on vectors."""
        row, *remaining = vectors
        kinds = [self.kind_of(x) for x in self.trace.old_state]
        num_arrays, num_values = kinds.count("rows"), kinds.count("row_scalars")
        of_kind = {
            "rows": iter(remaining[:num_arrays]),
            "row_scalars": iter(remaining[num_arrays : num_arrays + num_values]),
        }
        leaves = [None if kind is None else next(of_kind[kind]) for kind in kinds]
        scalars = iter(remaining[num_arrays + num_values :])
        summands: list[Array] = []

        def step(operation: RuleOperation, inputs: list[Any]) -> Sequence[Any]:
            if not any(map(self.kind_of, operation.outputs)):
                return [None] * len(operation.outputs)
            operands = [
                jnp.full(gradient.shape, operand.value, operand.dtype)
                if isinstance(operand, Constant) and operand.is_literal
                else x
                if self.kind_of(operand)
                else _from_scalar(next(scalars), operand.dtype)
                for x, operand in zip(inputs, operation.inputs, strict=True)
            ]
            if self._is_sum(operation):
                summands.append(operands[0])
                is_known = len(summands) <= len(sums)
                return [sums[len(summands) - 1] if is_known else None]
            if any(operand is None for operand in operands):
                return [None]
            return [_compute(operation, operands)]

        facts = [None] * len(self.trace.row_facts)
        arguments = [gradient, *leaves, row, *facts]
        updates, *new = walk(self.trace.update, arguments, step)
        if len(sums) < len(summands):
            return summands[len(sums)]
        by_kind = [
            [x for x, of_leaf in zip(new, kinds, strict=True) if of_leaf == kind]
            for kind in ("rows", "row_scalars")
        ]
        return [row + updates, *by_kind[0], *by_kind[1]]

    def count_sums(self) -> int:
        """Counts the sums over rows."""
        found = []

        def step(operation: RuleOperation, inputs: list[Any]) -> list[Any]:
            del inputs
            if self._is_sum(operation):
                found.append(operation)
            return [None] * len(operation.outputs)

        walk(self.trace.update, [None] * len(self.trace.update.inputs), step)
        return len(found)

    def _is_sum(self, operation: RuleOperation) -> bool:
        return (
            operation.name == "reduce_sum"
            and self.kind_of(operation.inputs[0]) == "rows"
            and operation.params["axes"] == (1,)
        )

    def _check_operands(self, operation: RuleOperation) -> None:
        """Raises `_CannotLowerError` if no kernel can run an operation."""
        operands = (*operation.inputs, *operation.outputs)
        if not any(depends_on_rows(operand.shape) for operand in operands):
            return
        name = repr(operation.name)
        if not any(map(self.kind_of, operation.outputs)):
            raise _CannotLowerError(f"operation {name} mixes rows")
        if self._is_sum(operation):
            return
        if operation.name == "reduce_sum" and self.kind_of(operands[0]) == "rows":
            raise _CannotLowerError(f"operation {name} is not along rows")
        _check_operation(operation)
        for operand in operation.inputs:
            if depends_on_rows(operand.shape) and not self.kind_of(operand):
                raise _CannotLowerError(
                    f"operation {name} takes rows of shape {operand.shape}"
                )
            if depends_on_rows(operand.shape) and isinstance(operand, Constant):
                raise _CannotLowerError(f"operation {name} has a constant for each row")


def _check_operation(operation: RuleOperation) -> None:
    name = repr(operation.name)
    if not runs_in_kernels(operation):
        raise _CannotLowerError(f"operation {name} does not run on SparseCores")
    (result,) = operation.outputs
    dtypes = {jnp.dtype(operand.dtype) for operand in operation.inputs}
    if operation.name not in _COMPARISONS:
        dtypes.add(jnp.dtype(result.dtype))
    types = facts_of(operation).kernel_types
    for dtype in dtypes:
        if dtype.name not in types:
            raise _CannotLowerError(
                f"operation {name} of {dtype} does not run on SparseCores"
            )


_COMPARISONS = frozenset("eq ge gt le lt ne".split())


def _compute(operation: RuleOperation, vectors: list[Array]) -> Array:
    if facts_of(operation).kernel_keeps_vector:
        return vectors[0]
    if operation.name == "square":
        return vectors[0] * vectors[0]
    if operation.name == "integer_pow":
        return _power(vectors[0], operation.params["y"])
    return operation.bind(vectors)[0]


def _power(vector: Array, exponent: int) -> Array:
    product = functools.reduce(jnp.multiply, [vector] * abs(exponent))
    return product if exponent > 0 else 1 / product


def _to_scalar(operation: RuleOperation, value: Any) -> Float[Array, ""]:
    dtype = jnp.result_type(value)
    if np.shape(value) != () or dtype not in (jnp.float32, jnp.bool_):
        raise _CannotLowerError(
            f"operation {operation.name!r} takes {dtype}{list(np.shape(value))}, "
            "not a float32 scalar"
        )
    return jnp.asarray(value, jnp.float32)


def _from_scalar(vector: Array, dtype: Any) -> Array:
    return vector != 0 if dtype == jnp.bool_ else vector


def _is_literal(operand: Any) -> bool:
    return isinstance(operand, Constant) and operand.is_literal
