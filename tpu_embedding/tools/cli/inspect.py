"""The command `tpu-embedding inspect`: tables, rows and ids of a checkpoint."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import jax.numpy as jnp
import numpy as np
import tyro

from tpu_embedding.checkpoint.arrays import read_table
from tpu_embedding.checkpoint.format import (
    ArrayRecord,
    CheckpointRecord,
    TableRecord,
    describe,
)
from tpu_embedding.checkpoint.row_statistics import (
    TableStatistics,
    comparable_slots,
    row_norms,
    table_statistics,
)
from tpu_embedding.checkpoint.run_checkpoints import saved_steps
from tpu_embedding.paths import local_path
from tpu_embedding.plan.memory import format_bytes, format_table
from tpu_embedding.tools.cli.arguments import UsageError
from tpu_embedding.tools.cli.inspect_ids import (
    find_in_tables,
    format_ids,
    format_places,
    ids_of_tables,
)
from tpu_embedding.tools.train.run import CHECKPOINTS_DIR

_NUMBERS_PER_LINE: Final = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect:
    """Lists the tables of a checkpoint, and prints rows.

    Shows sizes, types, slot variables, norms of rows, and rows that were never touched;
    of dynamic tables also their load, and the ages of their ids. Reads the files chunk
    by chunk, without devices and without the model. A row was never touched if its slot
    variables hold their initial values.
    """

    checkpoint: Annotated[pathlib.Path, tyro.conf.Positional]
    """Directory of a checkpoint, or of a run, whose latest one is read."""

    table: str | None = None
    """Reads this table only."""

    rows: str | None = None
    """With --table, prints these rows and their slot variables, such as 3,17 or 0:10;
    -1 is the last row."""

    find: str | None = None
    """Prints where an id lies in the dynamic tables, and its row: an integer of 64
    bits, or a string, whose fingerprint is the id."""

    since: pathlib.Path | None = None
    """Counts the ids that dynamic tables have inserted and evicted since an earlier
    checkpoint."""

    json: bool = False
    """Prints one JSON object instead of text."""

    def run(self) -> int:
        """Prints what was asked for; returns the exit status."""
        return _inspect(self)


def _inspect(parsed: Inspect) -> int:
    if parsed.find is not None and parsed.rows is not None:
        raise UsageError("--find and --rows both choose rows: give one of them.")
    if parsed.rows is not None and parsed.table is None:
        raise UsageError("--rows needs --table: row ids count within one table.")
    directory = _find_checkpoint(local_path(parsed.checkpoint))
    record = describe(directory)
    if parsed.table is not None and parsed.table not in record.tables:
        raise UsageError(
            f"--table {parsed.table}: the checkpoint {directory} has the tables "
            f"{', '.join(record.tables)}."
        )
    if parsed.find is not None:
        found = find_in_tables(directory, parsed.find, parsed.table)
        for place in found:
            if place["row"] is not None:
                table = record.tables[place["table"]]
                rows = _read_rows(directory, place["table"], table, [place["row"]])
                place |= {key: rows[0][key] for key in ("norm", "values", "slots")}
        print(json.dumps(found, indent=1) if parsed.json else format_places(found))
        return 0
    if parsed.table is not None and parsed.rows is not None:
        table = record.tables[parsed.table]
        rows = _read_rows(directory, parsed.table, table, _row_parts(parsed.rows))
        print(json.dumps(rows, indent=1) if parsed.json else _format_rows(rows))
        return 0
    names = list(record.tables) if parsed.table is None else [parsed.table]
    statistics = {name: table_statistics(directory, name) for name in names}
    dynamic = [name for name in names if record.tables[name].dynamic is not None]
    since = None if parsed.since is None else _find_checkpoint(local_path(parsed.since))
    ids = ids_of_tables(directory, dynamic, since)
    if parsed.json:
        document = _to_json(directory, record, statistics)
        for name, of_table in ids.items():
            document["tables"][name]["ids"] = of_table
        print(json.dumps(document, indent=1, allow_nan=False))
    else:
        text = _format(directory, record, statistics)
        print(text + (f"\n\n{format_ids(ids)}" if ids else ""))
    return 0


def _find_checkpoint(path: pathlib.Path) -> pathlib.Path:
    """Returns a checkpoint: the given one, or the latest one of a run."""
    for directory in (path / CHECKPOINTS_DIR, path):
        steps = saved_steps(directory)
        if steps:
            return directory / str(steps[-1])
    return path


def _step_of(directory: pathlib.Path) -> int | None:
    return int(directory.name) if directory.name.isdigit() else None


def _num_bytes(array: ArrayRecord) -> int:
    return math.prod(array.shape) * jnp.dtype(array.dtype).itemsize


def _slot_bytes(table: TableRecord) -> int:
    return sum(_num_bytes(slot) for slot in table.slots.values())


def _format(
    directory: pathlib.Path,
    record: CheckpointRecord,
    statistics: Mapping[str, TableStatistics],
) -> str:
    """Returns the text for a terminal or a file."""
    step = _step_of(directory)
    tables = {name: record.tables[name] for name in statistics}
    values_bytes = sum(_num_bytes(table.values) for table in tables.values())
    slot_bytes = sum(map(_slot_bytes, tables.values()))
    num_rows = sum(table.vocabulary_size for table in tables.values())
    lines = [
        f"{directory}" + ("" if step is None else f", step {step}"),
        f"tables: {len(tables)}, rows: {num_rows:,}, values: "
        f"{format_bytes(values_bytes)}, slot variables: {format_bytes(slot_bytes)}, "
        f"other arrays: {len(record.dense)}",
        "",
        _format_sizes(tables),
        "",
        _format_norms(tables, statistics),
    ]
    reasons: dict[str, list[str]] = {}
    for name, table in statistics.items():
        if table.why_not:
            reasons.setdefault(table.why_not, []).append(name)
    for reason, names in reasons.items():
        lines.append(f"never touched is not known for {', '.join(names)}: {reason}")
    return "\n".join(lines)


def _format_sizes(tables: Mapping[str, TableRecord]) -> str:
    rows = [("table", "slot variables", "rows", "dim", "dtype", "values", "slots")]
    for name, table in tables.items():
        slots = [
            f"{slot} {array.dtype}{list(array.shape[1:])}"
            if array.chunk_rows is not None
            else f"{slot} {array}"
            for slot, array in table.slots.items()
        ]
        rows.append(
            (
                *(name, slots[0] if slots else "-"),
                *(f"{table.vocabulary_size:,}", str(table.dim), table.dtype),
                format_bytes(_num_bytes(table.values)),
                format_bytes(_slot_bytes(table)) if slots else "-",
            )
        )
        rows += [("", slot, "", "", "", "", "") for slot in slots[1:]]
    return format_table(rows, num_left_aligned=2)


def _format_norms(
    tables: Mapping[str, TableRecord], statistics: Mapping[str, TableStatistics]
) -> str:
    head = ("norm of rows", "minimum", "median", "maximum", "never touched", "of rows")
    rows: list[tuple[str, ...]] = [(*head, "not finite")]
    for name, found in statistics.items():
        norms, untouched = found.norms, found.num_untouched
        values = (norms.minimum, norms.median, norms.maximum) if norms else ()
        share = "-"
        if untouched is not None and tables[name].vocabulary_size:
            share = f"{untouched / tables[name].vocabulary_size:.2%}"
        rows.append(
            (
                name,
                *(f"{value:.4g}" for value in values or ()),
                *("-" for _ in range(3 - len(values))),
                "?" if untouched is None else f"{untouched:,}",
                share,
                f"{found.num_not_finite:,}",
            )
        )
    return format_table(rows)


def _to_json(
    directory: pathlib.Path,
    record: CheckpointRecord,
    statistics: Mapping[str, TableStatistics],
) -> dict[str, Any]:
    """Returns the report as JSON values."""
    tables = {}
    for name, found in statistics.items():
        table, norms = record.tables[name], found.norms
        tables[name] = {
            "vocabulary_size": table.vocabulary_size,
            "dim": table.dim,
            "dtype": table.dtype,
            "bytes": _num_bytes(table.values),
            "slots": {
                slot: {
                    "shape": list(array.shape),
                    "dtype": array.dtype,
                    "bytes": _num_bytes(array),
                }
                for slot, array in table.slots.items()
            },
            "norms": norms
            and {
                "minimum": norms.minimum,
                "median": norms.median,
                "maximum": norms.maximum,
            },
            "not_finite": found.num_not_finite,
            "never_touched": found.num_untouched,
            "never_touched_unknown": found.why_not or None,
        }
    return {
        "checkpoint": str(directory),
        "step": _step_of(directory),
        "tables": tables,
        "other_arrays": dict(record.dense),
    }


def _read_rows(
    directory: pathlib.Path,
    name: str,
    table: TableRecord,
    parts: Sequence[int | slice],
) -> list[dict[str, Any]]:
    """Returns rows and their slot variables as JSON values, one dict per row."""
    row_ids = _row_ids(parts, name, table.vocabulary_size)
    values = read_table(directory, name, row_ids)
    slots = {
        slot: read_table(directory, name, row_ids, slot=slot)
        for slot, array in table.slots.items()
        if array.chunk_rows is not None
    }
    initial = comparable_slots(table)
    norms = row_norms(values)
    found = []
    for i, row in enumerate(row_ids):
        untouched = all(np.all(slots[s][i] == v) for s, v in initial.items())
        found.append(
            {
                "table": name,
                "row": row,
                "norm": _number(norms[i]),
                "never_touched": bool(untouched) if initial else None,
                "values": _numbers(values[i]),
                "slots": {slot: _numbers(array[i]) for slot, array in slots.items()},
            }
        )
    return found


def _number(value: Any) -> float | str:
    """Returns a float, or the text of one that JSON does not have."""
    return float(value) if math.isfinite(value) else str(float(value))


def _numbers(array: np.ndarray) -> Any:
    if not array.ndim:
        return _number(array)
    return [_number(value) for value in array]


def _format_rows(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        state = {True: "never touched", False: "touched", None: "touched or not: ?"}
        norm = row["norm"] if isinstance(row["norm"], str) else f"{row['norm']:.6g}"
        touched = state[row["never_touched"]]
        lines.append(f"{row['table']}, row {row['row']}: norm {norm}, {touched}")
        arrays = {"values": row["values"], **row["slots"]}
        width = max(map(len, arrays))
        for name, numbers in arrays.items():
            numbers = numbers if isinstance(numbers, list) else [numbers]
            texts = (x if isinstance(x, str) else f"{x:.6g}" for x in numbers)
            indent = f"  {name:<{width}}  "
            cells = [f"{text:>12}" for text in texts]
            for start in range(0, len(cells), _NUMBERS_PER_LINE):
                line = " ".join(cells[start : start + _NUMBERS_PER_LINE])
                lines.append(indent + line)
                indent = " " * len(indent)
    return "\n".join(lines)


def _row_ids(parts: Sequence[int | slice], name: str, size: int) -> list[int]:
    """Returns the rows of a table that ids and ranges mean, as Python counts them."""
    row_ids: list[int] = []
    for part in parts:
        ids = list(range(size)[part]) if isinstance(part, slice) else [part]
        outside = [row for row in ids if not -size <= row < size]
        if outside or not ids:
            got = outside[0] if outside else f"an empty range, {part}"
            raise UsageError(
                f"--rows must be rows of table {name!r}, from 0 to {size - 1}, or from "
                f"-{size} to -1 from its end, got {got}."
            )
        row_ids += ids
    return [row % size for row in row_ids]


def _row_parts(text: str) -> list[int | slice]:
    """Converts row ids and ranges with commas, such as `3,-1,0:10`."""
    try:
        return [_row_part(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(
            f"--rows must be row ids or ranges, such as 3,17 or 0:10, got {text!r}."
        ) from None


def _row_part(text: str) -> int | slice:
    if ":" not in text:
        return int(text)
    start, stop = (int(end) if end.strip() else None for end in text.split(":"))
    return slice(start, stop)
