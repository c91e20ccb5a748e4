"""Turns an optimizer rule into values of a step and arithmetic of the SparseCores.

The probe has split the rule: what depends on no row, such as the learning rate of a
schedule, is computed outside, once per step; the rows get such values as
hyperparameters. The other half must be elementwise: the SparseCores apply it to each
row as soon as its gradient is summed. Here it is evaluated on scalars, one element of
each row and slot.
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
from tpu_embedding.optimizers.rule_split import (
    Constant,
    Equation,
    Program,
    SplitRule,
    compute_by_jax,
    rows_dependence,
)

_ELEMENTWISE: Final = frozenset(
    "abs add add_any and cbrt ceil clamp convert_element_type cos div eq exp exp2 "
    "expm1 floor ge gt integer_pow le log log1p logistic lt max min mul ne neg not or "
    "pow rem round rsqrt select_n sign sin sqrt square sub tan tanh xor".split()
)
"""Operations that libtpu compiles for SparseCores, on one element of each operand.

It rejects `erf`, `lgamma` and `is_finite`, and converts no float16."""

_SAME_ELEMENTS: Final = frozenset(
    "broadcast_in_dim copy expand_dims optimization_barrier reshape squeeze".split()
)
"""Operations that keep each element in its place, unless they change their number."""

_DTYPES: Final = ("bool", "bfloat16", "float32", "int32")
"""Element types of the arithmetic on rows."""


class _NotElementwiseError(Exception):
    """Says why a rule cannot run on SparseCores."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowRule:
    """An elementwise rule, split into values of a step and arithmetic on rows.

    Attributes:
      num_slots: slot variables of the rule.
      num_hyperparameters: values shared by all rows that rows need.
      values: takes the leaves of the state that all rows share, such as the step
        count, in the order of the state. Returns the hyperparameters, float32
        scalars, and the new leaves.
      rows: takes gradients, rows and slot variables `[n, width]`, then the
        hyperparameters. Returns the new rows and slot variables.
      stablehlo: the same function of `[1, width]` arrays, also for hyperparameters.
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
      'a slot variable has float32[] per row, not float32[4]'
    """
    try:
        _check_declared(optimizer, dim)
        with on_its_own():
            return _elementwise_rule(optimizer, dim, width)
    except _NotElementwiseError as error:
        return str(error)


def _check_declared(optimizer: RowOptimizer, dim: int) -> None:
    """Rejects what SparseCores do not do, whatever the arithmetic of the rule is."""
    probed = probe_rule(optimizer, dim)
    problems = {
        "the rule updates every row, not the touched ones": optimizer.moves_every_row,
        "the rule needs the gradient of each occurrence": optimizer.sees_occurrences,
        "the rule needs the norm of all gradients": optimizer.takes_model_norm,
        "the rule needs totals over the rows of a table": probed.takes_totals,
        "the rule sets rows, whatever they were": optimizer.sets_rows,
    }
    for reason, is_so in problems.items():
        if is_so:
            raise _NotElementwiseError(reason)
    for slot in probed.slots:
        if slot.row.shape != (dim,) or slot.row.dtype != jnp.float32:
            raise _NotElementwiseError(
                f"a slot variable has {slot.row.dtype}{list(slot.row.shape)} per row, "
                f"not float32[{dim}]"
            )


def _elementwise_rule(optimizer: RowOptimizer, dim: int, width: int) -> RowRule:
    """Returns the split of a rule, if its rows are elementwise."""
    probed = probe_rule(optimizer, dim)
    split, num_slots = probed.split, len(probed.slots)
    _check_rows(split.row_program, num_slots, split.num_hyperparameters)
    rows = functools.partial(_compute_rows, split, num_slots, dim)
    # The operation wants at least one hyperparameter.
    num_hyperparameters = max(1, split.num_hyperparameters)
    row = jax.ShapeDtypeStruct((1, width), jnp.float32)
    program = jax.jit(rows, keep_unused=True).trace(
        *[row] * (2 + num_slots + num_hyperparameters)
    )
    return RowRule(
        num_slots=num_slots,
        num_hyperparameters=num_hyperparameters,
        values=functools.partial(_compute_values, split),
        rows=rows,
        stablehlo=program.lower(lowering_platforms=("tpu",)).as_text(),
    )


