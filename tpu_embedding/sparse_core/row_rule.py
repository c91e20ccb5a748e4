"""Splits an optimizer rule into values of a step and arithmetic of the SparseCores.

A rule is written for rows `[rows, dim]`. Its jaxpr falls into two parts. What depends
on no row, such as the learning rate of a schedule, is computed outside, once a step;
the rows get its results as hyper-parameters. The rest must be elementwise: the
SparseCores apply it to each row as soon as its gradient is summed. It is traced again
on scalars, which proves that no element needs another one.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tpu_embedding.optimizers.probe import on_its_own, probe_rule
from tpu_embedding.optimizers.row_optimizer import RowOptimizer
from tpu_embedding.optimizers.table_rows import some_rows, table_rows_context
from tpu_embedding.sparse_core.flat_program import (
    FlatProgram,
    Name,
    Operation,
    flat_program,
    read,
)

_NUM_ROWS: Final = 8
"""Rows that a rule is traced on."""

_ELEMENTWISE: Final = frozenset(
    "abs add add_any and cbrt ceil clamp convert_element_type cos div eq erf exp exp2 "
    "expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne "
    "neg not or pow rem round rsqrt select_n sign sin sqrt square sub tan tanh "
    "xor".split()
)
"""Operations that XLA compiles for SparseCores, on one element of each operand."""

_SAME_ELEMENTS: Final = frozenset(
    "broadcast_in_dim copy expand_dims optimization_barrier reshape squeeze".split()
)
"""Operations that keep each element in its place, unless they change their number."""


class _NotElementwiseError(Exception):
    """Says why a rule cannot run on SparseCores."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowRule:
    """An elementwise rule, split into values of a step and arithmetic on rows.

    Attributes:
      num_slots: slot variables of the rule.
      num_hyperparameters: values that belong to no row and that rows need.
      values: takes the leaves of the state that belong to no row, such as the step
        count, in the order of the state. Returns the hyper-parameters, float32
        scalars, and the new leaves.
      rows: takes gradients, rows and slot variables `[n, width]`, then the
        hyper-parameters. Returns the new rows and slot variables.
      stablehlo: the same function of `[1, width]` arrays, hyper-parameters too.
    """

    num_slots: int
    num_hyperparameters: int
    values: Callable[[Sequence[Any]], tuple[tuple[Array, ...], list[Array]]]
    rows: Callable[..., tuple[Array, ...]]
    stablehlo: str


@functools.lru_cache(maxsize=4096)
def row_rule(optimizer: RowOptimizer, dim: int, width: int) -> RowRule | str:
    """Returns the rule for SparseCores; or why it cannot run there, in plain words.

    Args:
      optimizer: the rule of rows, which `probe_rule` accepts.
      dim: columns of the table.
      width: columns of a stored row, at least `dim`. Those beyond `dim` keep their
        values.

    Example:
      >>> import optax
      >>> from tpu_embedding.optimizers import rowwise_adagrad
      >>> rule = row_rule(RowOptimizer(transformation=optax.adam(0.1)), 4, 8)
      >>> rule.num_slots, rule.num_hyperparameters
      (2, 2)
      >>> row_rule(RowOptimizer(transformation=rowwise_adagrad(0.1)), 4, 8)
      'a slot variable has the shape () per row, not (4,)'
    """
    try:
        _check_declared(optimizer, dim)
        with on_its_own():
            return _split(optimizer, dim, width)
    except _NotElementwiseError as error:
        return str(error)


def _check_declared(optimizer: RowOptimizer, dim: int) -> None:
    """Refuses what SparseCores do not do, whatever the arithmetic of the rule is."""
    if optimizer.rows == "every":
        raise _NotElementwiseError("the rule updates every row, not the touched ones")
    if optimizer.duplicates != "sum":
        raise _NotElementwiseError("the rule needs the gradient of each occurrence")
    if optimizer.gradient_steps > 1 or optimizer.keeps_gradient:
        raise _NotElementwiseError("the rule collects the gradients of several steps")
    if optimizer.takes_model_norm:
        raise _NotElementwiseError("the rule needs the norm of all gradients")
    probed = probe_rule(optimizer, dim)
    if optimizer.takes_totals or probed.takes_totals:
        raise _NotElementwiseError("the rule needs totals over the rows of a table")
    for slot in probed.slots:
        if slot.row.shape != (dim,):
            raise _NotElementwiseError(
                f"a slot variable has the shape {slot.row.shape} per row, not ({dim},)"
            )
        if slot.row.dtype != jnp.float32:
            raise _NotElementwiseError(
                f"a slot variable is {slot.row.dtype}, not float32"
            )


