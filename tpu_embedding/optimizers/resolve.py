"""From what the user gives as an optimizer to how the layer applies it to a table."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.modes import (
    EveryRowState,
    InSequenceState,
    OccurrenceNormState,
)
from tpu_embedding.optimizers.names import optimizer_by_name
from tpu_embedding.optimizers.row_local import (
    NotRowLocalError,
    check_elementwise,
)
from tpu_embedding.optimizers.row_optimizer import RowOptimizer, TableOptimizer
from tpu_embedding.optimizers.row_totals import reduces_over_rows, with_row_totals
from tpu_embedding.optimizers.table_rows import TableRows, among

_PROBE: Final = jax.ShapeDtypeStruct((2, 3), jnp.float32)


def resolve_optimizer(
    optimizer: TableOptimizer | None, table_name: str, table_names: tuple[str, ...]
) -> RowOptimizer | None:
    """Finds out how an optimizer is to be applied to a table.

    Args:
      optimizer: an optax transformation of one array, or of a dict of table name to
        array, as `optax.multi_transform` and `optax.masked` with a dict of labels
        are; or a name.
      table_name: the table.
      table_names: all tables that this optimizer is given for.

    Returns:
      The rule of this table. Equal arguments give the same value, so tables of one
      optimizer are stacked; those of an optimizer of a dict, or of one from elsewhere
      that reduces over rows, are not.

    Raises:
      ValueError: if the name is not known, or modes contradict each other.
    """
    if optimizer is None:
        return None
    if isinstance(optimizer, str):
        optimizer = optimizer_by_name(optimizer)
    if not _takes(optimizer, _PROBE):
        of_table = _for_table(optimizer, table_name, tuple(sorted(set(table_names))))
        if _takes(of_table, _PROBE):
            optimizer = of_table
    if reduces_over_rows(optimizer):
        is_lazy = not _marks_of(optimizer, EveryRowState)
        try:
            totals = with_row_totals(optimizer, is_lazy=is_lazy)
        except NotRowLocalError as error:
            raise NotRowLocalError(
                f"{error} (The optimizer of table {table_name!r}.)"
            ) from error
        # The numbers in its state are of one table.
        return dataclasses.replace(_row_optimizer(totals), table_name=table_name)
    return _row_optimizer(optimizer)


@functools.lru_cache(maxsize=4096)
def _row_optimizer(transformation: optax.GradientTransformation) -> RowOptimizer:
    try:
        state = jax.eval_shape(transformation.init, _PROBE)
    except Exception:
        # The plan's check of rules will say what is wrong, with the tables' names.
        return RowOptimizer(transformation=transformation)
    marks = list(_marks(state))
    every = [mark for mark in marks if isinstance(mark, EveryRowState)]
    in_sequence = any(isinstance(mark, InSequenceState) for mark in marks)
    if every and in_sequence:
        raise ValueError(
            "A rule cannot be applied to every row and to duplicates in sequence at "
            "once: the rows that are not looked up would be updated as often as the "
            "most frequent id occurs. Take every_row or in_sequence away, or "
            "use_gradient_accumulation=False."
        )
    takes_totals = _takes_totals(transformation, state)
    if takes_totals and in_sequence:
        raise ValueError(
            "A rule that asks for totals over the rows of a table cannot run once per "
            "occurrence of an id; take in_sequence or "
            "use_gradient_accumulation=False away."
        )
    takes_norm = any(isinstance(mark, OccurrenceNormState) for mark in marks)
    if every and takes_norm:
        raise ValueError(
            "A rule for every row does not see the occurrences of ids, whose norm it "
            "asks for; use clipnorm_of='sum'."
        )
    gradient_steps = max([mark.gradient_steps for mark in every], default=1)
    return RowOptimizer(
        transformation=transformation,
        rows="every" if every else "touched",
        duplicates="sequence" if in_sequence else "norm" if takes_norm else "sum",
        gradient_steps=gradient_steps,
        keeps_gradient=bool(every)
        and (takes_totals or gradient_steps > 1 or not _is_elementwise(transformation)),
        takes_totals=takes_totals,
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


def _takes(
    transformation: optax.GradientTransformation, rows: jax.ShapeDtypeStruct
) -> bool:
    """Whether a transformation can be applied to a single array."""

    def run(rows):
        return transformation.update(rows, transformation.init(rows), rows)[0]

    try:
        result = jax.eval_shape(run, rows)
    except Exception:
        return False
    return getattr(result, "shape", None) == rows.shape


def _marks_of(transformation: optax.GradientTransformation, kind: type) -> list[Any]:
    state = jax.eval_shape(transformation.init, _PROBE)
    return [mark for mark in _marks(state) if isinstance(mark, kind)]


def _takes_totals(transformation: optax.GradientTransformation, state: Any) -> bool:
    asked = []

    def all_reduce(totals, reduction):
        asked.append(reduction)
        return totals

    everything = jnp.ones(_PROBE.shape[:1], bool)
    rows = TableRows(
        table_sizes=jnp.ones((1,)),
        tables=None,
        is_used=everything,
        is_touched=everything,
        all_reduce=all_reduce,
    )
    try:
        with among(rows):
            jax.eval_shape(transformation.update, _PROBE, state, _PROBE)
    except Exception:
        return False
    return bool(asked)


def _is_elementwise(transformation: optax.GradientTransformation) -> bool:
    try:
        check_elementwise(transformation)
    except NotRowLocalError:
        return False
    return True


def _marks(tree: Any) -> Iterator[Any]:
    """Yields the marks in a state, of nested tuples, dicts and dataclasses."""
    if isinstance(tree, EveryRowState | InSequenceState | OccurrenceNormState):
        yield tree
    children: Any = ()
    if isinstance(tree, EveryRowState):
        children = (tree.inner,)
    elif isinstance(tree, tuple | list):
        children = tree
    elif isinstance(tree, dict):
        children = tree.values()
    for child in children:
        yield from _marks(child)
