"""Matches the tables of a source with those of a model, and lists every mismatch."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embedding.argument_checks import describe_value
from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.source import RowArray, SourceTable, TableSource
from tpu_embedding.inputs.wide_ids import NO_WIDE_ID, fingerprints_of
from tpu_embedding.types import Ids64

ImportedSlots = Literal["same_rule", "none"] | Mapping[str, str]
"""Slots to import: those of an equal rule; none; or own name to source's name."""

ImportedRows = Literal["equal", "shared"]
"""Numbers of rows: they must be equal, or the rows that both tables have are taken.

In dynamic tables: all ids must have a place, or those with one are taken.
"""

_SAME_SLOTS: Final[Mapping[tuple[str, ...], tuple[tuple[str, ...], ...]]] = {
    ("accumulators",): (("accumulator",), ("momentum1",), ("0",)),
    ("accumulators", "linears"): (("accumulator", "linear"), ("0", "1")),
    ("accumulators", "momenta"): (("accumulator", "momentum"), ("0", "1")),
    ("momenta", "velocities"): (
        ("momentum", "velocity"),
        ("momentum1", "momentum2"),
        ("m", "v"),
        ("0", "1"),
    ),
}
"""Slot variables of a rule here, to their names in other libraries. Slot variables that
were saved as a plain tuple have numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Options of an import; see `import_tables`."""

    tables: Collection[str] | None = None
    rename: Mapping[str, str] = dataclasses.field(default_factory=dict)
    slots: ImportedSlots = "same_rule"
    rows: ImportedRows = "equal"
    ids: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for field, value in (("rename", self.rename), ("ids", self.ids)):
            if not isinstance(value, Mapping):
                raise TypeError(
                    f"{field} must be a dict by the names of tables, got "
                    f"{describe_value(value)}."
                )
        if isinstance(self.tables, str):
            raise TypeError(f"tables must be a list of names, got {self.tables!r}.")
        is_mapping = isinstance(self.slots, Mapping)
        if not is_mapping and self.slots not in ("same_rule", "none"):
            raise ValueError(
                "slots must be 'same_rule', 'none' or a dict of slot names, got "
                f"{self.slots!r}."
            )
        if self.rows not in ("equal", "shared"):
            raise ValueError(f"rows must be 'equal' or 'shared', got {self.rows!r}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetTable:
    """A table of the model that may be imported.

    Attributes:
      name: name of the table; with several layers, `"path of the layer/table"`.
      vocabulary_size: rows.
      dim: columns.
      slots: row shape of each slot variable by name; None without its optimizer.
      is_dynamic: True for a table whose rows have ids.
    """

    name: str
    vocabulary_size: int
    dim: int
    slots: Mapping[str, jax.ShapeDtypeStruct] | None
    is_dynamic: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatchedTable:
    """A table to import.

    Attributes:
      source: name of the table in the source.
      values: rows of the source.
      slots: slot variables of the source, by their names in this package.
      slot_names: their names in the source.
      dropped: slot variables of the source that are not imported, to the reason.
      num_rows: rows to import, from the first one on.
      ids: uint64, ids of the rows of a dynamic table; None for a static one.
    """

    source: str
    values: RowArray
    slots: Mapping[str, RowArray]
    slot_names: Mapping[str, str]
    dropped: Mapping[str, str]
    num_rows: int
    ids: np.ndarray | None = None


def match_tables(
    source: TableSource, targets: Sequence[TargetTable], options: ImportOptions
) -> dict[str, MatchedTable]:
    """Returns the tables to import by the model's name.

    Args:
      source: the tables that there are.
      targets: tables of the model.
      options: what to import.

    Raises:
      CheckpointError: with all mismatches, and a way out for each.
    """
    names = _names(source, targets, options)
    matched: dict[str, MatchedTable] = {}
    problems: list[str] = []
    for target in targets:
        if target.name in names:
            other = names[target.name]
            try:
                matched[target.name] = _match(target, other, source, options)
            except CheckpointError as error:
                problems.append(f"table {target.name!r} of {other!r}: {error}")
    if problems:
        raise CheckpointError(
            f"These parts of {source.origin} do not fit the model:\n  "
            + "\n  ".join(problems)
        )
    return matched


def _names(
    source: TableSource, targets: Sequence[TargetTable], options: ImportOptions
) -> dict[str, str]:
    """Returns the source's name of each table to import, by the model's name."""
    own = [target.name for target in targets]
    wanted = own if options.tables is None else options.tables
    given = {"tables": wanted, "rename": options.rename, "ids": options.ids}
    problems = [
        f"{argument} names {name!r}; the model has the tables {sorted(own)}."
        for argument, named in given.items()
        for name in named
        if name not in own
    ]
    names = {name: options.rename.get(name, name) for name in own if name in wanted}
    if options.tables is None:
        names = {
            name: other
            for name, other in names.items()
            if name in options.rename or other in source.tables
        }
    problems += [
        f"table {name!r}: the source has no table {other!r}. Give its name there by "
        f"rename={{{name!r}: ...}}, or leave the table out of tables."
        for name, other in names.items()
        if other not in source.tables
    ]
    if not problems and not names:
        problems = [
            f"no table of the model, {sorted(own)}, has a name of the source; give "
            "their names there by rename={own name: name in the source}."
        ]
    if problems:
        raise CheckpointError(
            f"The names of tables do not fit {source.origin}, which has the tables "
            f"{sorted(source.tables)}:\n  " + "\n  ".join(problems)
        )
    return names


def _match(
    target: TargetTable, other: str, source: TableSource, options: ImportOptions
) -> MatchedTable:
    """Returns a table to import.

    Raises:
      CheckpointError: if it does not fit.
    """
    table = source.tables[other]
    names = _slot_names(target, table, options.slots)
    reason = f"the table has {_described(target)}; pass slots={{own name: its name}}"
    if options.slots == "none":
        reason = "slots='none'"
    elif target.slots is None:
        reason = "no optimizer was given, or the table has none"
    dropped = [slot for slot in table.slots if slot not in names.values()]
    return MatchedTable(
        source=other,
        values=table.values,
        slots={own: table.slots[theirs] for own, theirs in names.items()},
        slot_names=names,
        dropped=dict.fromkeys(dropped, reason),
        num_rows=_num_rows(target, table.values, options.rows),
        ids=_ids(target, table, options.ids.get(target.name)),
    )


def _num_rows(target: TargetTable, values: RowArray, rows: ImportedRows) -> int:
    """Returns the number of rows to import.

    Raises:
      CheckpointError: if the values do not fit.
    """
    if len(values.shape) != 2:
        raise CheckpointError(f"shape {values.shape} is no table [rows, dim].")
    num_rows, dim = values.shape
    if values.holds_int8_rows(target.dim):
        dim = target.dim
    elif not values.is_floating:
        raise CheckpointError(
            f"dtype {values.dtype} must be floating; convert it first."
        )
    if dim != target.dim:
        raise CheckpointError(
            f"the source has dim {dim}, the model {target.dim}; set TableConfig.dim, "
            "or leave the table out of tables."
        )
    size = num_rows if target.is_dynamic else target.vocabulary_size
    if num_rows != size and rows == "equal":
        raise CheckpointError(
            f"the source has {num_rows} rows, the model {size}; set "
            "TableConfig.vocabulary_size, or pass rows='shared' to import the first "
            f"{min(num_rows, size)} rows."
        )
    return min(num_rows, size)


def _ids(target: TargetTable, table: SourceTable, given: Any) -> np.ndarray | None:
    """Returns the ids of the rows of a dynamic table, as uint64.

    Raises:
      CheckpointError: if they do not fit.
    """
    given = table.ids if given is None else given
    if (given is not None) != target.is_dynamic:
        raise CheckpointError(
            "ids of rows and a te.Dynamic vocabulary need each other; give "
            f"ids={{{target.name!r}: array}}, or set TableConfig.vocabulary_size to "
            "te.Dynamic(capacity=...)."
        )
    if given is None:
        return None
    array = given.to_numpy() if isinstance(given, Ids64) else np.asarray(given)
    if array.shape != table.values.shape[:1]:
        raise CheckpointError(
            f"ids must have one id for each of the {table.values.shape[0]} rows of the "
            f"source, got shape {array.shape}."
        )
    if array.dtype.kind in "USO":
        words = fingerprints_of(array)
    elif np.issubdtype(array.dtype, np.integer):
        # Negative ids keep their bits.
        is_wide = array.dtype == np.uint64
        words = array if is_wide else array.astype(np.int64).view(np.uint64)
    else:
        raise CheckpointError(
            f"ids must be integers or strings, got dtype {array.dtype}; ids beyond "
            "2**53 are not exact in floating numbers."
        )
    if (words == NO_WIDE_ID).any() or len(np.unique(words)) < len(words):
        raise CheckpointError(
            "ids must be distinct and not 2**64 - 1 (-1 if signed), which means 'no "
            "id'; keep one row of each id."
        )
    return words


def _slot_names(
    target: TargetTable, table: SourceTable, slots: ImportedSlots
) -> dict[str, str]:
    """Returns the slots to import: name in the model to name in the source.

    Raises:
      CheckpointError: if a slot that the caller named is missing, or does not fit.
    """
    if target.slots is None or slots == "none":
        return {}
    if not isinstance(slots, Mapping):
        own = tuple(sorted(target.slots))
        for theirs in (own, *_SAME_SLOTS.get(own, ())):
            names = dict(zip(own, theirs, strict=True))
            if set(theirs) == set(table.slots) and not list(
                _slot_problems(target, table, names)
            ):
                return names
        return {}
    names = dict(slots)
    for problem in _slot_problems(target, table, names):
        raise CheckpointError(problem)
    return names


def _slot_problems(
    target: TargetTable, table: SourceTable, names: Mapping[str, str]
) -> Iterator[str]:
    assert target.slots is not None
    for own, theirs in names.items():
        if own not in target.slots or theirs not in table.slots:
            yield (
                f"slots={{{own!r}: {theirs!r}}} must name a slot of the table, which "
                f"has {_described(target)}, and one of the source, which has "
                f"{sorted(table.slots)}."
            )
            continue
        array, slot = table.slots[theirs], target.slots[own]
        shape = (table.values.shape[0], *slot.shape)
        fits = np.can_cast(array.dtype, slot.dtype)
        if jnp.issubdtype(slot.dtype, jnp.floating):
            fits = array.is_floating
        if array.shape != shape or not fits:
            yield (
                f"slot {theirs!r} is {array}, but the optimizer's {own!r} takes "
                f"{slot.dtype}{list(shape)}."
            )


def _described(target: TargetTable) -> str:
    shapes = [f"{k} {list(slot.shape)}" for k, slot in (target.slots or {}).items()]
    return f"{', '.join(shapes)} per row" if shapes else "no slot variables"
