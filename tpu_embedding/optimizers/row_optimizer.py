"""The types of optimizers: as the user gives one, and as the layer applies it.

Keras optimizers are passed as they are, and Keras itself is not imported. A *driver*
says which rows a rule is applied to, and how often. `every_row` and `in_sequence`
declare one; they must be the outermost wrapper, and a plan rejects them inside optax's.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, Literal, Protocol

import optax

from tpu_embedding.optimizers.checks import (
    check_hyperparameters,
    check_rule,
    equal_calls_are_one,
    int_from,
)
from tpu_embedding.optimizers.table_rows import is_in_layer


class KerasOptimizer(Protocol):
    """An optimizer of Keras 3 or `tf_keras`, as `keras.optimizers.Adagrad(0.1)`."""

    def get_config(self) -> dict[str, Any]:
        """Returns the fields of the optimizer."""
        ...


TableOptimizer = optax.GradientTransformation | str | KerasOptimizer
"""An optax transformation; or the name of a rule of this package, as `"adagrad"`; or a
Keras optimizer, which is read when the plan is made."""


class NotRowLocalError(ValueError):
    """A layer cannot apply a transformation to the rows of a table one by one."""


@dataclasses.dataclass(frozen=True)
class Touched:
    """The rule runs once on each row that the step looked up, and on no other (lazy).

    The gradients of all occurrences of an id are summed.

    Attributes:
      occurrence_norm: whether the rule asks for the norm of the gradients of all
        occurrences of ids, before they are summed.
    """

    occurrence_norm: bool = False


@dataclasses.dataclass(frozen=True)
class EveryRow:
    """The rule runs on all rows, as dense optimizers do.

    The gradient of rows that were not looked up is zero.

    Attributes:
      gradient_steps: number of steps whose mean gradient the rule gets. A plan turns
        the driver into `KeptGradient` if there are several.
    """

    gradient_steps: int = 1


@dataclasses.dataclass(frozen=True)
class KeptGradient:
    """As `EveryRow`, on a dense gradient that is part of the state.

    A rule needs it that collects the gradients of several steps, or asks for totals
    over a table. The plan finds that out.

    Attributes:
      gradient_steps: number of steps whose mean gradient the rule gets.
    """

    gradient_steps: int = 1


@dataclasses.dataclass(frozen=True)
class InSequence:
    """The rule runs once for each occurrence of an id, in the order of the samples."""


Driver = Touched | EveryRow | KeptGradient | InSequence
"""Which rows a rule runs on, and how often in a step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowOptimizer:
    """A rule, and the way in which the layer applies it.

    Attributes:
      transformation: an optax transformation of `[rows, dim]`.
      driver: which rows the rule runs on, and how often.
      takes_model_norm: whether the rule asks for the norm of the model's gradients.
      sets_rows: whether the rule sets rows without reading them, as `assign` does.
      takes_totals: whether the rule asks for totals over the rows of a table. The plan
        finds it out.
      averages: whether `with_ema` keeps averages of the rows, and overwrites them.
      named: the name that a table gives instead of a rule, and its learning rate, as
        text; rules that differ in it alone are equal.
    """

    transformation: optax.GradientTransformation
    driver: Driver = Touched()
    takes_model_norm: bool = False
    sets_rows: bool = False
    takes_totals: bool = False
    averages: Literal["none", "kept", "overwriting"] = "none"
    named: str = dataclasses.field(default="", compare=False)

    @property
    def moves_every_row(self) -> bool:
        """True if rows move in steps that do not look them up."""
        return isinstance(self.driver, EveryRow | KeptGradient)

    @property
    def sees_occurrences(self) -> bool:
        """True if each occurrence of an id must reach the owner of its row."""
        return self.driver in (InSequence(), Touched(occurrence_norm=True))

    @property
    def gradient_steps(self) -> int:
        """Number of steps whose mean gradient the rule gets."""
        if isinstance(self.driver, EveryRow | KeptGradient):
            return self.driver.gradient_steps
        return 1

    def init(self, params: Any) -> Any:
        """Returns the rule's state for dense rows."""
        return self.transformation.init(params)

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """Applies the rule to dense rows."""
        return self.transformation.update(updates, state, params)


