"""Optimizer types, as users pass them and as the layer applies them.

A *driver* says which rows a rule runs on, and how often. `every_row` and `in_sequence`
choose the driver. An optax wrapper around either function would hide the driver, so
plans reject such wrappers.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, Literal, Protocol

import optax

from tpu_embedding.argument_checks import invalid
from tpu_embedding.optimizers.checks import (
    check_hyperparameters,
    check_rule,
    equal_calls_are_one,
    int_from,
)
from tpu_embedding.optimizers.table_rows import is_in_layer


class KerasOptimizer(Protocol):
    """A Keras 3 or `tf_keras` optimizer, such as `keras.optimizers.Adagrad(0.1)`."""

    def get_config(self) -> dict[str, Any]: ...


TableOptimizer = optax.GradientTransformation | str | KerasOptimizer
"""An optax transformation, the name of a rule in this package such as `"adagrad"`, or a
Keras optimizer. Making a plan reads the Keras optimizer's configuration."""


class NotRowLocalError(ValueError):
    """Raised if a layer cannot apply a transformation separately to each row.

    Example:
      >>> import tpu_embedding as te
      >>> rule = optax.stateless(lambda gradients, rows: gradients / gradients.shape[0])
      >>> try:
      ...     te.optimizers.check_row_local(rule, 4)
      ... except NotRowLocalError as error:
      ...     print("mixes rows" in str(error))
      True
    """


@dataclasses.dataclass(frozen=True)
class Touched:
    """A lazy driver, which runs the rule once on each row that the step looked up.

    The rule gets the gradient summed over all occurrences of an id. Set
    `occurrence_norm` if the rule also needs the norm of the gradients before they are
    summed.
    """

    occurrence_norm: bool = False


@dataclasses.dataclass(frozen=True)
class EveryRow:
    """A driver that runs the rule on all rows, as dense optimizers do.

    Rows that were not looked up have gradient zero. Each update uses the mean gradient
    over `gradient_steps` steps.
    """

    gradient_steps: int = 1


@dataclasses.dataclass(frozen=True)
class KeptGradient(EveryRow):
    """A driver like `EveryRow` that also keeps a dense gradient in the state."""

    # `resolve` selects this driver for rules that sum several steps, need totals or set
    # rows.


@dataclasses.dataclass(frozen=True)
class InSequence:
    """A driver that runs the rule once per occurrence of an id, in sample order."""


Driver = Touched | EveryRow | InSequence
"""Says which rows a rule runs on, and how often in a step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowOptimizer:
    """A rule and how the layer applies it.

    Attributes:
      transformation: An optax transformation for `[rows, dim]`.
      driver: Decides which rows the rule runs on, and how often.
      takes_model_norm: True if the rule needs the norm of all model gradients.
      sets_rows: True if the rule sets rows without reading them, as `assign` does.
      takes_totals: True if the rule needs totals over table rows. The plan sets this
        field.
      averages: Tells if `with_ema` averages the rows, and if these averages overwrite
        the rows.

    Example:
      >>> rule = RowOptimizer(transformation=optax.sgd(0.1), driver=EveryRow())
      >>> rule.moves_every_row
      True
    """

    transformation: optax.GradientTransformation
    driver: Driver = Touched()
    takes_model_norm: bool = False
    sets_rows: bool = False
    takes_totals: bool = False
    averages: Literal["none", "kept", "overwriting"] = "none"

    @property
    def moves_every_row(self) -> bool:
        """True if steps may change rows that they do not look up."""
        return isinstance(self.driver, EveryRow)

    @property
    def sees_occurrences(self) -> bool:
        """True if the row owner needs one gradient per occurrence of an id."""
        return self.driver in (InSequence(), Touched(occurrence_norm=True))

    @property
    def gradient_steps(self) -> int:
        """Number of steps whose mean gradient makes one update."""
        return self.driver.gradient_steps if isinstance(self.driver, EveryRow) else 1

    def init(self, params: Any) -> Any:
        """Initializes the state for dense rows."""
        return self.transformation.init(params)

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """Applies the rule to dense rows."""
        return self.transformation.update(updates, state, params)


class DeclaredRule(optax.GradientTransformation):
    """An optax transformation that declares how a layer applies it."""

    row_optimizer: RowOptimizer

    def __new__(
        cls,
        row_optimizer: RowOptimizer,
        on_arrays: optax.GradientTransformation | None = None,
    ) -> "DeclaredRule":
        """Makes the rule. Dense arrays use `on_arrays`, if you pass it."""
        # `__new__` is needed, because optax transformations are named tuples.
        on_arrays = on_arrays or row_optimizer.transformation
        # A wrapper may hide `sets_rows`, because the update is still correct unless old
        # rows are huge or NaN (see `StackStep.run_on_rows`).
        plain = RowOptimizer(
            transformation=row_optimizer.transformation,
            sets_rows=row_optimizer.sets_rows,
        )

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            # A layer calls `row_optimizer.transformation` directly. So if this
            # function runs in a layer, its caller is a wrapper, which hides what the
            # rule declares.
            if is_in_layer() and row_optimizer != plain:
                raise NotRowLocalError(
                    "every_row, in_sequence, with_ema and rules that need a norm of "
                    "the step must be the outermost wrapper, because optax wrappers "
                    "hide how they treat rows. Write every_row(optax.chain(...)) "
                    "instead of optax.chain(..., every_row(...)); the same applies to "
                    "optax.inject_hyperparams."
                )
            return on_arrays.update(updates, state, params)

        rule = super().__new__(cls, on_arrays.init, update)
        rule.row_optimizer = row_optimizer
        return rule


def row_optimizer_of(
    rule: optax.GradientTransformation | RowOptimizer,
) -> RowOptimizer:
    """Reads what a rule declares. The default driver is `Touched`."""
    if isinstance(rule, RowOptimizer):
        return rule
    if isinstance(rule, DeclaredRule):
        return rule.row_optimizer
    return RowOptimizer(transformation=rule)


def declare(rule: optax.GradientTransformation, **declared: Any) -> DeclaredRule:
    """Replaces fields that a rule declares.

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
    """Wraps a rule, and keeps its declarations."""
    if not isinstance(rule, DeclaredRule):
        return wrap(rule)
    inner = rule.row_optimizer
    if inner.averages != "none":
        raise ValueError(
            "with_ema must be the outermost wrapper, because it averages the rows "
            "after all updates, but another wrapper is around it. Write "
            "with_ema(with_options(rule, ...))."
        )
    # A wrapper may read the rows, so the layer must not clear them first.
    wrapped = dataclasses.replace(
        inner, transformation=wrap(inner.transformation), sets_rows=False
    )
    return DeclaredRule(wrapped, on_arrays=wrap(rule))


