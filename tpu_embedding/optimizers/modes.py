"""Which rows a rule is applied to, and how often.

A mode is a mark in the state of the transformation, where the layer finds it. So it
survives `optax.chain`, `optax.inject_hyperparams` and any other wrapper.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import optax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class EveryRowState:
    """Marks a rule for every row.

    Attributes:
      inner: state of the rule.
      gradient_steps: steps whose gradients are collected before the rule runs.
    """

    inner: Any
    gradient_steps: int = dataclasses.field(metadata={"static": True})


class InSequenceState(NamedTuple):
    """Marks a rule that runs once per occurrence of an id."""

    inner: Any


class OccurrenceNormState(NamedTuple):
    """Marks a rule that asks for the norm of the gradient's occurrences."""


def every_row(
    rule: optax.GradientTransformation, *, gradient_steps: int = 1
) -> optax.GradientTransformation:
    """Applies a rule to every row of the table in each step, as dense optimizers do.

    Rows that were not looked up have gradient zero: their moments decay, and move
    them. The result equals that of the same optax transformation on the dense
    gradient. It costs a pass over table and slot variables in each step, in place.

    A rule that treats each element for itself (SGD, Adam, ...) needs no other memory.
    Any other, and one with `gradient_steps`, keeps a gradient of the table's size in
    its state.

    Args:
      rule: a row-local optax transformation, or one of this package.
      gradient_steps: so many steps' gradients are summed and divided by their number
        before the rule is applied once; in between nothing moves. Keras'
        `gradient_accumulation_steps`.

    Raises:
      ValueError: if `gradient_steps` is not an int of at least 1.

    Example:
      >>> import jax.numpy as jnp
      >>> rule = every_row(optax.sgd(0.1, momentum=0.9))
      >>> type(rule.init(jnp.ones((3, 2)))).__name__
      'EveryRowState'
    """
    if not isinstance(gradient_steps, int) or gradient_steps < 1:
        raise ValueError(
            f"gradient_steps must be an int of at least 1, got {gradient_steps!r}."
        )

    def init(params: Any) -> Any:
        return EveryRowState(inner=rule.init(params), gradient_steps=gradient_steps)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, inner = rule.update(updates, state.inner, params)
        return updates, dataclasses.replace(state, inner=inner)

    return optax.GradientTransformation(init, update)


def in_sequence(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies a rule once per occurrence of an id, in the order of the samples.

    TensorFlow's `use_gradient_accumulation=False`, which promises no order; here it is
    the order of the features, and of the samples within each device. It is for
    comparisons: a step takes as many passes as its most frequent id has occurrences.

    Args:
      rule: a row-local optax transformation.

    Example:
      >>> import jax.numpy as jnp
      >>> type(in_sequence(optax.sgd(0.1)).init(jnp.ones((3, 2)))).__name__
      'InSequenceState'
    """

    def init(params: Any) -> Any:
        return InSequenceState(rule.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, inner = rule.update(updates, state.inner, params)
        return updates, InSequenceState(inner)

    return optax.GradientTransformation(init, update)
