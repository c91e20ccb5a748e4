"""The types of optimizers: as the user gives one, and as the layer applies it."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import optax

from tpu_embedding.optimizers.keras_instances import KerasOptimizer
from tpu_embedding.optimizers.table_rows import is_in_layer

TableOptimizer = optax.GradientTransformation | str | KerasOptimizer
"""An optax transformation; or the name of a rule of this package, as `"adagrad"`; or a
Keras optimizer, which is read when the plan is made."""


class NotRowLocalError(ValueError):
    """A layer cannot apply a transformation to the rows of a table one by one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowOptimizer:
    """A rule, and the way in which the layer applies it.

    Attributes:
      transformation: an optax transformation of `[rows, dim]`.
      rows: `"touched"`: the rule updates the rows that were looked up in the step
        (lazy). `"every"`: it updates all rows, as dense optimizers do; the gradient of
        rows that were not looked up is zero.
      duplicates: `"sum"`: the gradients of one row are summed, then the rule runs
        once. `"sequence"`: the rule runs once for each gradient. `"norm"`: they are
        summed, and the rule also asks for the norm of all of them.
      gradient_steps: number of steps whose gradients are summed before the rule runs.
      takes_model_norm: whether the rule asks for the norm of the model's gradients.
      sets_rows: whether the rule sets rows without reading them, as `assign` does.
      takes_totals: whether the rule asks for totals over the rows of a table. The plan
        finds it out.
      keeps_gradient: whether the state holds a dense gradient. It does for rules for
        every row that collect gradients, or ask for totals. The plan finds it out.
      named: the name that a table gives in place of a rule, and its learning rate, as
        text; rules that differ in it alone are equal.
    """

    transformation: optax.GradientTransformation
    rows: Literal["touched", "every"] = "touched"
    duplicates: Literal["sum", "sequence", "norm"] = "sum"
    gradient_steps: int = 1
    takes_model_norm: bool = False
    sets_rows: bool = False
    takes_totals: bool = False
    keeps_gradient: bool = False
    named: str = dataclasses.field(default="", compare=False)

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
    refuses that.

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
          on_arrays: transformation of dense arrays; None: that of the rows.
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
      >>> declare(optax.sgd(0.1), rows="every").row_optimizer.rows
      'every'
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
    wrapped = dataclasses.replace(
        inner, transformation=wrap(inner.transformation), sets_rows=False
    )
    return DeclaredRule(wrapped, on_arrays=wrap(rule))


def _check_not_wrapped(inner: RowOptimizer) -> None:
    plain = RowOptimizer(transformation=inner.transformation, sets_rows=inner.sets_rows)
    if inner == plain:
        return
    raise NotRowLocalError(
        "every_row, in_sequence, and rules that ask for a norm of the step must be the "
        "outermost of an optimizer: a wrapper of optax around them hides the rows that "
        "they are for. Write every_row(optax.chain(...)) in place of "
        "optax.chain(..., every_row(...)), and so for optax.inject_hyperparams."
    )
