"""Lowers an optimizer rule to the computation that SparseCores apply to each row."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtyping import Array

from tpu_embedding.optimizers.row_optimizer import RowOptimizer


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RowRule:
    """An elementwise rule, split into values of a step and arithmetic on rows.

    Attributes:
      num_slots: slot variables of the rule.
      num_hyperparameters: values that belong to no row and that rows need.
      values: takes the leaves of the state that belong to no row, such as the step
        count, in the order of the state. Returns the hyper-parameters, float32
        scalars, and the new leaves.
      rows: takes gradients, rows and slots `[n, width]`, then the hyper-parameters.
        Returns the new rows and slots.
      stablehlo: the same function of `[1, width]` arrays, hyper-parameters included.
    """

    num_slots: int
    num_hyperparameters: int
    values: Callable[[list[Any]], tuple[tuple[Array, ...], list[Any]]]
    rows: Callable[..., tuple[Array, ...]]
    stablehlo: str


def row_rule(optimizer: RowOptimizer, dim: int, width: int) -> RowRule | str:
    """Returns the rule for SparseCores; or why it cannot run there, in plain words.

    Args:
      optimizer: the rule of rows.
      dim: columns of the table.
      width: columns of a stored row, at least `dim`. Columns beyond `dim` keep their
        values.
    """
    raise NotImplementedError
