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
      dropped: slots of the source that were not imported, `"table/slot"`: they are not
        those of the optimizer's rule, or no optimizer was given.
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
            parts = [f"{own} of {other}" for own, other in self.slots[table].items()]
            lines.append(f"  {table} of {name}: {', '.join(['values', *parts])}")
        for heading, found in (
            ("Dropped slot variables:", self.dropped),
            ("Tables of the model that keep their values:", self.kept),
            ("Tables of the source that were not used:", self.unused),
        ):
            if found:
                lines += [heading, *(f"  {name}" for name in found)]
        return "\n".join(lines)
