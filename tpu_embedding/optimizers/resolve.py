"""Finds out how the layer applies an optimizer that the user gives to a table."""

import dataclasses
import difflib
import functools
from typing import Any, Final, cast

import jax
import optax

from tpu_embedding.optimizers.checks import check_rule
from tpu_embedding.optimizers.keras import from_keras_config, is_keras_optimizer
from tpu_embedding.optimizers.options import OPTIMIZERS
from tpu_embedding.optimizers.probe import probe_rule, split_rule
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


def optimizer_problem(field: str, optimizer: Any, owner: str = "") -> str | None:
    """Returns why a table or layer cannot take an optimizer, or `None` if it can.

    Args:
      field: the argument that holds it.
      optimizer: the value that the user gives.
      owner: text that names the table, as `" for table 'movie'"`.
    """
    try:
        if optimizer is not None:
            check_rule(None, transformation_of(optimizer), "optimizer")
    except (TypeError, ValueError) as error:
        text = str(error).rstrip(".")
        prefix = "" if text.startswith(f"{field} must") else f"{field}{owner}: "
        return f"{prefix}{text}"
    return None


def transformation_of(optimizer: TableOptimizer) -> optax.GradientTransformation:
    """Returns a table's optimizer as a transformation.

    A name stands for a rule of this package with its default hyperparameters, in any
    letter case. Calls with one name return the same value.

    Raises:
      ValueError: if no rule has the name, or a Keras optimizer has no equivalent.

    Example:
      >>> transformation_of("adagrad") is transformation_of("Adagrad")
      True
    """
    if is_keras_optimizer(optimizer):
        return from_keras_config(optimizer)
    if not isinstance(optimizer, str):
        return cast(optax.GradientTransformation, optimizer)
    # The package has imported all rules before anybody asks.
    if optimizer.lower() not in OPTIMIZERS:
        similar = difflib.get_close_matches(optimizer.lower(), OPTIMIZERS)
        raise ValueError(
            "optimizer must be an optax transformation or the name of a rule in "
            f"te.optimizers, got {optimizer!r}. Write one of "
            f"{similar or sorted(OPTIMIZERS)}."
        )
    return OPTIMIZERS[optimizer.lower()]()


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
    except ValueError as error:
        raise type(error)(f"{error} (Table {table_name!r}.)") from error
    if not isinstance(optimizer, str):
        return resolved
    (rate,) = OPTIMIZERS[optimizer.lower()].args
    name = f"{optimizer.lower()!r}, at its default learning rate of {rate}"
    return dataclasses.replace(resolved, named=name)


def check_row_local(optimizer: TableOptimizer, dim: int) -> None:
    """Rejects an optimizer that a layer cannot apply to rows; `make_plan` calls it.

    The update of a row may depend on that row, its gradient and its slot variables, on
    scalars of the state, and on totals that the rule asks `table_rows` for. The
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
    resolved = _resolve(transformation, dim)
    if not resolved.takes_totals:
        split_rule(resolved.transformation, dim, num_rows=3)


@functools.lru_cache(maxsize=4096)
def _resolve(rule: optax.GradientTransformation, dim: int) -> RowOptimizer:
    """Returns a rule with the driver that runs it; rejects what a driver can't run."""
    declared = row_optimizer_of(rule)
    probed = probe_rule(declared, dim)
    optimizer = dataclasses.replace(declared, takes_totals=probed.takes_totals)
    if optimizer.takes_totals and isinstance(optimizer.driver, InSequence):
        raise ValueError(
            "A rule that asks for totals over the rows of a table cannot run once per "
            "occurrence of an id. Remove in_sequence or "
            "use_gradient_accumulation=False."
        )
    if optimizer.averages == "overwriting" and not optimizer.moves_every_row:
        raise ValueError(
            "with_ema: overwrite_frequency replaces all rows of a table by their "
            "averages, but the rule moves touched rows only. Write with_ema("
            "te.optimizers.every_row(rule), overwrite_frequency=...), or leave it out "
            "and call finalize_variable_values at the end."
        )
    if optimizer.averages != "none" and find_state(probed.state, ("AdafactorState",)):
        raise ValueError(
            "with_ema: rule must not be adafactor, whose scale follows its own "
            "averages. Write te.optimizers.adafactor(..., use_ema=True, ema_momentum="
            "..., ema_overwrite_frequency=...)."
        )
    steps = optimizer.gradient_steps
    if optimizer.takes_model_norm and steps > 1:
        raise ValueError(
            "A table collects the gradients of several steps on its own, so it does "
            "not know the norm of all that the model collects. Remove global_clipnorm "
            "or gradient_accumulation_steps. Or add the gradients of several batches "
            "with te.gradients.add, scale their sum, clip it with "
            "te.gradients.clip_by_global_norm, and update once."
        )
    waiting = find_state(probed.state, COLLECTING + _AVERAGING)
    if waiting and not optimizer.moves_every_row:
        raise NotRowLocalError(
            f"The optimizer is not row-local in time: {waiting} needs each row in "
            "every step, but a row is updated in the steps that look it up. Use "
            "tpu_embedding.optimizers.every_row."
        )
    needs_dense_gradient = optimizer.takes_totals or steps > 1 or optimizer.sets_rows
    if isinstance(optimizer.driver, EveryRow) and needs_dense_gradient:
        return dataclasses.replace(optimizer, driver=KeptGradient(steps))
    return optimizer


def find_state(state: Any, type_names: tuple[str, ...]) -> str | None:
    """Returns the name of the first node of a state whose type has one of the names."""

    def is_wanted(node: Any) -> bool:
        return type(node).__name__ in type_names

    nodes = jax.tree.leaves(state, is_leaf=is_wanted)
    return next((type(node).__name__ for node in nodes if is_wanted(node)), None)
