"""From what the user gives as an optimizer to how the layer applies it to a table."""

import dataclasses
import functools
import re
from typing import Any, Final

import jax
import jax.extend as jex
import jax.numpy as jnp
import optax

from tpu_embedding.optimizers.analysis.row_local import (
    NotRowLocalError,
    check_elementwise,
)
from tpu_embedding.optimizers.analysis.row_totals import (
    reduces_over_rows,
    with_row_totals,
)
from tpu_embedding.optimizers.analysis.slots import slot_row_shapes
from tpu_embedding.optimizers.modes import (
    EveryRow,
    InSequence,
    Mode,
    MustBeLast,
    OccurrenceNorm,
    requested_modes,
)
from tpu_embedding.optimizers.names import optimizer_by_name
from tpu_embedding.optimizers.row_optimizer import RowOptimizer, TableOptimizer
from tpu_embedding.optimizers.table_rows import TableRows, table_rows_context

_PROBE: Final = jax.ShapeDtypeStruct((2, 3), jnp.float32)
_ADDRESS: Final = re.compile("0x[0-9a-f]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Trace:
    """What was seen of a transformation of a single array.

    Attributes:
      program: its jaxprs, as text.
      modes: what its rules noted.
      takes_totals: whether one asked for totals over rows.
    """

    program: str
    modes: tuple[Mode, ...]
    takes_totals: bool


class _TotalWithinError(Exception):
    """A total is asked for where it cannot be taken out: `lax.cond` and the like."""


def resolve_optimizer(
    optimizer: TableOptimizer | None,
    table_name: str,
    *table_names: tuple[str, ...],
) -> RowOptimizer | None:
    """Finds out how an optimizer is to be applied to a table.

    Args:
      optimizer: an optax transformation of one array, or of a dict of table name to
        array, as `optax.multi_transform` and `optax.masked` with a dict of labels
        are; or a name.
      table_name: the table.
      *table_names: the tables that such a dict may name, in the order of preference:
        those that this optimizer is given for, or all.

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
    try:
        return _resolve(_of_table(optimizer, table_name, table_names), table_name)
    except ValueError as error:
        raise type(error)(
            f"{error} (The optimizer of table {table_name!r}.)"
        ) from error


def _of_table(
    optimizer: optax.GradientTransformation,
    table_name: str,
    table_names: tuple[tuple[str, ...], ...],
) -> optax.GradientTransformation:
    """Returns the part of an optimizer that is for one table, if it has parts."""
    whole = _trace(optimizer)
    for names in table_names:
        part = _for_table(optimizer, table_name, tuple(sorted({*names, table_name})))
        of_part = _trace(part)
        if of_part is None:
            continue
        if whole is not None and of_part.program == whole.program:
            return optimizer
        return part
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
    keeps_gradient = bool(every) and (
        trace.takes_totals or gradient_steps > 1 or not _is_elementwise(transformation)
    )
    return RowOptimizer(
        transformation=transformation,
        rows="every" if every else "touched",
        duplicates="sequence" if in_sequence else "norm" if takes_norm else "sum",
        gradient_steps=gradient_steps,
        keeps_gradient=keeps_gradient,
        takes_totals=trace.takes_totals,
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


@functools.lru_cache(maxsize=4096)
def _trace(transformation: optax.GradientTransformation) -> _Trace | None:
    """Traces a transformation of a single array; None if it is none of that."""
    asked: list[Any] = []
    is_last: list[bool] = []

    def run(rows):
        outside = jex.core.get_opaque_trace_state(convention="nnx")

        def all_reduce(totals, reduction):
            del reduction
            if jex.core.get_opaque_trace_state(convention="nnx") != outside:
                raise _TotalWithinError
            asked.append(totals)
            return totals

        everything = jnp.ones(rows.shape[:1], bool)
        known = TableRows(
            table_sizes=jnp.ones((1,)),
            tables=None,
            is_used=everything,
            is_touched=everything,
            all_reduce=all_reduce,
        )
        with table_rows_context(known), requested_modes() as modes:
            state = transformation.init(rows)
            asked.clear()
            updates, state = transformation.update(rows, state, rows)
        noted.extend(modes)
        last = [mode.updates for mode in modes if isinstance(mode, MustBeLast)]
        is_last.extend(each is updates for each in last)
        return updates, state

    noted: list[Mode] = []
    try:
        jaxpr, shapes = jax.make_jaxpr(run, return_shape=True)(_PROBE)
    except _TotalWithinError as error:
        raise NotRowLocalError(
            "The optimizer asks for totals over the rows of a table within lax.cond or "
            "another wrapper that traces it, such as optax.apply_if_finite, MultiSteps "
            "or a global norm beside it. Put zero_nans or clipping of elements before "
            "it, or use every_row(rule, gradient_steps=...) and the rule's own options."
        ) from error
    except Exception:
        return None
    if getattr(shapes[0], "shape", None) != _PROBE.shape:
        return None
    if not all(is_last):
        raise ValueError(
            "adafactor must be the last of a chain, and not be wrapped by what changes "
            "its updates: it follows the scale of the table by them. Put clipping "
            "before it; learning rate and weight decay are its arguments."
        )
    return _Trace(
        program=_ADDRESS.sub("", str(jaxpr)),
        modes=tuple(mode for mode in noted if not isinstance(mode, MustBeLast)),
        takes_totals=bool(asked),
    )


def _is_elementwise(transformation: optax.GradientTransformation) -> bool:
    """Whether each element is treated for itself, and has slots of its own."""
    try:
        check_elementwise(transformation)
    except NotRowLocalError:
        return False
    dim = _PROBE.shape[1]
    shapes = jax.tree.leaves(slot_row_shapes(transformation, dim))
    return all(shape.shape == (dim,) for shape in shapes)