@equal_calls_are_one
def every_row(
    rule: optax.GradientTransformation, *, gradient_steps: int = 1
) -> optax.GradientTransformation:
    """Applies a rule to every table row in each step, as dense optimizers do.

    A row that was not looked up has gradient zero, but its moments still decay and
    change the row. The result therefore equals applying the same optax transformation
    to the dense gradient. However, each step costs an in-place pass over the table and
    its slot variables.

    Rules that need totals over a table, such as Adafactor, keep a table-sized gradient
    in their state. So does any rule with `gradient_steps` above 1. Most other rules
    need no extra memory.

    Args:
      rule: A row-local optax transformation, or an optimizer from this package.
      gradient_steps: Number of steps per update, at least 1. The layer averages the
        gradients of these steps, and rows do not change in between. If the number is
        above 1, each step passes over a float32 gradient as large as the table. Keras
        calls this argument `gradient_accumulation_steps`. Outside the layer, on a dense
        array, each call applies the rule.

    Raises:
      TypeError: If `rule` is not a transformation, or `gradient_steps` is not an int.
      ValueError: If `gradient_steps` is below 1 or differs from the value in an inner
        `every_row`, if the rule runs once per occurrence of an id or needs the norm
        over occurrences, or if the rule has averages and `gradient_steps` is above 1.

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
        text = "be 1 around with_ema, because averages advance in each step"
        fix = f"Write with_ema(every_row(rule, gradient_steps={steps}))."
        raise invalid("every_row: gradient_steps", text, steps, fix)
    match inner.driver:
        case InSequence():
            raise _every_row_in_sequence()
        case Touched(occurrence_norm=True):
            raise ValueError(
                "every_row: rule must not use clipnorm_of='occurrences', because only "
                "summed gradients are known for every row. Write clipnorm_of='sum'."
            )
        case EveryRow(gradient_steps=other) if other != steps:
            text = f"be {other}, as in the every_row call inside"
            fix = "Remove one every_row."
            raise invalid("every_row: gradient_steps", text, steps, fix)
    return declare(rule, driver=EveryRow(gradient_steps=steps))


@equal_calls_are_one
def in_sequence(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies a rule once per occurrence of an id, in sample order.

    It corresponds to TensorFlow's `use_gradient_accumulation=False`, but TensorFlow
    does not guarantee an order. Here, occurrences are ordered by device, then by
    feature, then by sample. However, a step takes as many passes as its most frequent
    id has occurrences, so use `in_sequence` only for comparisons.

    Args:
      rule: A row-local optax transformation.

    Raises:
      TypeError: If `rule` is not a transformation.
      ValueError: If the rule moves every row or has averages.

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
            "in_sequence: rule must not use with_ema, which averages the rows once per "
            "step. Remove in_sequence or with_ema."
        )
    if inner.moves_every_row:
        raise _every_row_in_sequence()
    return declare(rule, driver=InSequence())


def _every_row_in_sequence() -> ValueError:
    return ValueError(
        "A rule cannot run both on every row and once per occurrence of an id: rows "
        "that are not looked up would move as often as the most frequent id occurs. "
        "Remove every_row or lazy_adam=False; or remove in_sequence or "
        "use_gradient_accumulation=False."
    )
