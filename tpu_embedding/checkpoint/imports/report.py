"""Tells what an import changed, and what it left as it was."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportReport:
    """The outcome of an import; `print` shows it.

    Attributes:
      origin: format and path of the source.
      tables: imported table to its name in the source.
      slots: imported table to its imported slots: own name to name in the source.
      dropped: slots of the source that were not imported, `"table/slot"`, to the
        reason.
      kept: tables of the model that keep all their values, because the source lacks
        them or they were not asked for.
      unused: tables of the source that were not imported.
      assumed: imported table to what was assumed of it, because nothing in the source
        tells.
      without_place: imported dynamic table to the number of ids that were left out,
        because their buckets were full.
    """

    origin: str
    tables: Mapping[str, str]
    slots: Mapping[str, Mapping[str, str]]
    dropped: Mapping[str, str]
    kept: tuple[str, ...]
    unused: tuple[str, ...]
    assumed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    without_place: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"Imported {len(self.tables)} tables from {self.origin}:"]
        for table, name in self.tables.items():
            slots = self.slots.get(table, {})
            parts = [f"{own} of {other}" for own, other in slots.items()]
            lines.append(f"  {table} of {name}: {', '.join(['values', *parts])}")
        for heading, names in (
            (
                "Assumed, as nothing in the source tells:",
                [f"{k}: {v}" for k, v in self.assumed.items()],
            ),
            ("Dropped slot variables:", [f"{k}: {v}" for k, v in self.dropped.items()]),
            (
                "Ids that were left out, because their buckets were full:",
                [f"{k}: {v}" for k, v in self.without_place.items() if v],
            ),
            ("Tables of the model that keep their values:", self.kept),
            ("Tables of the source that were not used:", self.unused),
        ):
            if names:
                lines += [heading, *(f"  {name}" for name in names)]
        return "\n".join(lines)
