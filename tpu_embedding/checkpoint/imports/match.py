"""Matches the tables of a source with those of a model, and lists every mismatch."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from tpu_embedding.argument_checks import describe_value
from tpu_embedding.checkpoint.dynamic_tables import PlacedIds
from tpu_embedding.checkpoint.errors import CheckpointError
from tpu_embedding.checkpoint.imports.report import ImportReport
from tpu_embedding.checkpoint.imports.row_ids import given_ids
from tpu_embedding.checkpoint.imports.slot_names import same_slots
from tpu_embedding.checkpoint.imports.source import (
    RowArray,
    SourceIds,
    SourceTable,
    TableSource,
)

ImportedSlots = Literal["same_rule", "none"] | Mapping[str, str]
"""Slots to import: those of an equal rule; none; or own name to source's name."""

ImportedRows = Literal["equal", "shared"]
"""Numbers of rows: they must be equal, or the rows that both tables have are taken.

In dynamic tables: all ids must have a place, or those with one are taken.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Options of an import; see `import_tables`.

    Attributes:
      tables: names of the model's tables to import; None: all that the source has.
      rename: name of a table of the model to its name in the source.
      slots: slots to import.
      rows: numbers of rows that fit.
      ids: name of a dynamic table of the model to the ids of the source's rows.
    """

    tables: Collection[str] | None = None
    rename: Mapping[str, str] | None = None
    slots: ImportedSlots = "same_rule"
    rows: ImportedRows = "equal"
    ids: Mapping[str, Any] | None = None

    def __post_init__(self):
        if isinstance(self.tables, str):
            raise TypeError(f"tables must be a list of names, got {self.tables!r}.")
        if not isinstance(self.rename, Mapping | None):
            raise TypeError(f"rename must be a dict of names, got {self.rename!r}.")
        if not isinstance(self.ids, Mapping | None):
            raise TypeError(
                "ids must be a dict of arrays by the names of dynamic tables, got "
                f"{describe_value(self.ids)}."
            )
        for field, value, choices in (
            ("slots", self.slots, ("same_rule", "none")),
            ("rows", self.rows, ("equal", "shared")),
        ):
            if value not in choices and not (
                field == "slots" and isinstance(value, Mapping)
            ):
                more = " or a dict of slot names" if field == "slots" else ""
                raise ValueError(
                    f"{field} must be one of {list(choices)}{more}, got {value!r}."
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetTable:
    """A table of the model that may be imported.

    Attributes:
      name: name of the table; with several layers, `"path of the layer/table"`.
      vocabulary_size: rows.
      dim: columns.
      slots: row shape of each slot variable by name; None without its optimizer.
      rule: see `slot_names.rule_of`.
      no_slots_because: reason why `slots` is None.
      is_dynamic: True for a table whose rows have ids.
    """

    name: str
    vocabulary_size: int
    dim: int
    slots: Mapping[str, jax.ShapeDtypeStruct] | None
    rule: str | None = None
    no_slots_because: str = ""
    is_dynamic: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatchedTable:
    """A table to import.

    Attributes:
      values: rows of the source.
      slots: slot variables of the source, by their names in this package.
      num_rows: rows to import, from the first one on.
      ids: ids of the rows of a dynamic table; None for a static one.
      placed: their places in the table; see `place_table`.
    """

    values: RowArray
    slots: Mapping[str, RowArray]
    num_rows: int
    ids: SourceIds | None = None
    placed: PlacedIds | None = None

    @property
    def num_ids(self) -> int:
        """Ids of the source; 0 for a static table."""
        return 0 if self.ids is None else len(self.ids.ids)

    @property
    def num_left_out(self) -> int:
        """Ids without a place in their buckets."""
        return 0 if self.placed is None else self.num_ids - len(self.placed.kept)


def match_tables(
    source: TableSource, targets: Sequence[TargetTable], options: ImportOptions
) -> tuple[dict[str, MatchedTable], ImportReport]:
    """Returns the tables to import by the model's name, and what will be reported.

    Args:
      source: the tables that there are.
      targets: tables of the model.
      options: what to import.

    Raises:
      CheckpointError: with all mismatches, and a way out for each.
    """
    names = _names(source, targets, options)
    by_name = {target.name: target for target in targets}
    matched, imported_slots, problems = {}, {}, []
    dropped: dict[str, str] = {}
    for own, other in names.items():
        target, table = by_name[own], source.tables[other]
        num_rows, found = _shared_rows(target, other, table.values, options.rows)
        problems += found
        ids, found = _ids(target, other, table, (options.ids or {}).get(own))
        problems += found
        chosen, reasons, found = _choose_slots(source, target, other, options.slots)
        problems += found
        dropped |= {f"{other}/{slot}": why for slot, why in reasons.items()}
        imported_slots[own] = chosen
        matched[own] = MatchedTable(
            values=table.values,
            slots={name: table.slots[theirs] for name, theirs in chosen.items()},
            num_rows=num_rows,
            ids=ids,
        )
    if problems:
        raise CheckpointError(
            f"These parts of {source.origin} do not fit the model:\n  "
            + "\n  ".join(problems)
        )
    report = ImportReport(
        origin=source.origin,
        tables=names,
        slots=imported_slots,
        dropped=dropped,
        kept=tuple(sorted(set(by_name) - set(names))),
        unused=tuple(sorted(set(source.tables) - set(names.values()))),
        assumed={
            own: source.assumed[other]
            for own, other in names.items()
            if other in source.assumed
        },
    )
    return matched, report


def _names(
    source: TableSource,
    targets: Sequence[TargetTable],
    options: ImportOptions,
) -> dict[str, str]:
    """Returns the source's name of each table to import, by the model's name."""
    tables, rename, ids = options.tables, options.rename or {}, options.ids or {}
    own = [target.name for target in targets]
    wanted = own if tables is None else list(tables)
    names = {name: rename.get(name, name) for name in own if name in wanted}
    problems = [
        f"{argument} names {name!r}; the model has the tables {sorted(own)}."
        for argument, given in (("tables", wanted), ("rename", rename), ("ids", ids))
        for name in given
        if name not in own
    ]
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


def _shared_rows(
    target: TargetTable, other: str, values: RowArray, rows: ImportedRows
) -> tuple[int, list[str]]:
    """Returns the number of rows to import, and the problems that refuse them."""
    owner = f"table {target.name!r}: {other!r} of the source"
    if len(values.shape) != 2:
        return 0, [f"{owner} has shape {values.shape}, which is no table [rows, dim]."]
    problems = []
    num_rows, dim = values.shape
    if values.holds_int8_rows(target.dim):
        dim = target.dim
    elif not values.is_floating:
        problems.append(
            f"{owner} has dtype {values.dtype}; convert it to floating numbers first."
        )
    if dim != target.dim:
        problems.append(
            f"{owner} has dim {dim}, the model {target.dim}; set TableConfig.dim to "
            f"{dim}, or leave the table out of tables."
        )
    if target.is_dynamic:
        return num_rows, problems
    size = target.vocabulary_size
    if num_rows != size and rows == "equal":
        outcome = (
            f"import the first {num_rows} rows and keep the others"
            if num_rows < size
            else f"leave out the last {num_rows - size} rows of the source"
        )
        problems.append(
            f"{owner} has {num_rows} rows, the model {size}; set "
            f"TableConfig.vocabulary_size to {num_rows}, or pass rows='shared' to "
            f"{outcome}."
        )
    return min(num_rows, size), problems


def _ids(
    target: TargetTable, other: str, table: SourceTable, given: Any
) -> tuple[SourceIds | None, list[str]]:
    """Returns the ids of the rows of a dynamic table, and the problems with them."""
    owner = f"table {target.name!r}"
    if not target.is_dynamic:
        if given is None and table.ids is None:
            return None, []
        what = f"{other!r} of the source has" if given is None else "ids gives"
        return None, [
            f"{owner}: {what} ids of rows, but the model's table has a fixed "
            f"vocabulary of {target.vocabulary_size} rows; set "
            "TableConfig.vocabulary_size to te.Dynamic(capacity=...)."
        ]
    if given is not None:
        return given_ids(given, owner, table.values.shape[0])
    if table.ids is None:
        return None, [
            f"{owner} has a te.Dynamic vocabulary, but {other!r} of the source has no "
            f"ids; give the id of each of its rows by ids={{{target.name!r}: array}}."
        ]
    return table.ids, []


def _choose_slots(
    source: TableSource,
    target: TargetTable,
    other: str,
    slots: ImportedSlots,
) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Chooses the slot variables of one table to import.

    Returns:
      The chosen slots: name in the model to name in the source; the dropped slots: name
      in the source to the reason; and the problems that refuse the import.
    """
    table = source.tables[other]
    if slots == "none":
        return {}, dict.fromkeys(table.slots, "slots='none'"), []
    if target.slots is None:
        return {}, dict.fromkeys(table.slots, target.no_slots_because), []
    if isinstance(slots, Mapping):
        chosen = dict(slots)
        problems = _named_slot_problems(target, other, table, chosen)
    else:
        chosen, problems = same_slots(source, table, target.rule, [*target.slots]), []
        if any(
            _shape_problem(target, own, table.slots[theirs], table.values)
            for own, theirs in chosen.items()
        ):
            chosen = {}
    reason = (
        f"the optimizer of table {target.name!r} has {_described(target)}; if a slot "
        "means the same, pass slots={own name: name in the source}"
    )
    rest = [slot for slot in table.slots if slot not in chosen.values()]
    return {} if problems else chosen, dict.fromkeys(rest, reason), problems


def _named_slot_problems(
    target: TargetTable,
    other: str,
    table: SourceTable,
    chosen: Mapping[str, str],
) -> list[str]:
    """Returns the problems of slot variables that the caller named."""
    problems = []
    for own, theirs in chosen.items():
        owner = f"table {target.name!r}, slots={{{own!r}: {theirs!r}}}"
        if own not in (target.slots or {}):
            problems.append(f"{owner}: the optimizer has {_described(target)}.")
        elif theirs not in table.slots:
            problems.append(
                f"{owner}: {other!r} of the source has the slots {sorted(table.slots)}."
            )
        else:
            array = table.slots[theirs]
            problem = _shape_problem(target, own, array, table.values)
            problems += [f"{owner}: {problem}"] if problem else []
    return problems


def _shape_problem(
    target: TargetTable, own: str, array: RowArray, values: RowArray
) -> str | None:
    assert target.slots is not None
    wanted = (values.shape[0], *target.slots[own].shape)
    if array.shape != wanted:
        return f"the source has shape {array.shape}, the optimizer takes {wanted}."
    dtype = target.slots[own].dtype
    if jax.numpy.issubdtype(dtype, jax.numpy.floating):
        fits = array.is_floating
    else:
        fits = np.can_cast(array.dtype, dtype)
    if not fits:
        return (
            f"the source has dtype {array.dtype}, the optimizer {dtype}; convert it "
            "first."
        )
    return None


def _described(target: TargetTable) -> str:
    slots = target.slots or {}
    if not slots:
        return "no slot variables"
    shapes = [f"{name} {list(slot.shape)}" for name, slot in slots.items()]
    return f"{', '.join(shapes)} per row"
