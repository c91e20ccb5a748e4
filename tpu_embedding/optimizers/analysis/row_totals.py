"""Optax transformations that sum over rows, such as global norms, on parts of a table.

`optax.clip_by_global_norm` or `optax.apply_if_finite` see an array and reduce it to a
number. On the touched rows of one shard and round they would see a part. Here the
transformation's jaxpr is run with each reduction over rows replaced by a total over all
parts (`table_rows`). What the rows that are not there would have added must be nothing:
that is read off the jaxpr too, by following what becomes of a gradient of zero.
"""

import dataclasses
import functools
from typing import Any, Final

import jax
import jax.core
import jax.numpy as jnp
import optax
from jaxtyping import Array

from tpu_embedding.optimizers.analysis.row_local import (
    ELEMENTWISE,
    PROBE_ROWS,
    NotRowLocalError,
    rows_first,
    unknown_rows,
)
from tpu_embedding.optimizers.table_rows import (
    TableRows,
    table_rows,
    table_rows_context,
)

_PROBE: Final = jax.ShapeDtypeStruct((PROBE_ROWS, 3), jnp.float32)
_NEUTRAL: Final = {"reduce_sum": 0, "reduce_and": True, "reduce_or": False}
_KEEPS_VALUE: Final = frozenset(
    """broadcast_in_dim reshape squeeze expand_dims transpose copy reduce_max reduce_min
    reduce_and reduce_or""".split()
)
_INLINED: Final = frozenset({"jit", "pjit", "closed_call", "core_call"})

Place = tuple[int, ...]
"""Where an equation stands: its index, within the equations that enclose it."""


def reduces_over_rows(transformation: optax.GradientTransformation) -> bool:
    """Whether a transformation has reductions over rows that can be made totals."""
    return bool(_reductions(transformation, is_lazy=False))


@functools.lru_cache(maxsize=4096)
def with_row_totals(
    transformation: optax.GradientTransformation, *, is_lazy: bool
) -> optax.GradientTransformation:
    """Lets the reductions over rows of a transformation be totals over the table.

    Args:
      transformation: of one array `[rows, dim]`.
      is_lazy: whether it will see the touched rows only. Then a reduction must not
        depend on other rows: one of the gradient, which is zero there, does not.

    Raises:
      NotRowLocalError: if a reduction does.
    """
    reductions = _reductions(transformation, is_lazy=is_lazy)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        arguments = (updates, state, params)
        # Traced as when its reductions were found, and these are found by their place.
        with jax.disable_jit():
            jaxpr, out = jax.make_jaxpr(transformation.update, return_shape=True)(
                *arguments
            )
        run = _Run(reductions=reductions, rows=table_rows(updates))
        results = run(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves(arguments), ())
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return optax.GradientTransformation(transformation.init, update)


@dataclasses.dataclass(frozen=True)
class _Run:
    """Evaluates a jaxpr, with totals in the place of reductions over rows."""

    reductions: frozenset[Place]
    rows: TableRows

    def __call__(self, jaxpr: Any, consts: Any, values: Any, place: Place) -> list[Any]:
        known = dict(zip(jaxpr.constvars, consts, strict=True))
        known.update(zip(jaxpr.invars, values, strict=True))

        def read(variable: Any) -> Any:
            return variable.val if hasattr(variable, "val") else known[variable]

        for i, equation in enumerate(jaxpr.eqns):
            inputs = [read(variable) for variable in equation.invars]
            outputs = self._evaluate(jaxpr, equation, inputs, (*place, i))
            known.update(zip(equation.outvars, outputs, strict=True))
        return [read(variable) for variable in jaxpr.outvars]

    def _evaluate(
        self, jaxpr: Any, equation: Any, inputs: list[Any], place: Place
    ) -> list[Any]:
        name = equation.primitive.name
        if place in self.reductions:
            return [self._total(name, equation.params["axes"], inputs[0])]
        is_within = any(other[: len(place)] == place for other in self.reductions)
        if is_within and name in _INLINED:
            inner = equation.params["jaxpr"]
            return self(inner.jaxpr, inner.consts, inputs, (*place, 0))
        if is_within and name == "cond":
            index, *operands = inputs
            return self._choose(equation.params["branches"], index, operands, place)
        return _apply(jaxpr, equation, inputs)

    def _choose(
        self, branches: Any, index: Any, operands: list[Any], place: Place
    ) -> list[Any]:
        """Runs all branches: totals are taken by all shards, or by none."""
        results = [
            self(branch.jaxpr, branch.consts, operands, (*place, i))
            for i, branch in enumerate(branches)
        ]
        index = jnp.asarray(index, jnp.int32)
        return [jax.lax.select_n(index, *cases) for cases in zip(*results, strict=True)]

    def _total(self, name: str, axes: tuple[int, ...], values: Array) -> Array:
        others = tuple(axis for axis in axes if axis)
        if name == "reduce_sum":
            return self.rows.total(jnp.sum(values, axis=others))[0]
        if name == "reduce_or":
            counts = jnp.any(values, axis=others).astype(jnp.float32)
            return self.rows.total(counts)[0] > 0
        counts = jnp.any(~values, axis=others).astype(jnp.float32)
        return self.rows.total(counts)[0] == 0