class DeclaredRule(optax.GradientTransformation):
    """An optax transformation that declares how a layer applies it.

    `every_row` and `in_sequence` return one. On dense arrays it is used as any other
    transformation. A wrapper of optax around it would hide the declaration, so a plan
    rejects that.

    Attributes:
      row_optimizer: the rule of rows, and what it declares.
    """

    row_optimizer: RowOptimizer

    def __new__(
        cls,
        row_optimizer: RowOptimizer,
        on_arrays: optax.GradientTransformation | None = None,
    ) -> "DeclaredRule":
        """Makes the value.

        Args:
          row_optimizer: what the layer applies.
          on_arrays: transformation of dense arrays; by default, the one of the rows.
        """
        on_arrays = on_arrays or row_optimizer.transformation

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            # A layer calls the rule of rows itself, unless a wrapper hides it.
            if is_in_layer():
                _check_not_wrapped(row_optimizer)
            return on_arrays.update(updates, state, params)

        rule = super().__new__(cls, on_arrays.init, update)
        rule.row_optimizer = row_optimizer
        return rule


def row_optimizer_of(
    rule: optax.GradientTransformation | RowOptimizer,
) -> RowOptimizer:
    """Returns what a rule declares; any other transformation is for touched rows."""
    if isinstance(rule, RowOptimizer):
        return rule
    if isinstance(rule, DeclaredRule):
        return rule.row_optimizer
    return RowOptimizer(transformation=rule)


def declare(rule: optax.GradientTransformation, **declared: Any) -> DeclaredRule:
    """Returns a rule with fields of its `RowOptimizer` replaced.

    Example:
      >>> declare(optax.sgd(0.1), driver=EveryRow()).row_optimizer.driver
      EveryRow(gradient_steps=1)
    """
    row_optimizer = dataclasses.replace(row_optimizer_of(rule), **declared)
    return DeclaredRule(row_optimizer, on_arrays=rule)


def wrap_rule(
    rule: optax.GradientTransformation,
    wrap: Callable[[optax.GradientTransformation], optax.GradientTransformation],
) -> optax.GradientTransformation:
    """Wraps a rule, and declares for the result what the rule declares."""
    if not isinstance(rule, DeclaredRule):
        return wrap(rule)
    inner = rule.row_optimizer
    if inner.averages != "none":
        raise ValueError(
            "with_ema must be the outermost wrapper of an optimizer, because it "
            "averages the rows after all updates, got a rule that has it inside. Write "
            "with_ema(with_options(rule, ...))."
        )
    wrapped = dataclasses.replace(
        inner, transformation=wrap(inner.transformation), sets_rows=False
    )
    return DeclaredRule(wrapped, on_arrays=wrap(rule))


def _check_not_wrapped(inner: RowOptimizer) -> None:
    plain = RowOptimizer(transformation=inner.transformation, sets_rows=inner.sets_rows)
    if inner == plain:
        return
    raise NotRowLocalError(
        "every_row, in_sequence, with_ema, and rules that ask for a norm of the step "
        "must be the outermost of an optimizer: a wrapper of optax around them hides "
        "the rows that they are for. Write every_row(optax.chain(...)) instead of "
        "optax.chain(..., every_row(...)), and so for optax.inject_hyperparams."
    )


@equal_calls_are_one
def every_row(
    rule: optax.GradientTransformation, *, gradient_steps: int = 1
) -> optax.GradientTransformation:
    """Applies a rule to every row of the table in each step, as dense optimizers do.

    Rows that were not looked up have gradient zero: their moments decay, and move the
    row. So the result equals the same optax transformation of the dense gradient.
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
      TypeError: if `rule` is not a transformation, or `gradient_steps` not an int.
      ValueError: if `gradient_steps` is below 1, or the rule has a different one.

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
    if steps > 1 and inner.averages != "none":
        raise ValueError(
            "every_row: gradient_steps must be 1 around with_ema, whose averages "
            f"advance in each step, got {steps}. Write with_ema(every_row(rule, "
            f"gradient_steps={steps}))."
        )
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
    Here features come in order, and so do the samples within each device. Use
    it for comparisons: a step takes as many passes as its most frequent id occurs.

    Args:
      rule: a row-local optax transformation.

    Raises:
      TypeError: if `rule` is not a transformation.

    Example:
      >>> import tpu_embedding as te
      >>> rule = in_sequence(te.optimizers.adagrad(0.1))
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan(te.FeatureConfig(table=table), optimizer=rule)
      >>> plan.stacks[0].optimizer.driver
      InSequence()
    """
    check_rule("in_sequence", rule)
    inner = row_optimizer_of(rule)
    if inner.averages != "none":
        raise ValueError(
            "in_sequence: rule must not have with_ema, which averages the rows once "
            "per step. Remove in_sequence or with_ema."
        )
    if inner.moves_every_row:
        raise _every_row_in_sequence()
    return declare(rule, driver=InSequence())


def _every_row_in_sequence() -> ValueError:
    return ValueError(
        "A rule cannot be applied to every row and to duplicates in sequence at once: "
        "the rows that are not looked up would be updated as often as the most "
        "frequent id occurs. Remove every_row, or lazy_adam=False; or remove "
        "in_sequence, or use_gradient_accumulation=False."
    )