def _check_rows(program: Program, num_slots: int, num_hyperparameters: int) -> None:
    """Rejects arithmetic on rows that needs more than one element of an operand.

    Args:
      program: from `SplitRule.row_program`.
      num_slots: slot variables of the rule.
      num_hyperparameters: its hyperparameters.
    """
    # All rows of the operation are touched.
    by_row = [True, True, False, *[True] * num_slots, *[False] * num_hyperparameters]
    depends = rows_dependence(program, by_row)
    for equation in program.equations:
        for atom in equation.inputs:
            if isinstance(atom, Constant):
                _check_uniform(atom.aval, np.unique(atom.value).size == 1)
        if depends.isdisjoint(equation.inputs):
            is_uniform = equation.name in _ELEMENTWISE | _SAME_ELEMENTS
            _check_uniform(equation.outputs[0].aval, is_uniform)
        else:
            _check_elementwise(equation)
    for given in program.inputs[len(program.inputs) - num_hyperparameters :]:
        _check_uniform(given.aval, given.aval.size == 1)
        if given.aval.dtype.name not in ("bool", "bfloat16", "float16", "float32"):
            raise _NotElementwiseError(
                f"rows need a scalar of dtype {given.aval.dtype}"
            )


def _check_uniform(aval: Any, is_uniform: bool) -> None:
    """Rejects a value shared by all rows, unless it is a scalar."""
    if not is_uniform:
        raise _NotElementwiseError(
            f"a value of shape {aval.shape} differs between the elements of a row"
        )


def _check_elementwise(equation: Equation) -> None:
    """Rejects an operation on rows that needs more than one element of an operand."""
    name, results = equation.name, [x.aval for x in equation.outputs]
    if name in _SAME_ELEMENTS:
        if [x.aval.size for x in equation.inputs] != [x.size for x in results]:
            raise _NotElementwiseError(f"{name} copies the elements of a row")
    elif name not in _ELEMENTWISE:
        raise _NotElementwiseError(
            f"{name} mixes the elements of a row, or SparseCores do not have it"
        )
    for result in results:
        if result.dtype.name not in _DTYPES:
            raise _NotElementwiseError(f"SparseCores have no {result.dtype}")


def _compute_values(
    split: SplitRule, scalars: Sequence[Any]
) -> tuple[tuple[Array, ...], list[Array]]:
    """Computes what all rows share; see `RowRule.values`."""
    hyperparameters, new_scalars = split.values(scalars)
    converted = tuple(jnp.ravel(x)[0].astype(jnp.float32) for x in hyperparameters)
    return converted or (jnp.zeros(()),), new_scalars


def _compute_rows(
    split: SplitRule, num_slots: int, dim: int, *arguments: Array
) -> tuple[Array, ...]:
    """Computes new rows and slots, element by element; see `RowRule.rows`."""

    def new_elements(*scalars: Array) -> tuple[Array, ...]:
        gradient, row, *others = scalars
        slots, hyperparameters = others[:num_slots], others[num_slots:]
        types = split.row_program.inputs[3 + num_slots :]
        # A rule without hyperparameters is passed an unused one, which zip drops.
        given = [
            x.astype(y.aval.dtype) for x, y in zip(hyperparameters, types, strict=False)
        ]
        update, *new_slots = split.row_program.evaluate(
            [gradient, row, np.bool_(True), *slots, *given],
            _compute_element,
            lambda constant: np.ravel(constant.value)[0],
        )
        return tuple(jnp.asarray(x) for x in (row + update, *new_slots))

    axes = tuple(0 if x.ndim else None for x in arguments)
    new = jax.vmap(jax.vmap(new_elements, axes), axes)(*arguments)
    if new[0].shape[1] == dim:
        return new
    is_column = jax.lax.broadcasted_iota(jnp.int32, new[0].shape, 1) < dim
    pairs = zip(new, arguments[1:], strict=False)
    return tuple(jax.lax.select(is_column, *pair) for pair in pairs)


def _compute_element(equation: Equation, operands: Sequence[Any]) -> Sequence[Any]:
    """Returns one element of each result of an equation."""
    if equation.name in _SAME_ELEMENTS:
        return operands
    return compute_by_jax(equation, operands)
