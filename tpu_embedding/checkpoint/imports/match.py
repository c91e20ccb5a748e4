"""Matches the tables of a source with a model's, and lists every mismatch.

The report of an import tells what it changed, and what it left as it was.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embedding.checkpoint.imports.source import RowArray, SourceTable, TableSource
from tpu_embedding.checkpoint.records import CheckpointError
from tpu_embedding.config import TableConfig
from tpu_embedding.dynamic.ids_64 import Ids64
from tpu_embedding.dynamic.ids_on_host import PlacedIds
from tpu_embedding.strings import fingerprint_ids
from tpu_embedding.types import NO_ID_64


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportReport:
    """The outcome of an import; `print` shows it.

    Attributes:
      origin: format and path of the source.
      tables: imported table to its name in the source.
      slots: imported table to its imported slots: own name to name in the source.
      dropped: slots of the source that were not imported, `"table/slot"`: the rule of
        the optimizer has other ones, or no optimizer was given.
      kept: tables of the model that keep all their values, because the source lacks
        them or they were not asked for.
      unused: tables of the source that were not imported.
    """

    origin: str
    tables: Mapping[str, str]
    slots: Mapping[str, Mapping[str, str]]
    dropped: tuple[str, ...]
    kept: tuple[str, ...]
    unused: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"Imported {len(self.tables)} tables from {self.origin}:"]
        for table, name in self.tables.items():
            slots = [f"{own} of {other}" for own, other in self.slots[table].items()]
            lines.append(f"  {table} of {name}: {', '.join(['values', *slots])}")
        for heading, names in (
            ("Dropped slot variables:", self.dropped),
            ("Tables of the model that keep their values:", self.kept),
            ("Tables of the source that were not used:", self.unused),
        ):
            if names:
                lines += [heading, *(f"  {name}" for name in names)]
        return "\n".join(lines)


ImportedSlots = Literal["same_rule"] | Mapping[str, str]
"""Slots to import: those of an equal rule, or own name to source's name."""

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
class TargetTable:
    """A table of the model that may be imported.

    Attributes:
      name: name of the table; with several layers, `"path of the layer/table"`.
      config: gives its rows and columns.
      slots: row shape of each slot variable by name; none without its optimizer.
    """

    name: str
    config: TableConfig
    slots: Mapping[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatchedTable:
    """A table to import.

    Attributes:
      source_name: name of the table in the source.
      source: the table of the source.
      slot_names: slot variables to import: name in this package to name in the source.
      ids: uint64, ids of the rows of a dynamic table; None for a static one.
      placed: places of these ids in the model, once they are known.
    """

    source_name: str
    source: SourceTable
    slot_names: Mapping[str, str]
    ids: np.ndarray | None
    placed: PlacedIds | None = None

    @property
    def slots(self) -> dict[str, RowArray]:
        """Slot variables to import, by their names in this package."""
        return {own: self.source.slots[k] for own, k in self.slot_names.items()}

    @property
    def dropped(self) -> list[str]:
        """Slot variables of the source that are not imported, `"table/slot"`."""
        used = self.slot_names.values()
        slots = [slot for slot in self.source.slots if slot not in used]
        return [f"{self.source_name}/{slot}" for slot in slots]


def match_tables(
    source: TableSource,
    targets: Sequence[TargetTable],
    *,
    tables: Collection[str] | None,
    rename: Mapping[str, str],
    slots: ImportedSlots,
    ids: Mapping[str, Any],
) -> dict[str, MatchedTable]:
    """Returns the tables to import by the model's name.

    Args:
      source: the tables that there are.
      targets: tables of the model.
      tables: see `import_tables`, also for the other arguments.
      rename: name of a table of the model to its name in the source.
      slots: slot variables to import.
      ids: name of a dynamic table of the model to the ids of its rows.

    Raises:
      CheckpointError: with all mismatches, and a fix for each.
    """
    own = [target.name for target in targets]
    names = _names(source, own, tables, rename, ids)
    matched: dict[str, MatchedTable] = {}
    problems: list[str] = []
    for target in targets:
        if (other := names.get(target.name)) is None:
            continue
        table = source.tables[other]
        try:
            slot_names = _slot_names(target, table, slots)
            _check_rows(target, table.values)
            ids_of_rows = _ids(target, table, ids.get(target.name))
        except CheckpointError as error:
            problems.append(f"table {target.name!r} of {other!r}: {error}")
            continue
        matched[target.name] = MatchedTable(
            source_name=other, source=table, slot_names=slot_names, ids=ids_of_rows
        )
    if problems:
        raise CheckpointError(
            f"These tables of {source.origin} do not fit the model:\n  "
            + "\n  ".join(problems)
        )
    return matched


def _names(
    source: TableSource,
    own: Sequence[str],
    tables: Collection[str] | None,
    rename: Mapping[str, str],
    ids: Collection[str],
) -> dict[str, str]:
    """Returns the source's name of each table to import, by the model's name."""
    wanted = own if tables is None else tables
    given = {"tables": wanted, "rename": rename, "ids": ids}
    problems = [
        f"{argument} names {name!r}; the model has the tables {sorted(own)}."
        for argument, named in given.items()
        for name in named
        if name not in own
    ]
    names = {name: rename.get(name, name) for name in own if name in wanted}
    if tables is None:
        names = {
            name: other
            for name, other in names.items()
            if name in rename or other in source.tables
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


def _check_rows(target: TargetTable, values: RowArray) -> None:
    """Raises a CheckpointError for values that do not fit a table."""
    if len(values.shape) != 2:
        raise CheckpointError(f"shape {values.shape} is not [rows, dim].")
    num_rows, dim = values.shape
    if values.holds_int8_rows(target.config.dim):
        dim = target.config.dim
    elif not values.is_floating:
        raise CheckpointError(
            f"dtype {values.dtype} must be floating; convert it first."
        )
    ids_are_rows = target.config.vocabulary.ids_are_rows
    size = target.config.max_rows if ids_are_rows else num_rows
    if (num_rows, dim) != (size, target.config.dim):
        raise CheckpointError(
            f"the source has {num_rows} rows of dim {dim}, the model {size} of dim "
            f"{target.config.dim}; set TableConfig.vocabulary_size and dim, leave the "
            "table out of tables, or import an array of the wanted rows."
        )


def _ids(target: TargetTable, table: SourceTable, given: Any) -> np.ndarray | None:
    """Returns the ids of the rows of a dynamic table, as uint64.

    Raises:
      CheckpointError: if they do not fit.
    """
    given = table.ids if given is None else given
    if (given is None) != target.config.vocabulary.ids_are_rows:
        raise CheckpointError(
            "ids of rows and a te.Dynamic vocabulary need each other; give "
            f"ids={{{target.name!r}: array}}, or set TableConfig.vocabulary_size to "
            "te.Dynamic(capacity=...)."
        )
    if given is None:
        return None
    array = given.to_numpy() if isinstance(given, Ids64) else np.asarray(given)
    if array.dtype.kind in "USO":
        array = fingerprint_ids(array)
    if array.dtype != np.uint64 and np.issubdtype(array.dtype, np.integer):
        # Negative ids keep their bits.
        array = array.astype(np.int64).view(np.uint64)
    if array.shape != table.values.shape[:1] or array.dtype != np.uint64:
        raise CheckpointError(
            "ids must have one integer or string for each of the "
            f"{table.values.shape[0]} rows of the source, got shape {array.shape} and "
            f"dtype {array.dtype}."
        )
    if (array == NO_ID_64).any() or len(np.unique(array)) < len(array):
        raise CheckpointError(
            "ids must be distinct and not 2**64 - 1 (-1 if signed), which means 'no "
            "id'; keep one row of each id."
        )
    return array


def _slot_names(
    target: TargetTable, table: SourceTable, slots: ImportedSlots
) -> dict[str, str]:
    """Returns the slots to import: name in the model to name in the source.

    Raises:
      CheckpointError: if a slot that the caller named is missing, or does not fit.
    """
    if slots == "same_rule":
        own = tuple(sorted(target.slots))
        for theirs in (own, *_SAME_SLOTS.get(own, ())):
            names = dict(zip(own, theirs, strict=True))
            fits = (_slot_fits(target, table, k, x) for k, x in names.items())
            if set(theirs) == set(table.slots) and all(fits):
                return names
        return {}
    names = dict(slots)
    for own, theirs in names.items():
        if not _slot_fits(target, table, own, theirs):
            shapes = [f"{k} {list(slot.shape)}" for k, slot in target.slots.items()]
            known = f"{', '.join(shapes)} per row" if shapes else "no slot variables"
            raise CheckpointError(
                f"slots={{{own!r}: {theirs!r}}} must name a slot of the table, which "
                f"has {known}, and one of the source of this shape, which has "
                f"{ ({k: str(x) for k, x in table.slots.items()}) }."
            )
    return names


def _slot_fits(target: TargetTable, table: SourceTable, own: str, theirs: str) -> bool:
    """Returns True if a slot of a source can become a slot of a table."""
    slot, array = target.slots.get(own), table.slots.get(theirs)
    if slot is None or array is None:
        return False
    fits = np.can_cast(array.dtype, slot.dtype)
    if jnp.issubdtype(slot.dtype, jnp.floating):
        fits = array.is_floating
    return fits and array.shape == (table.values.shape[0], *slot.shape)
