"""Modes: the rows that an optimizer rule is applied to, and how often.

A rule requests its mode while it runs, by `request_mode`; the layer records the request
when it traces the rule for its plan. So a mode survives `optax.chain`,
`optax.inject_hyperparams` and any other wrapper. Under `optax.multi_transform` it
applies only to the tables of its branch.
"""

import contextlib
import contextvars
import dataclasses
import operator
from collections.abc import Iterator
from typing import Any

import jax
import optax

from tpu_embedding.optimizers.checks import (
    check_hyperparameters,
    check_rule,
    int_from,
)
from tpu_embedding.optimizers.equal_calls import equal_calls_are_one


@dataclasses.dataclass(frozen=True)
class EveryRow:
    """The rule updates every row, once in `gradient_steps` steps."""

    gradient_steps: int


@dataclasses.dataclass(frozen=True)
class InSequence:
    """The rule runs once per occurrence of an id."""


@dataclasses.dataclass(frozen=True)
class OccurrenceNorm:
    """The rule asks for the norm of the gradients of all occurrences."""


@dataclasses.dataclass(frozen=True)
class ModelNorm:
    """The rule asks for the norm of all gradients of the model."""


@dataclasses.dataclass(frozen=True, eq=False)
class MustBeLast:
    """The rule must be the last of a chain: the table must change by these updates."""

    updates: Any


RuleMode = EveryRow | InSequence | OccurrenceNorm | ModelNorm | MustBeLast

_NOTES: contextvars.ContextVar[list[RuleMode] | None] = contextvars.ContextVar(
    "modes", default=None
)


def request_mode(mode: RuleMode) -> None:
    """Requests a mode from the layer, if it is tracing the rule that calls this."""
    notes = _NOTES.get()
    if notes is not None:
        notes.append(mode)


@contextlib.contextmanager
def requested_modes() -> Iterator[list[RuleMode]]:
    """Collects the modes that rules request within this context."""
    notes: list[RuleMode] = []
    token = _NOTES.set(notes)
    try:
        yield notes
    finally:
        _NOTES.reset(token)


@equal_calls_are_one
def every_row(
    rule: optax.GradientTransformation, *, gradient_steps: int = 1
) -> optax.GradientTransformation:
    """Applies a rule to every row of the table in each step, as dense optimizers do.

    Rows that were not looked up have gradient zero: their moments decay, and move the
    row. The result equals that of the same optax transformation on the dense gradient.
    Each step costs a pass over the table and its slot variables, in place.

    An elementwise rule (SGD, Adam, ...) needs no more memory.
    Any other rule, and one with `gradient_steps`, keeps a gradient of the table's size
    in its state.

    Args:
      rule: a row-local optax transformation, or one of this package.
      gradient_steps: number of steps between two updates, at least 1. The layer sums
        the gradients of these steps and divides by their number; in between no row
        moves. Keras' `gradient_accumulation_steps`. On a dense array, outside of the
        layer, the rule is applied in each call.

    Raises:
      TypeError: if `rule` is no transformation, or `gradient_steps` no int.
      ValueError: if `gradient_steps` is below 1.

    Example:
      >>> import tpu_embedding as te
      >>> rule = every_row(optax.sgd(0.1, momentum=0.9))
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(te.FeatureConfig(table=table), optimizer=rule)
      >>> plan.stacks[0].optimizer.rows
      'every'
    """
    check_rule("every_row", rule)
    check_hyperparameters("every_row", gradient_steps=int_from(1, gradient_steps))
    return _with_mode(rule, EveryRow(operator.index(gradient_steps)))


@equal_calls_are_one
def in_sequence(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies a rule once per occurrence of an id, in the order of the samples.

    This is TensorFlow's `use_gradient_accumulation=False`, which promises no order.
    Here the order is that of the features, and of the samples within each device. Use
    it for comparisons: a step takes as many passes as its most frequent id occurs.

    Args:
      rule: a row-local optax transformation.

    Raises:
      TypeError: if `rule` is no transformation.

    Example:
      >>> import tpu_embedding as te
      >>> rule = in_sequence(te.optimizers.adagrad(0.1))
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(te.FeatureConfig(table=table), optimizer=rule)
      >>> plan.stacks[0].optimizer.duplicates
      'sequence'
    """
    check_rule("in_sequence", rule)
    return _with_mode(rule, InSequence())


def _with_mode(
    rule: optax.GradientTransformation, mode: RuleMode
) -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        # Under `optax.masked`, a rule for other tables is handed no array.
        if jax.tree.leaves(updates):
            request_mode(mode)
        return rule.update(updates, state, params)

    return optax.GradientTransformation(rule.init, update)
