"""Splits an optimizer rule into per-step scalars and arithmetic on rows.

SparseCores run only the second call:

    hyperparameters, new_scalars = split.values(scalars)
    updates, *new_slots = evaluate(
        split.row_jaxpr, [gradient, rows, is_touched, *slots, *hyperparameters])
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from tpu_embedding.optimizers.jaxprs import (
    ClosedJaxpr,
    are_among,
    called_function,
    dependent_values,
    evaluate,
)
from tpu_embedding.optimizers.probe import ProbedRule


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SplitRule:
    """A traced rule in two halves, with all function calls inlined.

    Attributes:
      value_jaxpr: maps scalars that all rows share to hyperparameters and new scalars.
      row_jaxpr: maps gradient, rows, `is_touched`, slots and hyperparameters to updates
        and new slots.
    """

    value_jaxpr: ClosedJaxpr
    row_jaxpr: ClosedJaxpr
    num_hyperparameters: int

    def values(self, scalars: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Computes the hyperparameters for a step, and the scalars after the step."""
        results = evaluate(self.value_jaxpr, scalars)
        return results[: self.num_hyperparameters], results[self.num_hyperparameters :]


def split_rule(probed: ProbedRule) -> SplitRule:
    """Splits a rule that doesn't use totals."""
    # Inlines calls, because one function may compute both scalars and rows.
    closed = _with_calls_inlined(probed.update)
    jaxpr = closed.jaxpr
    by_row = [True, True, True, *(slot is not None for slot in probed.leaves)]
    depends = dependent_values(jaxpr, by_row)
    scalars, slots = probed.partition(jaxpr.invars[3:])
    new_scalars, new_slots = probed.partition(jaxpr.outvars[1:])
    row_inputs = [*jaxpr.invars[:3], *slots]
    row_outputs = [jaxpr.outvars[0], *new_slots]

    def uses_rows(equation: JaxprEqn) -> bool:
        return any(are_among(equation.invars, depends))

    # Only scalars are passed between the halves. Arrays, such as a rate that is
    # broadcast to all rows, are computed with the rows.
    results = [x for equation in jaxpr.eqns for x in equation.outvars]
    crossing = [
        *scalars,
        *(x for x in results if x.aval.shape == () and x not in depends),
    ]
    # Operations with side effects are kept, because users may print a rule's values.
    row_equations = _needed(
        jaxpr,
        row_outputs,
        given={*row_inputs, *crossing},
        keep=[x for x in jaxpr.eqns if x.effects and uses_rows(x)],
    )
    used = _variables([*row_outputs, *(x for y in row_equations for x in y.invars)])
    hyperparameters = [x for x in crossing if x in used]
    values = [*hyperparameters, *new_scalars]
    value_equations = _needed(
        jaxpr,
        values,
        given={*scalars, *depends},
        keep=[x for x in jaxpr.eqns if x.effects and not uses_rows(x)],
    )
    # A conditional may compute both scalars and arrays of rows. The first half doesn't
    # use the arrays, so operands that depend on rows may be zeros.
    value_equations = [
        equation.replace(
            invars=[
                Literal(np.zeros(x.aval.shape, x.aval.dtype), x.aval) if of_rows else x
                for x, of_rows in zip(
                    equation.invars, are_among(equation.invars, depends), strict=True
                )
            ]
        )
        for equation in value_equations
    ]

    def half(
        invars: list[Var], equations: list[JaxprEqn], outvars: list[Any]
    ) -> ClosedJaxpr:
        part = jaxpr.replace(invars=invars, eqns=equations, outvars=outvars)
        return ClosedJaxpr(part, closed.consts)

    return SplitRule(
        value_jaxpr=half(scalars, value_equations, values),
        row_jaxpr=half([*row_inputs, *hyperparameters], row_equations, row_outputs),
        num_hyperparameters=len(hyperparameters),
    )


def _with_calls_inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    equations: list[JaxprEqn] = []
    constants: dict[Var, Any] = {}

    def inline(called: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
        # A function that is called twice needs different variables in each call.
        consts = [Var(x.aval) for x in called.jaxpr.constvars]
        constants.update(zip(consts, called.consts, strict=True))
        inputs = [*called.jaxpr.constvars, *called.jaxpr.invars]
        atoms = dict(zip(inputs, [*consts, *operands], strict=True))

        def renamed(given: Sequence[Any]) -> list[Any]:
            return [x if isinstance(x, Literal) else atoms[x] for x in given]

        for equation in called.jaxpr.eqns:
            operands = renamed(equation.invars)
            if (function := called_function(equation)) is not None:
                results = inline(function, operands)
            else:
                results = [Var(x.aval) for x in equation.outvars]
                equations.append(equation.replace(invars=operands, outvars=results))
            atoms.update(zip(equation.outvars, results, strict=True))
        return renamed(called.jaxpr.outvars)

    results = inline(closed, closed.jaxpr.invars)
    flat = closed.jaxpr.replace(
        constvars=list(constants), eqns=equations, outvars=results
    )
    return ClosedJaxpr(flat, list(constants.values()))


def _needed(
    jaxpr: Jaxpr, outputs: Iterable[Any], given: set[Var], keep: Sequence[JaxprEqn]
) -> list[JaxprEqn]:
    """Selects the equations in `keep`, and those that lead from `given` to outputs."""
    equations: list[JaxprEqn] = []
    needed = _variables(outputs) - given
    for equation in reversed(jaxpr.eqns):
        is_kept = any(equation is kept for kept in keep)
        if is_kept or not needed.isdisjoint(equation.outvars):
            equations.append(equation)
            needed |= _variables(equation.invars) - given
    return equations[::-1]


def _variables(atoms: Iterable[Any]) -> set[Var]:
    return {atom for atom in atoms if isinstance(atom, Var)}
