"""The one file of measured figures, `benchmarks/results.json`: load, merge, save.

Benchmarks write their own JSON with `--json FILE`; `record.py` merges it in here, and
makes the table of README.md.
"""

import datetime
import json
import pathlib
from typing import Any, Final

RESULTS_FILE: Final = pathlib.Path(__file__).with_name("results.json")

KEYS: Final[dict[str, tuple[str, ...]]] = {
    "compiler_estimate": ("topology", "library"),
    "partition_estimate": ("topology", "case"),
    "gather_speed": ("dim",),
    "table_size": ("devices", "rows"),
    "memory_tables": ("rows",),
    "host_rows": ("side", "devices"),
    "host_rows_planner": ("rows", "ids", "shards", "cores"),
    "peers": ("setting", "peer", "device"),
    "compile_time": ("tables", "features"),
    "checkpoint_speed": ("work", "side", "devices"),
    "input_speed": ("format", "peer"),
    "device_count": ("setting", "devices"),
    "first_step": ("program", "start"),
    "serving_latency": ("setting", "dtype", "batch", "side"),
}
"""Benchmark to the fields that name one of its results."""

Benchmark = dict[str, Any]
Results = dict[str, Benchmark]


def load_results(path: pathlib.Path = RESULTS_FILE) -> Results:
    """Returns the figures of all benchmarks, by the benchmark's name."""
    return json.loads(path.read_text())


def save_results(results: Results, path: pathlib.Path = RESULTS_FILE) -> None:
    """Writes the figures, one result per line, so that changes are easy to read."""
    parts = []
    for name in (name for name in KEYS if name in results):
        head = {k: v for k, v in results[name].items() if k != "results"}
        lines = ",\n".join(f"  {json.dumps(row)}" for row in results[name]["results"])
        fields = json.dumps(head)[1:-1]
        parts.append(f'"{name}": {{{fields},\n "results": [\n{lines}]}}')
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def merge(results: Results, document: dict[str, Any]) -> str:
    """Replaces results of one benchmark by those of a document; adds new ones.

    Args:
      results: from `load_results`; changed in place.
      document: what a benchmark has written.

    Returns:
      Name of the benchmark.

    Raises:
      ValueError: if the document names no known benchmark.
    """
    name = document.get("benchmark")
    if name not in KEYS:
        raise ValueError(f"'benchmark' must be one of {sorted(KEYS)}, got {name!r}.")
    benchmark = results.setdefault(name, {"results": []})
    rows = {_key(name, row): row for row in benchmark["results"]}
    # Results of other days and machines may stay next to the new ones.
    stamp = {"jax": document["versions"]["jax"]}
    stamp["date"] = datetime.date.today().isoformat()
    stamp |= {k: document[k] for k in ("cpu",) if k in document}
    is_accelerator = document.get("device", "cpu") not in ("cpu", "compiled only")
    if is_accelerator:
        stamp["device"] = document["device"]
    new = [row | stamp for row in document["results"]]
    rows |= {_key(name, row): row for row in new}
    if not is_accelerator:
        benchmark |= {k: v for k, v in document.items() if k != "benchmark"}
    benchmark["results"] = list(rows.values())
    return name


def _key(name: str, row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(field) for field in KEYS[name])
