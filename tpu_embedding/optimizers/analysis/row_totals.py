"""Turns reductions over rows, such as global norms, into totals over the whole table.

`optax.clip_by_global_norm` and `optax.apply_if_finite` see an array and reduce it to a
number. On the touched rows of one shard and round they would see a part of the table.
Here the rule's jaxpr is run with each reduction over rows replaced by a total over all
parts (`table_rows`). Rows that are not looked up must contribute nothing to it. That is
read off the trace: their gradient is zero, and that zero is followed to the reduction.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from tpu_embedding.optimizers.analysis.operations import facts_of
from tpu_embedding.optimizers.analysis.rule_program import (
    RuleOperation,
    is_by_row,
    read_program,
)
from tpu_embedding.optimizers.analysis.trace import (
    NotRowLocalError,
    UntraceableRule,
    trace_rule,
)
from tpu_embedding.optimizers.analysis.walker import (
    all_operations,
    called_programs,
    walk,
)
from tpu_embedding.optimizers.table_rows import TableRows, table_rows

ANY_DIM: Final = 3
"""The dim that rules are traced for where that of the table is not known."""


def reduces_over_rows(transformation: optax.GradientTransformation) -> bool:
    """Returns whether a rule has reductions over rows that can become totals."""
    return bool(_reductions(transformation, is_lazy=False))


@functools.lru_cache(maxsize=4096)
def with_row_totals(
    transformation: optax.GradientTransformation, *, is_lazy: bool
) -> optax.GradientTransformation:
    """Replaces the reductions over rows of a rule by totals over the table.

    A rule sees only some rows of a table at a time, so its own sum over rows would miss
    the others.

    Args:
      transformation: a rule of one array `[rows, dim]`.
      is_lazy: True if the rule will see touched rows only. A reduction of the gradient
        is then still exact, because the gradient of all other rows is zero. A reduction
        of the rows themselves is not.

    Raises:
      NotRowLocalError: if the rule is lazy and a reduction depends on other rows.
    """
    places = _reductions(transformation, is_lazy=is_lazy)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        arguments = (updates, state, params)
        # Reductions are found by their place, so the trace must be as in `_reductions`.
        with jax.disable_jit():
            jaxpr, out = jax.make_jaxpr(transformation.update, return_shape=True)(
                *arguments
            )
        program = read_program(jaxpr)
        operations = list(all_operations(program))
        if not places <= {(i, x.name) for i, x in enumerate(operations)}:
            raise ValueError(
                "The optimizer does other operations on these rows than in the layer's "
                "trace, so its sums over rows cannot be made totals over the table. Do "
                "not let its operations depend on the number of rows."
            )
        totals = frozenset(operations[place] for place, _ in places)
        run = _Run(totals=totals, rows=table_rows(updates))
        results = walk(program, jax.tree.leaves(arguments), run.step)
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return optax.GradientTransformation(transformation.init, update)


@dataclasses.dataclass(frozen=True)
class _Run:
    """Runs a program, with totals in the place of some operations."""

    totals: frozenset[RuleOperation]
    rows: TableRows

    def step(self, operation: RuleOperation, inputs: list[Any]) -> Sequence[Any]:
        if operation in self.totals:
            return [self._total(operation, inputs[0])]
        if operation.name == "cond" and any(
            not self.totals.isdisjoint(all_operations(branch))
            for branch, _ in called_programs(operation)
        ):
            return self._choose(operation, inputs)
        return operation.bind(inputs)

    def _choose(self, operation: RuleOperation, inputs: list[Any]) -> list[Any]:
        """Runs all branches: totals are taken by all shards, or by none."""
        results = [
            walk(branch, inputs[operands], self.step)
            for branch, operands in called_programs(operation)
        ]
        index = jnp.asarray(inputs[0], jnp.int32)
        return [jax.lax.select_n(index, *cases) for cases in zip(*results, strict=True)]

    def _total(self, operation: RuleOperation, values: Array) -> Array:
        others = tuple(axis for axis in operation.params["axes"] if axis)
        if operation.name == "reduce_sum":
            return self.rows.total(jnp.sum(values, axis=others))[0]
        if operation.name == "reduce_or":
            counts = jnp.any(values, axis=others).astype(jnp.float32)
            return self.rows.total(counts)[0] > 0
        counts = jnp.any(~values, axis=others).astype(jnp.float32)
        return self.rows.total(counts)[0] == 0


@functools.lru_cache(maxsize=4096)
def _reductions(
    transformation: optax.GradientTransformation, *, is_lazy: bool
) -> frozenset[tuple[int, str]]:
    """Finds the reductions over rows; refuses those that other rows would change.

    Returns:
      The place of each among all operations of the rule's update, and its name.
    """
    trace = trace_rule(transformation, (ANY_DIM,))
    if isinstance(trace, UntraceableRule):
        # The plan's check of rules reports the reason.
        return frozenset()
    found = _Reductions(is_lazy=is_lazy)
    # The gradient of absent rows is zero; all else about them is unknown.
    zero = jnp.zeros((), jnp.float32) if is_lazy else None
    unknown = [None] * (len(trace.update.inputs) - 1)
    walk(trace.update, [zero, *unknown], found.step)
    return frozenset(
        (place, operation.name)
        for place, operation in enumerate(all_operations(trace.update))
        if operation in found.operations
    )


class _Reductions:
    """Follows the value that absent rows have, where all of them have one."""

    def __init__(self, is_lazy: bool):
        self.operations: set[RuleOperation] = set()
        self._is_lazy = is_lazy

    def step(self, operation: RuleOperation, values: list[Any]) -> Sequence[Any]:
        unknown = [None] * len(operation.outputs)
        if operation.name == "cond":
            for branch, operands in called_programs(operation):
                walk(branch, values[operands], self.step)
            return unknown
        if not _reduces_rows(operation):
            return _value_of_absent_rows(operation, values) or unknown
        neutral = facts_of(operation).neutral
        if self._is_lazy and (values[0] is None or bool(values[0] != neutral)):
            raise NotRowLocalError(
                f"The optimizer is not row-local: its {operation.name} over rows "
                "depends on rows that this step does not look up, as trust ratios and "
                "norms of parameters do. tpu_embedding.optimizers.every_row applies it "
                "to all rows, if nothing else in it mixes them, at the cost of a "
                "pass over the table; for factored moments there is "
                "tpu_embedding.optimizers.adafactor."
            )
        self.operations.add(operation)
        return unknown


def _reduces_rows(operation: RuleOperation) -> bool:
    return (
        facts_of(operation).neutral is not None
        and 0 in operation.params["axes"]
        and is_by_row(operation.inputs[0].shape)
    )


def _value_of_absent_rows(
    operation: RuleOperation, values: list[Any]
) -> list[Any] | None:
    """Returns the value that results have in all absent rows; None if not known."""
    facts = facts_of(operation)
    if operation.name == "mul" and any(map(_is_zero, values)):
        return [jnp.zeros((), operation.outputs[0].dtype)]
    if any(value is None or jnp.ndim(value) for value in values):
        return None
    if facts.moves_elements or (
        operation.name == "reduce_sum" and all(map(_is_zero, values))
    ):
        return values[:1]
    if not facts.is_elementwise:
        return None
    return operation.bind([jnp.asarray(value) for value in values])


def _is_zero(value: Any) -> bool:
    is_number = value is not None and jnp.issubdtype(jnp.result_type(value), jnp.number)
    return is_number and not np.any(np.asarray(value) != 0)
