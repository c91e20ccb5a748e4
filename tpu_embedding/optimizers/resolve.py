"""Finds out how the layer applies an optimizer that the user gives to a table."""

import dataclasses
import functools
from typing import Any

import jax
import optax
from jax.core import eval_context

from tpu_embedding.optimizers.analysis.row_local import (
    NotRowLocalError,
    check_elementwise,
    check_rows_apart,
)
from tpu_embedding.optimizers.analysis.row_totals import (
    ANY_DIM,
    reduces_over_rows,
    with_row_totals,
)
from tpu_embedding.optimizers.analysis.slots import sets_rows, slot_row_shapes
from tpu_embedding.optimizers.analysis.trace import (
    TracedRule,
    UntraceableRule,
    trace_rule,
)
from tpu_embedding.optimizers.analysis.walker import same_program
from tpu_embedding.optimizers.checks import check_rule
from tpu_embedding.optimizers.modes import (
    EveryRow,
    InSequence,
    ModelNorm,
    OccurrenceNorm,
)
from tpu_embedding.optimizers.names import transformation_of
from tpu_embedding.optimizers.row_optimizer import RowOptimizer, TableOptimizer


def resolve_optimizer(
    optimizer: TableOptimizer | None,
    table_name: str,
    *table_names: tuple[str, ...],
) -> RowOptimizer | None:
    """Finds out how the layer applies an optimizer to a table.

    Args:
      optimizer: an optax transformation of one array; one of a dict that maps table
        names to arrays, as `optax.multi_transform` with a dict of labels; a name; or a
        Keras optimizer.
      table_name: the name of the table.
      *table_names: the names of tables that such a dict may hold. Each tuple is tried
        in turn: the tables that this optimizer is given for, then all tables.

    Returns:
      The rule of this table. Tables of equal rules share a stack. Tables of an
      optimizer of a dict, or of an optax rule that reduces over rows, do not.

    Raises:
      ValueError: if the name is not known, or modes contradict each other.
    """
    if optimizer is None:
        return None
    transformation = transformation_of(optimizer)
    try:
        # A Linen module may make its plan under `jit`; the analysis needs values.
        with eval_context():
            part = _of_table(transformation, table_name, table_names)
            return _resolve(part, table_name)
    except ValueError as error:
        raise type(error)(
            f"{error} (The optimizer of table {table_name!r}.)"
        ) from error


def check_row_local(optimizer: TableOptimizer | RowOptimizer, dim: int) -> None:
    """Refuses an optimizer that a layer cannot apply to rows; `make_plan` asks it.

    The update of a row may depend on that row, its gradient and its slot variables, on
    values that belong to no row, and on sums over the rows of the gradient.

    Args:
      optimizer: an optax transformation of rows `[rows, dim]`, a name, or a Keras
        optimizer.
      dim: columns of the table.

    Raises:
      NotRowLocalError: naming the operation that mixes rows, and what to use instead.
      ValueError: if the state is not one entry per row, or modes contradict each other.

    Example:
      >>> check_row_local(optax.adam(0.1), dim=8)
      >>> check_row_local(optax.clip_by_global_norm(1.0), dim=8)
    """
    if not isinstance(optimizer, RowOptimizer):
        transformation = transformation_of(optimizer)
        check_rule("check_row_local", transformation, "optimizer")
        with eval_context():
            optimizer = _resolve(transformation, table_name="table")
    check_rows_apart(optimizer, dim)
    slot_row_shapes(optimizer, (dim,))


def _of_table(
    optimizer: optax.GradientTransformation,
    table_name: str,
    table_names: tuple[tuple[str, ...], ...],
) -> optax.GradientTransformation:
    """Returns the part of an optimizer for one table; the optimizer if it has none."""
    whole = _trace(optimizer)
    for names in table_names:
        part = _for_table(optimizer, table_name, tuple(sorted({*names, table_name})))
        of_part = _trace(part)
        if of_part is None:
            continue
        is_whole = (
            whole is not None
            and whole.modes == of_part.modes
            and same_program(whole.init, of_part.init)
            and same_program(whole.update, of_part.update)
        )
        return optimizer if is_whole else part
    return optimizer