@functools.lru_cache(maxsize=4096)
def _reductions(
    transformation: optax.GradientTransformation, *, is_lazy: bool
) -> frozenset[Place]:
    """Finds the reductions over rows; refuses those that other rows would change."""
    try:
        state = jax.eval_shape(transformation.init, _PROBE)
        # Rules that ask for totals themselves have no reductions of their own.
        with table_rows_context(unknown_rows(PROBE_ROWS)):
            jaxpr = jax.make_jaxpr(transformation.update)(_PROBE, state, _PROBE).jaxpr
    except Exception:
        return frozenset()
    found: set[Place] = set()
    # The gradient of rows that are not there is zero; all else about them is unknown.
    zero = jnp.zeros((), jnp.float32)
    known: list[Any] = [zero] + [None] * (len(jaxpr.invars) - 1)
    _follow(jaxpr, known if is_lazy else [], (), found, is_lazy)
    return frozenset(found)


def _follow(
    jaxpr: Any, inputs: list[Any], place: Place, found: set[Place], is_lazy: bool
) -> list[Any]:
    """Follows the value that absent rows have, where it is one for all of them."""
    known: dict[Any, Any] = {
        variable: value
        for variable, value in zip(jaxpr.invars, inputs, strict=False)
        if value is not None
    }

    def read(variable: Any) -> Any:
        return variable.val if hasattr(variable, "val") else known.get(variable)

    for i, equation in enumerate(jaxpr.eqns):
        name = equation.primitive.name
        here = (*place, i)
        values = [read(variable) for variable in equation.invars]
        if name in _INLINED:
            inner = equation.params["jaxpr"].jaxpr
            results = _follow(inner, values, (*here, 0), found, is_lazy)
        elif name == "cond":
            for j, branch in enumerate(equation.params["branches"]):
                _follow(branch.jaxpr, values[1:], (*here, j), found, is_lazy)
            results = []
        elif _is_reduction_over_rows(name, equation):
            if is_lazy and (values[0] is None or bool(values[0] != _NEUTRAL[name])):
                raise NotRowLocalError(
                    f"The optimizer is not row-local: its {name} over rows depends on "
                    "rows that this step does not look up, as trust ratios and norms "
                    "of parameters do. tpu_embedding.optimizers.every_row applies it "
                    "to all rows, if nothing else in it mixes them, at the cost of a "
                    "pass over the table; for factored moments there is "
                    "tpu_embedding.optimizers.adafactor."
                )
            found.add(here)
            results = []
        else:
            results = _value_of(name, jaxpr, equation, values)
        known.update(
            (variable, value)
            for variable, value in zip(equation.outvars, results, strict=False)
            if value is not None
        )
    return [read(variable) for variable in jaxpr.outvars]


def _is_reduction_over_rows(name: str, equation: Any) -> bool:
    if name not in _NEUTRAL or 0 not in equation.params["axes"]:
        return False
    return rows_first(equation.invars[0].aval.shape)


def _value_of(name: str, jaxpr: Any, equation: Any, values: list[Any]) -> list[Any]:
    """Returns the value of an equation's results for absent rows, if it is known."""
    is_zero = [value is not None and not jnp.any(value != 0) for value in values]
    if name == "mul" and any(is_zero):
        dtype = equation.outvars[0].aval.dtype
        return [jnp.zeros((), dtype)]
    if any(value is None or jnp.ndim(value) for value in values):
        return []
    if name in _KEEPS_VALUE or (name == "reduce_sum" and all(is_zero)):
        return values[:1]
    if name not in ELEMENTWISE:
        return []
    return _apply(jaxpr, equation, [jnp.asarray(value) for value in values])


def _apply(jaxpr: Any, equation: Any, inputs: list[Any]) -> list[Any]:
    """Evaluates a single equation."""
    values = {
        variable: value
        for variable, value in zip(equation.invars, inputs, strict=True)
        if not hasattr(variable, "val")
    }
    single = jaxpr.replace(
        constvars=[],
        invars=list(values),
        outvars=equation.outvars,
        eqns=[equation],
    )
    return jax.core.eval_jaxpr(single, (), *values.values())
