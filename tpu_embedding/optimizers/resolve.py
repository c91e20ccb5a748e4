"""Turns the optimizer that a user passes to a table into a rule for its rows.

This runs while a plan is made, so that problems show before a step is compiled.
"""

import dataclasses
import difflib
import functools
from collections.abc import Iterator
from typing import Any, Final, cast

import jax
import optax

from tpu_embedding.argument_checks import Problem, about, invalid
from tpu_embedding.optimizers.checks import check_rule
from tpu_embedding.optimizers.keras import from_keras_config, is_keras_optimizer
from tpu_embedding.optimizers.options import OPTIMIZERS
from tpu_embedding.optimizers.probe import probe_rule
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
"""States of optax rules that accumulate gradients and apply them only in some steps."""

_AVERAGING: Final = ("ScheduleFreeState",)
"""States of optax rules whose averaging weights fall in every step, including steps
that don't look up the row."""


def optimizer_problems(
    field: str, optimizer: Any, owner: str = ""
) -> Iterator[Problem]:
    """Yields why an optimizer cannot be used. `owner` is like `" for table 'a'"`."""
    try:
        if optimizer is not None:
            check_rule(None, transformation_of(optimizer), "optimizer")
    except (TypeError, ValueError) as error:
        # The plan joins all problems in one error, so the text must begin with a verb.
        text = str(error).rstrip(".")
        rule = text.removeprefix("optimizer must")
        text = f"cannot be used: {text}" if rule == text else f"must{rule}"
        yield Problem(field, optimizer, f"{owner} {text}".lstrip())


def transformation_of(optimizer: TableOptimizer) -> optax.GradientTransformation:
    """Converts a Keras optimizer, or a name in any letter case, to a transformation.

    Equal names give the same object, so that their tables can share a stack.

    Example:
      >>> transformation_of("adagrad") is transformation_of("Adagrad")
      True
    """
    if is_keras_optimizer(optimizer):
        return from_keras_config(optimizer)
    if not isinstance(optimizer, str):
        return cast(optax.GradientTransformation, optimizer)
    # Importing the package has filled OPTIMIZERS.
    if optimizer.lower() not in OPTIMIZERS:
        similar = difflib.get_close_matches(optimizer.lower(), OPTIMIZERS)
        rule = "be an optax transformation or the name of a rule in te.optimizers"
        fix = f"Write one of {similar or sorted(OPTIMIZERS)}."
        raise invalid("optimizer", rule, optimizer, fix)
    return OPTIMIZERS[optimizer.lower()]()


def resolve_optimizer(
    optimizer: TableOptimizer | None, table_name: str, dim: int
) -> RowOptimizer | None:
    """Decides how the layer applies an optimizer to a table with `dim` columns.

    The result is None if the table stays fixed. Tables with equal results can share a
    stack.
    """
    # Each call of optax.set_to_zero makes a new function, so only the function's name
    # can be compared.
    update = getattr(optimizer, "update", None)
    is_fixed = getattr(update, "__qualname__", "").startswith("set_to_zero.")
    if optimizer is None or is_fixed:
        return None
    try:
        return _resolve(transformation_of(optimizer), dim)
    except ValueError as error:
        # `_resolve` is cached for all tables, so the table's name is added here.
        text = f"{error} (Table {table_name!r}.)"
        raise about(type(error)(text), "optimizer", optimizer) from error


def check_row_local(optimizer: TableOptimizer, dim: int) -> None:
    """Rejects an optimizer that a layer cannot apply row by row.

    A row's update may depend on the row, its gradient and its slot variables. It may
    also depend on scalars in the state, and on totals from `table_rows`. The check runs
    your optimizer on some rows, and then on only a few of these rows. The few rows must
    get the same updates in both runs.

    Args:
      optimizer: an optax transformation for rows `[rows, dim]`, a name, or a Keras
        optimizer.
      dim: number of table columns.

    Raises:
      NotRowLocalError: if the optimizer mixes rows, or if its state does not have one
        entry per row. The message says what to use instead.
      ValueError: if options or wrappers contradict each other.

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
    """Probes a rule, and checks that its driver can run it.

    Results are cached, because a probe is slow.
    """
    declared = row_optimizer_of(rule)
    probed = probe_rule(declared, dim)
    optimizer = dataclasses.replace(declared, takes_totals=probed.takes_totals)
    if optimizer.takes_totals and isinstance(optimizer.driver, InSequence):
        raise ValueError(
            "A rule that needs totals over a table's rows cannot run once per "
            "occurrence of an id. Remove in_sequence or "
            "use_gradient_accumulation=False."
        )
    if optimizer.averages == "overwriting" and not optimizer.moves_every_row:
        raise ValueError(
            "with_ema: overwrite_frequency replaces all rows of a table, but the rule "
            "moves only touched rows. Write with_ema(te.optimizers.every_row(rule), "
            "overwrite_frequency=...), or remove it and call finalize_variable_values "
            "at the end."
        )
    if optimizer.averages != "none" and find_state(probed.state, ("AdafactorState",)):
        raise ValueError(
            "with_ema: rule must not be adafactor, which keeps its own averages. Write "
            "te.optimizers.adafactor(..., use_ema=True, ema_momentum=..., "
            "ema_overwrite_frequency=...)."
        )
    steps = optimizer.gradient_steps
    if optimizer.takes_model_norm and steps > 1:
        raise ValueError(
            "global_clipnorm cannot be combined with gradient_accumulation_steps on a "
            "table, which knows only its own collected gradients. Remove one, or sum "
            "batches with te.gradients.add, clip the scaled sum with "
            "te.gradients.clip_by_global_norm, and update once."
        )
    waiting = find_state(probed.state, COLLECTING + _AVERAGING)
    if waiting and not optimizer.moves_every_row:
        raise NotRowLocalError(
            f"The optimizer is not row-local in time: {waiting} needs each row in "
            "every step, but a row is updated only in steps that look it up. Wrap it "
            "in tpu_embedding.optimizers.every_row."
        )
    # A rule that needs totals or combines several steps must see all rounds before it
    # moves a row. Without the dense gradient, a rule that sets rows would clear the
    # rows that a round does not cover.
    needs_dense_gradient = optimizer.takes_totals or steps > 1 or optimizer.sets_rows
    if isinstance(optimizer.driver, EveryRow) and needs_dense_gradient:
        return dataclasses.replace(optimizer, driver=KeptGradient(steps))
    return optimizer


def find_state(state: Any, type_names: tuple[str, ...]) -> str | None:
    """Finds the first of these type names in a state, if any."""

    def is_wanted(node: Any) -> bool:
        return type(node).__name__ in type_names

    nodes = jax.tree.leaves(state, is_leaf=is_wanted)
    return next((type(node).__name__ for node in nodes if is_wanted(node)), None)
