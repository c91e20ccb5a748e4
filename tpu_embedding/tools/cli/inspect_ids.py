"""Shows the ids of dynamic tables, and one id, for `tpu-embedding inspect`."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from tpu_embedding.checkpoint.format import describe
from tpu_embedding.checkpoint.id_statistics import (
    QUANTILES,
    find_id,
    id_changes,
    id_statistics,
)
from tpu_embedding.inputs.wide_ids import NO_WIDE_ID, fingerprints_of
from tpu_embedding.plan.memory import format_table
from tpu_embedding.tools.cli.arguments import UsageError

_VALUES_SHOWN: Final = 6


def ids_of_tables(
    directory: pathlib.Path, tables: Sequence[str], since: pathlib.Path | None
) -> dict[str, dict[str, Any]]:
    """Returns statistics of the ids of dynamic tables, as JSON values by table.

    Args:
      directory: checkpoint to read.
      tables: names of dynamic tables.
      since: earlier checkpoint to compare with, or None.

    Raises:
      UsageError: if the earlier checkpoint has none of the tables.
    """
    result = {}
    for name in tables:
        found = id_statistics(directory, name)
        result[name] = {
            **dataclasses.asdict(found),
            "load": found.load,
            "ages": _by_quantile(found.ages),
            "uses": _by_quantile(found.uses),
        }
    if since is not None:
        earlier = describe(since).tables
        shared = [x for x in tables if x in earlier and earlier[x].dynamic is not None]
        if not shared:
            raise UsageError(
                f"--since {since}: both checkpoints must have a dynamic table of one "
                f"name, got {list(tables)} now and {list(earlier)} then."
            )
        for name in shared:
            changes = dataclasses.asdict(id_changes(since, directory, name))
            result[name]["since"] = {"checkpoint": str(since), **changes}
    return result


def _by_quantile(values: Sequence[int] | None) -> dict[str, int] | None:
    if values is None:
        return None
    return {f"{q:.0%}": x for q, x in zip(QUANTILES, values, strict=True)}


def format_ids(ids: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the statistics of ids as text; see `ids_of_tables`."""
    rows: list[tuple[str, ...]] = [
        ("ids", "capacity", "ids", "load", "full buckets", "of", "clock")
    ]
    for name, x in ids.items():
        numbers = (x["num_full_buckets"], x["num_buckets"], x["clock"])
        load = f"{x['load']:.2%}"
        counts = (f"{x['capacity']:,}", f"{x['num_ids']:,}", load)
        rows.append((name, *counts, *(f"{n:,}" for n in numbers)))
    parts = [format_table(rows)]
    uses: list[tuple[str, ...]] = [("of ids", *(f"{q:.0%}" for q in QUANTILES))]
    for title, field in (("age", "ages"), ("steps that used it", "uses")):
        for name, x in ids.items():
            if x[field] is not None:
                values = x[field].values()
                uses.append((f"{name}, {title}", *(f"{n:,}" for n in values)))
    if len(uses) > 1:
        parts.append(format_table(uses))
    changes = {name: x["since"] for name, x in ids.items() if "since" in x}
    if changes:
        since = next(iter(changes.values()))["checkpoint"]
        lines = [f"since {since}"]
        for name, x in changes.items():
            lines.append(
                f"{name}: {x['num_inserted']:,} ids inserted, "
                f"{x['num_evicted']:,} evicted, {x['num_kept']:,} kept"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def find_in_tables(
    directory: pathlib.Path, text: str, table: str | None
) -> list[dict[str, Any]]:
    """Returns where an id lies in each dynamic table, as JSON values.

    Args:
      directory: checkpoint to read.
      text: an integer, or a string, whose fingerprint is the id. Digits that are no
        known integer are tried as a string.
      table: name of the table to look into; None: all dynamic tables.

    Raises:
      UsageError: if there is no dynamic table, or the integer is no id.
    """
    tables = describe(directory).tables
    names = [x for x, of in tables.items() if of.dynamic is not None]
    if not names or (table is not None and table not in names):
        raise UsageError(
            f"--find needs a dynamic table, whose rows have ids; {directory} has "
            f"{', '.join(names) or 'none'}."
        )
    words = _words_of(text)
    result = []
    for name in names if table is None else [table]:
        places = {kind: find_id(directory, name, word) for kind, word in words.items()}
        known = [kind for kind, place in places.items() if place.place is not None]
        kind = known[0] if known else next(iter(places))
        place = dataclasses.asdict(places[kind])
        result.append({"table": name, "given": text, "kind": kind, **place})
    return result


def _words_of(text: str) -> dict[str, np.uint64]:
    """Returns the ids that a text may mean, by kind."""
    fingerprint = fingerprints_of(np.asarray([text]))[0]
    try:
        number = int(text, 0)
    except ValueError:
        return {"string": fingerprint}
    if not -(2**63) <= number < 2**64 or number % 2**64 == int(NO_WIDE_ID):
        raise UsageError(
            f"--find must be an integer from {-(2**63)} to {2**64 - 2} but -1, which "
            f"means 'no id', or a string, got {text}."
        )
    return {"integer": np.uint64(number % 2**64), "string": fingerprint}


def format_places(places: Sequence[Mapping[str, Any]]) -> str:
    """Returns the places of an id as text; see `find_in_tables`.

    Args:
      places: from `find_in_tables`; those of known ids with values and slots.
    """
    lines = []
    for x in places:
        of_text = f", fingerprint of {x['given']!r}" if x["kind"] == "string" else ""
        head = f"{x['table']}, id {x['id']}{of_text}: "
        bucket = f"bucket {x['bucket']} with {x['ids_in_bucket']} ids"
        if x["place"] is None:
            lines.append(f"{head}unknown; it belongs to {bucket}")
            continue
        lines.append(
            f"{head}{bucket}, place {x['place']}, last used at {x['last_used']} "
            f"({x['age']} ago), steps that used it: {x['count']}, "
            f"norm {_text(x['norm'])}"
        )
        arrays = {"values": x["values"], **x["slots"]}
        width = max(map(len, arrays))
        for name, numbers in arrays.items():
            numbers = numbers if isinstance(numbers, list) else [numbers]
            shown = " ".join(f"{_text(n):>12}" for n in numbers[:_VALUES_SHOWN])
            more = " ..." if len(numbers) > _VALUES_SHOWN else ""
            lines.append(f"  {name:<{width}}  {shown}{more}")
    return "\n".join(lines)


def _text(number: float | str) -> str:
    return number if isinstance(number, str) else f"{number:.6g}"
