"""Finds out how the layer applies an optimizer that the user gives to a table."""

import dataclasses
import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.checks import check_rule
from tpu_embedding.optimizers.names import text_of_name, transformation_of
from tpu_embedding.optimizers.probe import probe_rule
from tpu_embedding.optimizers.row_optimizer import (
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
    """Refuses an optimizer that a layer cannot apply to rows; `make_plan` asks it.

    The update of a row may depend on that row, its gradient and its slot variables, on
    values that belong to no row, and on totals that the rule asks `table_rows` for. The
    optimizer is run on some rows, and on fewer of them: the updates must be the same.

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
    _resolve(transformation, dim)


@functools.lru_cache(maxsize=4096)
def _resolve(rule: optax.GradientTransformation, dim: int) -> RowOptimizer:
    optimizer = row_optimizer_of(rule)
    probed = probe_rule(optimizer.transformation, dim)
    optimizer = dataclasses.replace(optimizer, takes_totals=probed.takes_totals)
    _check_modes(optimizer, dim)
    needs_gradient = optimizer.rows == "every" and (
        optimizer.takes_totals or optimizer.gradient_steps > 1 or optimizer.sets_rows
    )
    return dataclasses.replace(optimizer, keeps_gradient=needs_gradient)


def _check_modes(optimizer: RowOptimizer, dim: int) -> None:
    """Refuses modes that exclude each other."""
    is_every, duplicates = optimizer.rows == "every", optimizer.duplicates
    if is_every and duplicates == "sequence":
        raise ValueError(
            "A rule cannot be applied to every row and to duplicates in sequence at "
            "once: the rows that are not looked up would be updated as often as the "
            "most frequent id occurs. Take every_row or in_sequence away, or "
            "use_gradient_accumulation=False."
        )
    if is_every and duplicates == "norm":
        raise ValueError(
            "A rule for every row does not see the occurrences of ids, whose norm it "
            "asks for; use clipnorm_of='sum'."
        )
    if optimizer.takes_totals and duplicates == "sequence":
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
    if is_every:
        return
    rows = jax.ShapeDtypeStruct((5, dim), jnp.float32)
    state = jax.eval_shape(optimizer.init, rows)
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
