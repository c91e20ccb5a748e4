"""Writes the table of `first_hour.sh`, as Markdown and JSON.

    python scripts/first_hour_table.py DIR

DIR has the files of the parts: `parts.tsv`, `logs/`, `step_*.json` and `training_*/`.
The exit status is 1 if a part failed.
"""

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any, Final

BACKENDS: Final = ("xla", "sparse_core")
_FINDING: Final = re.compile(r"(ok|warning|FAILED) +(.+?): (.*)")

Row = dict[str, str]
"""The cells `item`, `status`, `result` and `log`."""


def rows_of(directory: pathlib.Path) -> Iterator[Row]:
    """Yields the table's rows: for each part, its findings, then the part itself."""
    times: dict[str, float] = {}
    for line in _lines(directory / "parts.tsv"):
        part, status, seconds = line.split("\t")
        log = f"logs/{part}.log"
        for finding in map(_FINDING.fullmatch, _lines(directory / log)):
            if part == "doctor" and finding:
                of_check, check, text = finding.groups()
                yield _row(f"doctor: {check}", of_check, text, log)
        kind, _, backend = part.partition("_")
        text = ""
        if status == "ok" and kind == "devices":
            text = _devices(directory / log)
        elif status == "ok" and kind == "step":
            text, times[backend] = _step(directory / f"{part}.json", backend)
        elif status == "ok" and kind == "profile":
            text = f"{part}/"
        elif status == "ok" and kind == "training":
            text = _training(directory / part / "metrics.jsonl")
        text = "; ".join(x for x in (text, f"{seconds} s in all") if x)
        yield _row(part, status, text, log)
    if len(times) == len(BACKENDS):
        xla, sparse_core = (times[backend] for backend in BACKENDS)
        text = f"sparse_core is {xla / sparse_core:.2f} times as fast as xla"
        yield _row("ratio of steps", "ok", text, "")


def _row(item: str, status: str, result: str, log: str) -> Row:
    return {"item": item, "status": status, "result": result, "log": log}


def _lines(path: pathlib.Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _last_json(path: pathlib.Path) -> Any:
    """Returns the last JSON object on a line of a file, or {} if there is none."""
    lines = [line for line in _lines(path) if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {}


def _devices(log: pathlib.Path) -> str:
    devices = _last_json(log)
    kinds, memory = devices.get("kinds", []), devices.get("memory", [])
    texts = [f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)]
    texts += [f"{x / 2**30:.1f} GiB each" for x in dict.fromkeys(memory) if x]
    return ", ".join(texts)


def _step(file: pathlib.Path, backend: str) -> tuple[str, float]:
    """Describes the timing of a backend's step; also returns its milliseconds."""
    document = json.loads(file.read_text())
    (figures,) = document["results"]
    text = (
        f"{figures['median_ms']:.3f} ms per step ({figures['fastest_ms']:.3f} to "
        f"{figures['slowest_ms']:.3f}), {figures['devices']} x {document['device']}, "
        f"compiled in {figures['compile_seconds']:.0f} s"
    )
    if backend == "sparse_core":
        took_exchange = figures["backends"] != [backend] or figures["rounds"] > 0
        text += ", by the exchange" * took_exchange
    return text, figures["median_ms"]


def _training(file: pathlib.Path) -> str:
    result = _last_json(file).get("result", {})
    texts = [f"{name} {x:.6f}" for name, x in result.get("metrics", {}).items()]
    return ", ".join([*texts, f"step {result.get('step')}"])


def main() -> int:
    """Writes both files, and prints the Markdown table."""
    parser = argparse.ArgumentParser(description="Writes the table of first_hour.sh.")
    parser.add_argument("directory", type=pathlib.Path)
    directory = parser.parse_args().directory
    rows = list(rows_of(directory))
    lines = ["| item | status | result | log |", "|---|---|---|---|"]
    for row in rows:
        cells = [cell.replace("|", "\\|") for cell in row.values()]
        lines.append(f"| {' | '.join(cells)} |")
    (directory / "table.md").write_text("\n".join(lines) + "\n")
    (directory / "table.json").write_text(json.dumps(rows, indent=2) + "\n")
    print("\n".join(lines))
    print(f"Please send {directory}, or at least its table.md, table.json and logs/.")
    return int(any(row["status"] not in ("ok", "warning") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
