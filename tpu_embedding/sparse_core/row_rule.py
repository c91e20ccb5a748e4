"""Splits an optimizer rule into values of a step and arithmetic of the SparseCores.

A rule is written for rows `[rows, dim]`. Its jaxpr falls into two parts. What depends
on no row, such as the learning rate of a schedule, is computed outside, once a step;
the rows get such values as hyper-parameters. The rest must be elementwise: the
SparseCores apply it to each row as soon as its gradient is summed. It is run again on
scalars, one element of each row and slot, which proves that no other one is needed.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal
from jaxtyping import Array

from tpu_embedding.optimizers.probe import on_its_own, probe_rule
from tpu_embedding.optimizers.row_optimizer import RowOptimizer
from tpu_embedding.optimizers.table_rows import some_rows, table_rows_context

_NUM_ROWS: Final = 8
"""Rows that a rule is traced on."""

_ELEMENTWISE: Final = frozenset(
    "abs add add_any and cbrt ceil clamp convert_element_type cos div eq exp exp2 "
    "expm1 floor ge gt integer_pow le log log1p logistic lt max min mul ne neg not or "
    "pow rem round rsqrt select_n sign sin sqrt square sub tan tanh xor".split()
)
"""Operations that libtpu compiles for SparseCores, on one element of each operand.

It refuses `erf`, `lgamma` and `is_finite`, and converts no float16."""

_SAME_ELEMENTS: Final = frozenset(
    "broadcast_in_dim copy expand_dims optimization_barrier reshape squeeze".split()
)
"""Operations that keep each element in its place, unless they change their number."""

_DTYPES: Final = ("bool", "bfloat16", "float32", "int32")
"""Element types of the arithmetic on rows."""

_CALLS: Final = dict(
    jit="jaxpr", custom_jvp_call="call_jaxpr", custom_vjp_call="call_jaxpr"
)
"""Operations that call a function, and the parameter that holds it."""


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
      'a slot variable has float32[] per row, not float32[4]'
    """
    try:
        _check_declared(optimizer, dim)
        with on_its_own():
            return _split(optimizer, dim, width)
    except _NotElementwiseError as error:
        return str(error)


def _check_declared(optimizer: RowOptimizer, dim: int) -> None:
    """Refuses what SparseCores do not do, whatever the arithmetic of the rule is."""
    probed = probe_rule(optimizer, dim)
    refused = {
        "the rule updates every row, not the touched ones": optimizer.rows == "every",
        "the rule needs the gradient of each occurrence": optimizer.duplicates != "sum",
        "the rule collects gradients of several steps": optimizer.gradient_steps > 1,
        "the rule needs the norm of all gradients": optimizer.takes_model_norm,
        "the rule needs totals over the rows of a table": probed.takes_totals,
        "the state holds the gradient of all rows": optimizer.keeps_gradient,
        "the rule sets rows, whatever they were": optimizer.sets_rows,
    }
    for reason, is_so in refused.items():
        if is_so:
            raise _NotElementwiseError(reason)
    for slot in probed.slots:
        if slot.row.shape != (dim,) or slot.row.dtype != jnp.float32:
            raise _NotElementwiseError(
                f"a slot variable has {slot.row.dtype}{list(slot.row.shape)} per row, "
                f"not float32[{dim}]"
            )


