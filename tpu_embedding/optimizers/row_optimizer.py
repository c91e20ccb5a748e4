"""What the layer takes as the optimizer of a table."""

import dataclasses
from typing import Any, Final, Literal

import optax


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowOptimizer:
    """An update rule of tables, and which rows it is applied to.

    A plain optax transformation means one with the defaults. Made by
    `tpu_embedding.optimizers`, where `every_row` and `in_sequence` explain the choices.

    Attributes:
      transformation: an optax transformation that treats each row for itself.
      rows: `"touched"`: rows that were looked up in the step (lazy); `"every"`: all
        rows, with gradient zero where they were not looked up, as dense optimizers do.
      duplicates: `"sum"`: the gradients of one row are summed, then the rule runs
        once; `"sequence"`: the rule runs once for each of them.
    """

    transformation: optax.GradientTransformation
    rows: Literal["touched", "every"] = "touched"
    duplicates: Literal["sum", "sequence"] = "sum"

    def __post_init__(self):
        problems = list(self._problems())
        if problems:
            raise ValueError("; ".join(problems) + ".")

    def _problems(self):
        if not _is_transformation(self.transformation):
            yield (
                "RowOptimizer.transformation must be an optax GradientTransformation, "
                f"got {self.transformation!r}"
            )
        for field in ("rows", "duplicates"):
            allowed = _ROW_OPTIMIZER_CHOICES[field]
            if getattr(self, field) not in allowed:
                yield (
                    f"RowOptimizer.{field} must be one of {list(allowed)}, got "
                    f"{getattr(self, field)!r}"
                )
        if self.rows == "every" and self.duplicates == "sequence":
            yield (
                "RowOptimizer cannot apply a rule to every row and to duplicates in "
                "sequence at once: the rows that are not looked up would be updated "
                "as often as the most frequent id occurs; use duplicates='sum'"
            )

    def init(self, params: Any) -> Any:
        """Returns the rule's state for dense rows."""
        return self.transformation.init(params)

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """Applies the rule to dense rows."""
        return self.transformation.update(updates, state, params)


TableOptimizer = optax.GradientTransformation | RowOptimizer

_ROW_OPTIMIZER_CHOICES: Final = {
    "rows": ("touched", "every"),
    "duplicates": ("sum", "sequence"),
}


def optimizer_problem(owner: str, optimizer: Any) -> str | None:
    """Returns what is wrong with the optimizer of a table or layer, if anything is."""
    if optimizer is None or _is_transformation(optimizer):
        return None
    return (
        f"{owner} must be an optax GradientTransformation, one of "
        f"tpu_embedding.optimizers or None, got {optimizer!r}"
    )


def as_row_optimizer(optimizer: TableOptimizer | None) -> RowOptimizer | None:
    """Wraps a plain optax transformation."""
    if optimizer is None or isinstance(optimizer, RowOptimizer):
        return optimizer
    return RowOptimizer(transformation=optimizer)


def _is_transformation(value: Any) -> bool:
    return isinstance(value, optax.GradientTransformation | RowOptimizer)
