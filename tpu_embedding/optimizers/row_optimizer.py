"""What the layer takes as the optimizer of a table, and what it makes of it."""

import dataclasses
from typing import Any, Literal

import optax

TableOptimizer = optax.GradientTransformation | str
"""An optax transformation, or the name of one of this package, such as `"adagrad"`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowOptimizer:
    """An update rule of tables, and how it is applied; made by `resolve_optimizer`.

    Attributes:
      transformation: an optax transformation of `[rows, dim]`.
      rows: `"touched"`: rows that were looked up in the step (lazy); `"every"`: all
        rows, with gradient zero where they were not looked up, as dense optimizers do.
      duplicates: `"sum"`: the gradients of one row are summed, then the rule runs
        once; `"sequence"`: the rule runs once for each of them; `"norm"`: summed, but
        the rule also asks for the norm of all of them.
      gradient_steps: steps whose gradients are collected before the rule runs.
      keeps_gradient: whether the dense gradient lies in the state: of rules for every
        row, those that do not treat each element for itself.
      takes_totals: whether the rule asks for totals over rows.
      table_name: the only table that it is for; None: any.
    """

    transformation: optax.GradientTransformation
    rows: Literal["touched", "every"] = "touched"
    duplicates: Literal["sum", "sequence", "norm"] = "sum"
    gradient_steps: int = 1
    keeps_gradient: bool = False
    takes_totals: bool = False
    table_name: str | None = None

    def init(self, params: Any) -> Any:
        """Returns the rule's state for dense rows."""
        return self.transformation.init(params)

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """Applies the rule to dense rows."""
        return self.transformation.update(updates, state, params)