def _resolve(optimizer: optax.GradientTransformation, table_name: str) -> RowOptimizer:
    trace = _trace(optimizer)
    if trace is None:
        # The plan's check of rules will say what is wrong.
        return RowOptimizer(transformation=optimizer)
    if not reduces_over_rows(optimizer):
        return _row_optimizer(optimizer)
    every = [mode for mode in trace.modes if isinstance(mode, EveryRow)]
    totals = with_row_totals(optimizer, is_lazy=not every)
    # The numbers in its state are of one table.
    return dataclasses.replace(_row_optimizer(totals), table_name=table_name)


@functools.lru_cache(maxsize=4096)
def _row_optimizer(transformation: optax.GradientTransformation) -> RowOptimizer:
    trace = _trace(transformation)
    assert trace is not None
    every = {mode for mode in trace.modes if isinstance(mode, EveryRow)}
    in_sequence = any(isinstance(mode, InSequence) for mode in trace.modes)
    takes_norm = any(isinstance(mode, OccurrenceNorm) for mode in trace.modes)
    takes_model_norm = any(isinstance(mode, ModelNorm) for mode in trace.modes)
    if len(every) > 1:
        raise ValueError(
            "every_row must have one gradient_steps within an optimizer, got "
            f"{sorted(mode.gradient_steps for mode in every)}."
        )
    if every and in_sequence:
        raise ValueError(
            "A rule cannot be applied to every row and to duplicates in sequence at "
            "once: the rows that are not looked up would be updated as often as the "
            "most frequent id occurs. Take every_row or in_sequence away, or "
            "use_gradient_accumulation=False."
        )
    if trace.takes_totals and in_sequence:
        raise ValueError(
            "A rule that asks for totals over the rows of a table cannot run once per "
            "occurrence of an id; take in_sequence or "
            "use_gradient_accumulation=False away."
        )
    if every and takes_norm:
        raise ValueError(
            "A rule for every row does not see the occurrences of ids, whose norm it "
            "asks for; use clipnorm_of='sum'."
        )
    gradient_steps = next((mode.gradient_steps for mode in every), 1)
    if takes_model_norm and gradient_steps > 1:
        raise ValueError(
            "A table collects the gradients of several steps on its own, so it does "
            "not know the norm of all that the model collects. Take global_clipnorm "
            "away from gradient_accumulation_steps. Or add the gradients of several "
            "batches by te.gradients.add, scale their sum, clip it by "
            "te.gradients.clip_by_global_norm, and update once."
        )
    keeps_gradient = bool(every) and (
        trace.takes_totals
        or gradient_steps > 1
        or sets_rows(transformation, ANY_DIM)
        or not _is_elementwise(transformation)
    )
    return RowOptimizer(
        transformation=transformation,
        rows="every" if every else "touched",
        duplicates="sequence" if in_sequence else "norm" if takes_norm else "sum",
        gradient_steps=gradient_steps,
        keeps_gradient=keeps_gradient,
        takes_totals=trace.takes_totals,
        takes_model_norm=takes_model_norm,
    )


@functools.lru_cache(maxsize=4096)
def _for_table(
    transformation: optax.GradientTransformation, name: str, names: tuple[str, ...]
) -> optax.GradientTransformation:
    """Returns the part of a transformation of `{table name: rows}` for one table."""
    others = {other: optax.MaskedNode() for other in names if other != name}

    def tree(rows: Any) -> Any:
        return rows if rows is None else {name: rows, **others}

    def init(params: Any) -> Any:
        return transformation.init(tree(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = transformation.update(tree(updates), state, tree(params))
        return updates[name], state

    return optax.GradientTransformation(init, update)


def _trace(transformation: optax.GradientTransformation) -> TracedRule | None:
    """Traces a rule of a single array; returns None for any other rule."""
    trace = trace_rule(transformation, (ANY_DIM,))
    if isinstance(trace, UntraceableRule) or not trace.returns_rows:
        return None
    if not trace.is_last:
        raise ValueError(
            "adafactor must be the last of a chain, and not be wrapped by what changes "
            "its updates: it follows the scale of the table by them. Put clipping "
            "before it; learning rate and weight decay are its arguments."
        )
    return trace


def _is_elementwise(transformation: optax.GradientTransformation) -> bool:
    """Returns True if the rule is elementwise, and so are its slot variables."""
    try:
        check_elementwise(transformation)
    except NotRowLocalError:
        return False
    shapes = jax.tree.leaves(slot_row_shapes(transformation, (ANY_DIM,)))
    return all(shape.shape == (ANY_DIM,) for shape in shapes)
