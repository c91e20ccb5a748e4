"""Finds out how the layer applies an optimizer that the user gives to a table."""

import dataclasses
import functools
from typing import Any, Final

import jax
import optax

from tpu_embedding.optimizers.checks import check_rule
from tpu_embedding.optimizers.names import text_of_name, transformation_of
from tpu_embedding.optimizers.probe import check_any_number_of_rows, probe_rule
from tpu_embedding.optimizers.row_optimizer import (
    EveryRow,
    InSequence,
    KeptGradient,
    NotRowLocalError,
    RowOptimizer,
    TableOptimizer,
    row_optimizer_of,
)

COLLECTING: Final = ("MultiStepsState", "ApplyEvery", "SAMState")
"""States of optax rules that collect gradients, and apply them in some steps only."""

_AVERAGING: Final = ("ScheduleFreeState",)
"""States of optax rules whose weight of an update falls with each step, whether the row
was there or not."""


def resolve_optimizer(
    optimizer: TableOptimizer | None, table_name: str, dim: int
) -> RowOptimizer | None:
    """Finds out how the layer applies an optimizer to a table.

    Args:
      optimizer: an optax transformation of one array; a name; or a Keras optimizer.
      table_name: the name of the table, for errors.
      dim: columns of the table.

    Returns:
      The rule of this table. Tables of equal rules share a stack.

    Raises:
      NotRowLocalError: if the rule mixes rows.
      ValueError: if the name is not known, or modes contradict each other.
    """
    if optimizer is None:
        return None
    try:
        resolved = _resolve(transformation_of(optimizer), dim)
        return dataclasses.replace(resolved, named=text_of_name(optimizer))
    except ValueError as error:
        raise type(error)(
            f"{error} (The optimizer of table {table_name!r}.)"
        ) from error


def check_row_local(optimizer: TableOptimizer, dim: int) -> None:
    """Rejects an optimizer that a layer cannot apply to rows; `make_plan` asks it.

    The update of a row may depend on that row, its gradient and its slot variables, on
    values that belong to no row, and on totals that the rule asks `table_rows` for. The
    optimizer is run on some rows, and on few of them alone: the updates must be the
    same. It is also traced for another number of rows, and must do the same there; a
    plan leaves that check to the first step.

    Args:
      optimizer: an optax transformation of rows `[rows, dim]`, a name, or a Keras
        optimizer.
      dim: columns of the table.

    Raises:
      NotRowLocalError: saying what to use instead.
      ValueError: if the state is not one entry per row, or modes contradict each other.

    Example:
      >>> check_row_local(optax.adam(0.1), dim=8)
      >>> try:
      ...     check_row_local(optax.clip_by_global_norm(1.0), dim=8)
      ... except NotRowLocalError as error:
      ...     print(str(error)[:50])
      The optimizer is not row-local: it mixes rows of a
    """
    transformation = transformation_of(optimizer)
    check_rule("check_row_local", transformation, "optimizer")
    check_any_number_of_rows(_resolve(transformation, dim), dim)


@functools.lru_cache(maxsize=4096)
def _resolve(rule: optax.GradientTransformation, dim: int) -> RowOptimizer:
    declared = row_optimizer_of(rule)
    probed = probe_rule(declared, dim)
    optimizer = dataclasses.replace(declared, takes_totals=probed.takes_totals)
    _check_modes(optimizer, probed.state)
    steps = optimizer.gradient_steps
    needs_dense_gradient = optimizer.takes_totals or steps > 1 or optimizer.sets_rows
    if isinstance(optimizer.driver, EveryRow) and needs_dense_gradient:
        return dataclasses.replace(optimizer, driver=KeptGradient(steps))
    return optimizer


def _check_modes(optimizer: RowOptimizer, state: Any) -> None:
    """Rejects a rule that its driver cannot run.

    Args:
      optimizer: the rule, and its driver.
      state: the state of the rule, as shapes and dtypes.
    """
    if optimizer.takes_totals and isinstance(optimizer.driver, InSequence):
        raise ValueError(
            "A rule that asks for totals over the rows of a table cannot run once per "
            "occurrence of an id; take in_sequence or "
            "use_gradient_accumulation=False away."
        )
    if optimizer.takes_model_norm and optimizer.gradient_steps > 1:
        raise ValueError(
            "A table collects the gradients of several steps on its own, so it does "
            "not know the norm of all that the model collects. Take global_clipnorm "
            "away from gradient_accumulation_steps. Or add the gradients of several "
            "batches by te.gradients.add, scale their sum, clip it by "
            "te.gradients.clip_by_global_norm, and update once."
        )
    if optimizer.moves_every_row:
        return
    if name := find_state(state, COLLECTING + _AVERAGING):
        raise NotRowLocalError(
            f"The optimizer is not row-local in time: {name} needs each row in every "
            "step, but a row is updated in the steps that look it up. Use "
            "tpu_embedding.optimizers.every_row."
        )


def find_state(state: Any, type_names: tuple[str, ...]) -> str | None:
    """Returns the name of the first node of a state whose type has one of the names."""

    def is_wanted(node: Any) -> bool:
        return type(node).__name__ in type_names

    nodes = jax.tree.leaves(state, is_leaf=is_wanted)
    return next((type(node).__name__ for node in nodes if is_wanted(node)), None)
