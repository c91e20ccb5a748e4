"""Modes: the rows that an optimizer rule is applied to, and how often.

A mode is the driver of the value that `every_row` and `in_sequence` return. It must be
the outermost wrapper; a plan rejects it inside one of optax.
"""

import operator

import optax

from tpu_embedding.optimizers.checks import (
    check_hyperparameters,
    check_rule,
    int_from,
)
from tpu_embedding.optimizers.equal_calls import equal_calls_are_one
from tpu_embedding.optimizers.row_optimizer import (
    EveryRow,
    InSequence,
    Touched,
    declare,
    row_optimizer_of,
)


@equal_calls_are_one
def every_row(
    rule: optax.GradientTransformation, *, gradient_steps: int = 1
) -> optax.GradientTransformation:
    """Applies a rule to every row of the table in each step, as dense optimizers do.

    Rows that were not looked up have gradient zero: their moments decay, and move the
    row. The result equals that of the same optax transformation on the dense gradient.
    Each step costs a pass over the table and its slot variables, in place.

    A rule that asks for totals over a table, as Adafactor does, and one with
    `gradient_steps` keep a gradient of the table's size in their state. Other rules
    need no more memory.

    Args:
      rule: a row-local optax transformation, or one of this package.
      gradient_steps: number of steps between two updates, at least 1. The layer sums
        the gradients of these steps and divides by their number; in between no row
        moves. Keras' `gradient_accumulation_steps`. On a dense array, outside of the
        layer, the rule is applied in each call.

    Raises:
      TypeError: if `rule` is no transformation, or `gradient_steps` no int.
      ValueError: if `gradient_steps` is below 1, or the rule has another one.

    Example:
      >>> import tpu_embedding as te
      >>> rule = every_row(optax.sgd(0.1, momentum=0.9))
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(te.FeatureConfig(table=table), optimizer=rule)
      >>> plan.stacks[0].optimizer.driver
      EveryRow(gradient_steps=1)
    """
    check_rule("every_row", rule)
    check_hyperparameters("every_row", gradient_steps=int_from(1, gradient_steps))
    steps, inner = operator.index(gradient_steps), row_optimizer_of(rule)
    match inner.driver:
        case InSequence():
            raise _every_row_in_sequence()
        case Touched(occurrence_norm=True):
            raise ValueError(
                "A rule for every row does not see the occurrences of ids, whose norm "
                "it asks for; use clipnorm_of='sum'."
            )
        case EveryRow(gradient_steps=other) if other != steps:
            raise ValueError(
                "every_row must have one gradient_steps within an optimizer, got "
                f"{steps} around {other}."
            )
    return declare(rule, driver=EveryRow(gradient_steps=steps))


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
      >>> plan.stacks[0].optimizer.driver
      InSequence()
    """
    check_rule("in_sequence", rule)
    if row_optimizer_of(rule).moves_every_row:
        raise _every_row_in_sequence()
    return declare(rule, driver=InSequence())


def _every_row_in_sequence() -> ValueError:
    return ValueError(
        "A rule cannot be applied to every row and to duplicates in sequence at once: "
        "the rows that are not looked up would be updated as often as the most "
        "frequent id occurs. Take every_row or in_sequence away, or "
        "use_gradient_accumulation=False."
    )
