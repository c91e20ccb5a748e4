"""The types of optimizers: as the user gives one, and as the layer applies it."""

import dataclasses
from typing import Any, Literal

import optax

from tpu_embedding.optimizers.keras_instances import KerasOptimizer

TableOptimizer = optax.GradientTransformation | str | KerasOptimizer
"""An optax transformation; or the name of a rule of this package, as `"adagrad"`; or a
Keras optimizer, which is read when the plan is made."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowOptimizer:
    """A rule, and the way in which the layer applies it; made by `resolve_optimizer`.

    Attributes:
      transformation: an optax transformation of `[rows, dim]`.
      rows: `"touched"`: the rule updates the rows that were looked up in the step
        (lazy). `"every"`: it updates all rows, as dense optimizers do; the gradient of
        rows that were not looked up is zero.
      duplicates: `"sum"`: the gradients of one row are summed, then the rule runs
        once. `"sequence"`: the rule runs once for each gradient. `"norm"`: they are
        summed, and the rule also asks for the norm of all of them.
      gradient_steps: number of steps whose gradients are summed before the rule runs.
      keeps_gradient: whether the state holds a dense gradient. It does for rules for
        every row that collect gradients, or are not elementwise.
      takes_totals: whether the rule asks for totals over the rows of a table.
      takes_model_norm: whether the rule asks for the norm of the model's gradients.
      table_name: the only table that the rule is for; None: any table.
    """

    transformation: optax.GradientTransformation
    rows: Literal["touched", "every"] = "touched"
    duplicates: Literal["sum", "sequence", "norm"] = "sum"
    gradient_steps: int = 1
    keeps_gradient: bool = False
    takes_totals: bool = False
    takes_model_norm: bool = False
    table_name: str | None = None

    def init(self, params: Any) -> Any:
        """Returns the rule's state for dense rows."""
        return self.transformation.init(params)

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """Applies the rule to dense rows."""
        return self.transformation.update(updates, state, params)