def _split(optimizer: RowOptimizer, dim: int, width: int) -> RowRule:
    """Traces a rule, and splits it."""
    is_slot = [slot is not None for slot in probe_rule(optimizer, dim).leaves]
    rule = _TracedRule(
        jaxpr=_trace(optimizer, dim), is_by_row=(True, True, *is_slot), dim=dim
    )
    others = zip(rule.jaxpr.in_avals[2:], is_slot, strict=True)
    leaves = [
        jax.ShapeDtypeStruct(x.shape, x.dtype) for x, by_row in others if not by_row
    ]
    num_hyperparameters = len(jax.eval_shape(rule.values, leaves)[0])
    row = jax.ShapeDtypeStruct((1, width), jnp.float32)
    program = jax.jit(rule.rows, keep_unused=True).trace(
        *[row] * (rule.num_elements + num_hyperparameters)
    )
    return RowRule(
        num_slots=sum(is_slot),
        num_hyperparameters=num_hyperparameters,
        values=rule.values,
        rows=rule.rows,
        stablehlo=program.lower(lowering_platforms=("tpu",)).as_text(),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _TracedRule:
    """The program of a rule, of which each half can be run.

    Attributes:
      jaxpr: maps gradient, row and leaves of the state to new row and leaves.
      is_by_row: which of its arguments belong to rows: gradient, row and slots do.
      dim: columns of the table.
    """

    jaxpr: Any
    is_by_row: tuple[bool, ...]
    dim: int

    @property
    def num_elements(self) -> int:
        """Number of arguments that belong to rows."""
        return sum(self.is_by_row)

    def values(self, leaves: Sequence[Any]) -> tuple[tuple[Array, ...], list[Array]]:
        """Computes what belongs to no row; see `RowRule.values`."""
        _, new, a_run = self._run([None] * self.num_elements, leaves, None)
        if any(isinstance(x, _OfRows) for x in new):
            raise _NotElementwiseError(
                "a value of the state that belongs to no row depends on the rows"
            )
        scalars = tuple(x.astype(jnp.float32) for x in a_run.shared.values())
        # The operation wants at least one.
        return scalars or (jnp.zeros(()),), [getattr(x, "value", x) for x in new]

    def rows(self, *arguments: Array) -> tuple[Array, ...]:
        """Computes new rows and slots, element by element; see `RowRule.rows`."""
        axes = tuple(0 if x.ndim else None for x in arguments)
        new = jax.vmap(jax.vmap(self._element, axes), axes)(*arguments)
        if new[0].shape[1] == self.dim:
            return new
        is_column = jax.lax.broadcasted_iota(jnp.int32, new[0].shape, 1) < self.dim
        pairs = zip(new, arguments[1:], strict=False)
        return tuple(jax.lax.select(is_column, *pair) for pair in pairs)

    def _element(self, *arguments: Array) -> tuple[Array, ...]:
        """Computes one element of the new row and of each slot."""
        elements, given = arguments[: self.num_elements], arguments[self.num_elements :]
        unknown = [None] * (len(self.is_by_row) - self.num_elements)
        new, _, _ = self._run(elements, unknown, iter(given))
        return tuple(jnp.asarray(x) for x in new)

    def _run(
        self,
        elements: Sequence[Any],
        leaves: Sequence[Any],
        given: Iterator[Any] | None,
    ) -> tuple[list[Any], list[Any], "_Run"]:
        """Returns the new elements and leaves, and the run that computed them."""
        of_rows, others, a_run = iter(elements), iter(leaves), _Run({}, given)
        variables = zip(self.is_by_row, self.jaxpr.jaxpr.invars, strict=True)
        inputs = [
            _OfRows(next(of_rows)) if by_row else _of_step(variable, next(others))
            for by_row, variable in variables
        ]
        # The program returns no gradient.
        outputs = a_run.walk(self.jaxpr, inputs)
        new = list(zip(outputs, self.is_by_row[1:], strict=True))
        new_elements = [a_run.element(x) for x, by_row in new if by_row]
        return new_elements, [x for x, by_row in new if not by_row], a_run


def _trace(optimizer: RowOptimizer, dim: int) -> Any:
    """Traces a step of a rule: gradients, rows and state to new rows and state."""
    rows = jax.ShapeDtypeStruct((_NUM_ROWS, dim), jnp.float32)

    with table_rows_context(some_rows(_NUM_ROWS)):
        state, tree = jax.tree.flatten(jax.eval_shape(optimizer.init, rows))

        def step(gradients: Array, rows: Array, *state: Array) -> list[Array]:
            updates, new = optimizer.update(gradients, tree.unflatten(state), rows)
            return [rows + updates, *tree.flatten_up_to(new)]

        return jax.make_jaxpr(step)(rows, rows, *state)


class _OfRows(NamedTuple):
    """A value that depends on rows: a scalar, one element of it."""

    element: Any


@dataclasses.dataclass(frozen=True, eq=False)
class _OfStep:
    """A value that depends on no row.

    Attributes:
      value: the array; None while rows are computed.
      aval: its shape and dtype.
      is_uniform: True if all elements are equal.
    """

    value: Any
    aval: Any
    is_uniform: bool


def _of_step(variable: Any, value: Any, is_uniform: bool = False) -> _OfStep:
    return _OfStep(value, variable.aval, is_uniform or variable.aval.size == 1)


@dataclasses.dataclass(frozen=True)
class _Run:
    """One run of a rule. Literals are NumPy arrays.

    Attributes:
      shared: the values of the step that rows need, in the order in which they ask.
      given: gives these values, while rows are computed; None: the run computes them.
    """

    shared: dict[_OfStep, Array]
    given: Iterator[Array] | None

    def walk(self, jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
        """Returns the results of a jaxpr."""
        names = dict(zip(jaxpr.jaxpr.invars, inputs, strict=True))
        for variable, value in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True):
            names[variable] = _of_step(variable, value, np.unique(value).size == 1)

        def read(atom: Any) -> Any:
            if isinstance(atom, Literal):
                return np.asarray(atom.val, atom.aval.dtype)
            return names[atom]

        for equation in jaxpr.jaxpr.eqns:
            values = [read(x) for x in equation.invars]
            called = equation.params.get(_CALLS.get(equation.primitive.name, ""))
            if called is None:
                results = self._compute(equation, values)
            else:
                results = self.walk(called, values)
            names.update(zip(equation.outvars, results, strict=True))
        return [read(x) for x in jaxpr.jaxpr.outvars]

    def element(self, value: Any) -> Any:
        """Returns the scalar that an operation on rows takes for a value."""
        if not isinstance(value, _OfStep):
            return getattr(value, "element", value)
        if value not in self.shared:
            _check_hyperparameter(value)
            if self.given is None:
                self.shared[value] = jnp.ravel(value.value)[0]
            else:
                self.shared[value] = next(self.given).astype(value.aval.dtype)
        return self.shared[value]

    def _compute(self, equation: JaxprEqn, values: Sequence[Any]) -> list[Any]:
        """Returns the results of an operation, without arrays if not of this run."""
        name, results = equation.primitive.name, [None] * len(equation.outvars)
        if any(isinstance(x, _OfRows) for x in values):
            _check_elementwise(equation)
            scalars = [self.element(x) for x in values]
            if self.given is not None:
                is_same = name in _SAME_ELEMENTS
                results = scalars if is_same else _bind(equation, scalars)
            return [_OfRows(x) for x in results]
        is_uniform = name in _ELEMENTWISE | _SAME_ELEMENTS
        is_uniform &= all(getattr(x, "is_uniform", True) for x in values)
        if self.given is None:
            results = _bind(equation, [getattr(x, "value", x) for x in values])
        pairs = zip(equation.outvars, results, strict=True)
        return [_of_step(variable, value, is_uniform) for variable, value in pairs]


def _bind(equation: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    params = equation.primitive.get_bind_params(equation.params)
    results = equation.primitive.bind(*values, **params)
    return results if equation.primitive.multiple_results else [results]


def _check_elementwise(equation: JaxprEqn) -> None:
    """Refuses an operation on rows that needs more than one element of an operand."""
    name, results = equation.primitive.name, equation.outvars
    if name in _SAME_ELEMENTS:
        if [x.aval.size for x in equation.invars] != [x.aval.size for x in results]:
            raise _NotElementwiseError(f"{name} copies the elements of a row")
    elif name not in _ELEMENTWISE:
        raise _NotElementwiseError(
            f"{name} mixes the elements of a row, or SparseCores do not have it"
        )
    for result in results:
        if result.aval.dtype.name not in _DTYPES:
            raise _NotElementwiseError(f"SparseCores have no {result.aval.dtype}")


def _check_hyperparameter(value: _OfStep) -> None:
    """Refuses a value of the step that is no scalar, or that float32 cannot hold."""
    if not value.is_uniform:
        raise _NotElementwiseError(
            f"a value of shape {value.aval.shape} differs between the elements of a row"
        )
    if value.aval.dtype.name not in ("bool", "bfloat16", "float16", "float32"):
        raise _NotElementwiseError(f"rows need a scalar of dtype {value.aval.dtype}")
