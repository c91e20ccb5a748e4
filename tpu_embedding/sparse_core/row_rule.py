"""Turns an optimizer rule into per-step values and SparseCore arithmetic.

First, `split_rule` separates the values that are computed once per step. SparseCores
apply the remaining arithmetic to each row as soon as its gradient is summed. This
arithmetic must therefore be elementwise, and this module evaluates it on scalars.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal
from jaxtyping import Array

from tpu_embedding.optimizers.jaxprs import (
    ClosedJaxpr,
    are_among,
    compute_by_jax,
    dependent_values,
    evaluate,
)
from tpu_embedding.optimizers.probe import on_its_own, probe_rule
from tpu_embedding.optimizers.row_optimizer import RowOptimizer
from tpu_embedding.sparse_core.rule_split import SplitRule, split_rule

_ELEMENTWISE: Final = frozenset(
    "abs add add_any and cbrt ceil clamp convert_element_type cos div eq exp exp2 "
    "expm1 floor ge gt integer_pow le log log1p logistic lt max min mul ne neg not or "
    "pow rem round rsqrt select_n sign sin sqrt square sub tan tanh xor".split()
)
"""Elementwise operations that libtpu compiles for SparseCores.

libtpu rejects `erf`, `lgamma`, `is_finite` and conversions of float16."""

_SAME_ELEMENTS: Final = frozenset(
    "broadcast_in_dim copy expand_dims optimization_barrier reshape squeeze".split()
)
"""Operations that leave all elements unchanged if the element count stays the same."""

_DTYPES: Final = ("bool", "bfloat16", "float32", "int32")
"""Dtypes that SparseCores support in arithmetic on rows."""


class _NotElementwiseError(Exception):
    """The reason why a rule can't run on SparseCores."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowRule:
    """An elementwise rule, split into per-step values and arithmetic on rows.

    Attributes:
      num_hyperparameters: number of per-step values that `rows` takes, at least 1.
      values: maps the state leaves that all rows share, in state order, to float32
        hyperparameters and the new leaves.
      rows: maps gradients, rows and slot variables `[n, width]`, followed by
        hyperparameters, to new rows and slot variables.
      stablehlo: `rows` as text. Every argument, including hyperparameters, is
        `[1, width]`.
    """

    num_slots: int
    num_hyperparameters: int
    values: Callable[[Sequence[Any]], tuple[tuple[Array, ...], list[Array]]]
    rows: Callable[..., tuple[Array, ...]]
    stablehlo: str