def _split(optimizer: RowOptimizer, dim: int, width: int) -> RowRule:
    """Traces a rule, and splits it."""
    is_slot = [slot is not None for slot in probe_rule(optimizer, dim).leaves]
    program = _trace(optimizer, dim)
    # Values 0 and 1 are the gradients and the rows; then come the leaves of the state.
    row_inputs = [0, 1, *(2 + i for i, by_row in enumerate(is_slot) if by_row)]
    leaf_inputs = [2 + i for i, by_row in enumerate(is_slot) if not by_row]
    row_outputs, leaf_outputs = [], []
    for output, by_row in zip(program.outputs, [True, *is_slot], strict=True):
        (row_outputs if by_row else leaf_outputs).append(output)

    by_row = program.dependent(row_inputs)
    if any(isinstance(x, int) and x in by_row for x in leaf_outputs):
        raise _NotElementwiseError(
            "a value of the state that belongs to no row depends on the rows"
        )
    operations = [x for x in program.needed(row_outputs) if by_row & set(x.outputs)]
    for operation in operations:
        _check_elementwise(program, operation)
    taken = [x for operation in operations for x in operation.inputs] + row_outputs
    shared = [x for x in dict.fromkeys(filter(_is_number, taken)) if x not in by_row]
    _check_hyperparameters(program, shared)

    def values(leaves: Sequence[Any]) -> tuple[tuple[Array, ...], list[Array]]:
        env = {**program.constants, **dict(zip(leaf_inputs, leaves, strict=True))}
        for operation in program.needed([*shared, *leaf_outputs]):
            operation.run(env)
        scalars = [jnp.ravel(env[x])[0].astype(jnp.float32) for x in shared]
        # The operation wants at least one.
        return tuple(scalars or [jnp.zeros(())]), [read(env, x) for x in leaf_outputs]

    def element(*arguments: Array) -> tuple[Array, ...]:
        env = dict(zip([*row_inputs, *shared], arguments, strict=False))
        env.update({x: env[x].astype(program.avals[x].dtype) for x in shared})
        for operation in operations:
            if operation.primitive.name in _SAME_ELEMENTS:
                inputs = [read(env, x) for x in operation.inputs]
                env.update(zip(operation.outputs, inputs, strict=True))
            else:
                operation.run(env)
        return tuple(jnp.asarray(read(env, x)) for x in row_outputs)

    def rows(*arguments: Array) -> tuple[Array, ...]:
        axes = tuple(0 if x.ndim else None for x in arguments)
        new = jax.vmap(jax.vmap(element, axes), axes)(*arguments)
        if width == dim:
            return new
        is_column = jax.lax.broadcasted_iota(jnp.int32, new[0].shape, 1) < dim
        pairs = zip(new, arguments[1:], strict=False)
        return tuple(jax.lax.select(is_column, *pair) for pair in pairs)

    num_hyperparameters = max(1, len(shared))
    row = jax.ShapeDtypeStruct((1, width), jnp.float32)
    traced = jax.jit(rows, keep_unused=True).trace(
        *[row] * (len(row_inputs) + num_hyperparameters)
    )
    return RowRule(
        num_slots=sum(is_slot),
        num_hyperparameters=num_hyperparameters,
        values=values,
        rows=rows,
        stablehlo=traced.lower(lowering_platforms=("tpu",)).as_text(),
    )


def _trace(optimizer: RowOptimizer, dim: int) -> FlatProgram:
    """Traces a step of a rule: gradients, rows and state to new rows and state."""
    rows = jax.ShapeDtypeStruct((_NUM_ROWS, dim), jnp.float32)

    def init(rows: Array) -> Any:
        with table_rows_context(some_rows(_NUM_ROWS)):
            return optimizer.init(rows)

    state, tree = jax.tree.flatten(jax.eval_shape(init, rows))

    def step(gradients: Array, rows: Array, *state: Array) -> list[Array]:
        with table_rows_context(some_rows(_NUM_ROWS)):
            updates, new = optimizer.update(gradients, tree.unflatten(state), rows)
        return [rows + updates, *tree.flatten_up_to(new)]

    return flat_program(step, rows, rows, *state)


def _is_number(name: Name) -> bool:
    return isinstance(name, int)


def _check_elementwise(program: FlatProgram, operation: Operation) -> None:
    """Refuses an operation on rows that needs more than one element of an operand."""
    name = operation.primitive.name
    sizes = [
        np.size(x) if isinstance(x, np.ndarray) else program.avals[x].size
        for x in operation.inputs
    ]
    if name in _SAME_ELEMENTS:
        if sizes[0] != program.avals[operation.outputs[0]].size:
            raise _NotElementwiseError(f"{name} copies the elements of a row")
    elif name not in _ELEMENTWISE:
        raise _NotElementwiseError(
            f"{name} mixes the elements of a row, or is unknown to SparseCores"
        )


def _check_hyperparameters(program: FlatProgram, shared: Sequence[int]) -> None:
    """Refuses values of a step that are no scalars, or that float32 cannot hold."""
    uniform = {i for i, aval in enumerate(program.avals) if aval.size == 1}
    uniform |= {i for i, x in program.constants.items() if np.unique(x).size == 1}
    for operation in program.operations:
        is_by_element = operation.primitive.name in _ELEMENTWISE | _SAME_ELEMENTS
        if is_by_element and operation.operands <= uniform:
            uniform.update(operation.outputs)
    for value in shared:
        aval = program.avals[value]
        if value not in uniform:
            raise _NotElementwiseError(
                f"a value of shape {aval.shape} differs between the elements of a row"
            )
        if not (aval.dtype == bool or jnp.issubdtype(aval.dtype, jnp.floating)):
            raise _NotElementwiseError(f"rows need a scalar of dtype {aval.dtype}")