@functools.lru_cache(maxsize=4096)
def row_rule(optimizer: RowOptimizer, dim: int, width: int) -> RowRule | str:
    """Builds the rule for SparseCores, or explains why they can't run it.

    Stored rows have `width >= dim` columns. Columns past `dim` don't change.

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
        # `on_its_own`, because `update` calls this while a step is traced under a mesh.
        with on_its_own():
            return _elementwise_rule(optimizer, dim, width)
    except _NotElementwiseError as error:
        return str(error)


def _check_declared(optimizer: RowOptimizer, dim: int) -> None:
    probed = probe_rule(optimizer, dim)
    problems = {
        "the rule updates every row, not only touched ones": optimizer.moves_every_row,
        "the rule needs the gradient of each occurrence": optimizer.sees_occurrences,
        "the rule needs the norm of all gradients": optimizer.takes_model_norm,
        "the rule needs totals over the rows of a table": probed.takes_totals,
        "the rule overwrites rows instead of adding to them": optimizer.sets_rows,
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
    probed = probe_rule(optimizer, dim)
    split, num_slots = split_rule(probed), len(probed.slots)
    _check_rows(split.row_jaxpr, num_slots, split.num_hyperparameters)
    rows = functools.partial(_compute_rows, split, num_slots, dim)
    # The operation needs at least one hyperparameter.
    num_hyperparameters = max(1, split.num_hyperparameters)
    row = jax.ShapeDtypeStruct((1, width), jnp.float32)
    # The operation passes all operands to the rule, so unused ones must stay.
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


def _check_rows(closed: ClosedJaxpr, num_slots: int, num_hyperparameters: int) -> None:
    """Rejects arithmetic on rows that needs several elements of an operand."""
    jaxpr = closed.jaxpr
    constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    # The third input tells whether a row was touched, which is always True here.
    by_row = [True, True, False, *[True] * num_slots, *[False] * num_hyperparameters]
    depends = dependent_values(jaxpr, by_row)
    for equation in jaxpr.eqns:
        for atom in equation.invars:
            value = atom.val if isinstance(atom, Literal) else constants.get(atom)
            if value is not None:
                _check_uniform(atom.aval, np.unique(value).size == 1)
        if any(are_among(equation.invars, depends)):
            _check_elementwise(equation)
        else:
            is_uniform = equation.primitive.name in _ELEMENTWISE | _SAME_ELEMENTS
            _check_uniform(equation.outvars[0].aval, is_uniform)
    for given in jaxpr.invars[len(jaxpr.invars) - num_hyperparameters :]:
        _check_uniform(given.aval, given.aval.size == 1)
        if given.aval.dtype.name not in ("bool", "bfloat16", "float16", "float32"):
            raise _NotElementwiseError(
                f"the rule passes a scalar of dtype {given.aval.dtype} to the rows"
            )


def _check_uniform(aval: Any, is_uniform: bool) -> None:
    if not is_uniform:
        raise _NotElementwiseError(
            f"a value of shape {aval.shape} differs between the elements of a row"
        )


def _check_elementwise(equation: JaxprEqn) -> None:
    name, results = equation.primitive.name, [x.aval for x in equation.outvars]
    if name in _SAME_ELEMENTS:
        if [x.aval.size for x in equation.invars] != [x.size for x in results]:
            raise _NotElementwiseError(f"{name} repeats the elements of a row")
    elif name not in _ELEMENTWISE:
        raise _NotElementwiseError(
            f"{name} is not elementwise, or SparseCores do not support it"
        )
    for result in results:
        if result.dtype.name not in _DTYPES:
            raise _NotElementwiseError(f"SparseCores do not support {result.dtype}")


def _compute_values(
    split: SplitRule, scalars: Sequence[Any]
) -> tuple[tuple[Array, ...], list[Array]]:
    hyperparameters, new_scalars = split.values(scalars)
    # `_check_rows` made sure that all elements are equal.
    converted = tuple(jnp.ravel(x)[0].astype(jnp.float32) for x in hyperparameters)
    return converted or (jnp.zeros(()),), new_scalars


def _compute_rows(
    split: SplitRule, num_slots: int, dim: int, *arguments: Array
) -> tuple[Array, ...]:
    def new_elements(*scalars: Array) -> tuple[Array, ...]:
        gradient, row, *others = scalars
        slots, hyperparameters = others[:num_slots], others[num_slots:]
        types = split.row_jaxpr.in_avals[3 + num_slots :]
        # If the rule needs no hyperparameter, zip drops the unused one.
        given = [
            x.astype(y.dtype) for x, y in zip(hyperparameters, types, strict=False)
        ]
        # All elements of a constant are equal.
        consts = [np.ravel(x)[0] for x in split.row_jaxpr.consts]
        update, *new_slots = evaluate(
            ClosedJaxpr(split.row_jaxpr.jaxpr, consts),
            [gradient, row, np.bool_(True), *slots, *given],
            _compute_element,
        )
        return tuple(jnp.asarray(x) for x in (row + update, *new_slots))

    # Two `vmap`s apply the rule to scalars, so that nothing can mix elements.
    axes = tuple(0 if x.ndim else None for x in arguments)
    new = jax.vmap(jax.vmap(new_elements, axes), axes)(*arguments)
    if new[0].shape[1] == dim:
        return new
    # A rule may change the zeros past `dim`, for example by dividing 0 by 0.
    is_column = jax.lax.broadcasted_iota(jnp.int32, new[0].shape, 1) < dim
    pairs = zip(new, arguments[1:], strict=False)
    return tuple(jax.lax.select(is_column, *pair) for pair in pairs)


def _compute_element(equation: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    if equation.primitive.name in _SAME_ELEMENTS:
        return operands
    return compute_by_jax(equation, operands)
