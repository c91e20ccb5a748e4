"""The one file of measured figures, `benchmarks/results.json`: load, merge, save.

Benchmarks write their own JSON with `--json FILE`; `record.py` merges it in here.
`render_tables.py` makes every table of figures in README.md and docs/ from this file.
"""

import json
import pathlib
from typing import Any, Final

RESULTS_FILE: Final = pathlib.Path(__file__).with_name("results.json")

KEYS: Final[dict[str, tuple[str, ...]]] = {
    "compiled_traffic": (
        "topology",
        "dim",
        "valence",
        "optimizer",
        "dtype",
        "kernels",
    ),
    "compiler_estimate": ("topology", "library", "kernels"),
    "table_size": ("devices", "rows"),
    "training_runs": ("config",),
    "compile_fit": ("config", "topology", "slices", "kernels"),
    "peers": ("setting", "peer"),
    "initialization": ("tables", "rows", "dim", "by"),
    "compile_time": ("tables", "features"),
    "prepare_speed": ("form",),
    "checkpoint_speed": ("work", "side", "devices"),
    "input_speed": ("format", "peer"),
    "dlrm_speed": ("side",),
    "device_count": ("setting", "devices"),
    "peak_memory": ("setting",),
    "unique_rows": ("setting", "side"),
    "dynamic_stream": ("users", "items", "kind"),
    "dynamic_ids": ("ids", "load"),
    "dynamic_steps": ("setting", "side"),
    "host_memory": ("setting", "devices", "memory"),
    "first_step": ("program", "start"),
    "serving_latency": ("setting", "dtype", "batch", "side"),
    "step_profile": ("setting", "part", "operation"),
}
"""Benchmark to the fields that name one of its results."""

Benchmark = dict[str, Any]


def load_results(path: pathlib.Path = RESULTS_FILE) -> dict[str, Benchmark]:
    """Returns the figures of all benchmarks, by the benchmark's name."""
    return json.loads(path.read_text())


def save_results(
    results: dict[str, Benchmark], path: pathlib.Path = RESULTS_FILE
) -> None:
    """Writes the figures, one result per line, so that changes are easy to read."""
    parts = []
    for name in (name for name in KEYS if name in results):
        head = {k: v for k, v in results[name].items() if k != "results"}
        lines = ",\n".join(f"  {json.dumps(row)}" for row in results[name]["results"])
        fields = json.dumps(head)[1:-1]
        parts.append(f'"{name}": {{{fields},\n "results": [\n{lines}]}}')
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def merge(results: dict[str, Benchmark], document: dict[str, Any]) -> str:
    """Replaces results of one benchmark by those of a document; adds new ones.

    Args:
      results: from `load_results`; changed in place.
      document: what a benchmark, or `tpu-embedding compile --json`, has written.

    Returns:
      Name of the benchmark.

    Raises:
      ValueError: if the document names no known benchmark, or a compile report lacks
        programs.
    """
    if "reports" in document:
        document = _compile_fit(document)
    name = document.get("benchmark")
    if name not in KEYS:
        raise ValueError(f"'benchmark' must be one of {sorted(KEYS)}, got {name!r}.")
    benchmark = results.setdefault(name, {"results": []})
    rows = {_key(name, row): row for row in benchmark["results"]}
    # Each new result says its version and CPU: earlier ones may stay beside it.
    stamp = {"jax": document["versions"]["jax"]}
    stamp |= {k: document[k] for k in ("cpu",) if k in document}
    rows |= {_key(name, row): row | stamp for row in document["results"]}
    benchmark |= {k: v for k, v in document.items() if k != "benchmark"}
    benchmark["results"] = list(rows.values())
    return name


def _key(name: str, row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(field) for field in KEYS[name])


def _compile_fit(document: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of compile reports that tables show."""
    rows = []
    for report in document["reports"]:
        memory = report["memory"]
        others = {other["name"]: other for other in report["others"]}
        if "initial tables" not in others:
            raise ValueError(
                f"The report of {report['name']!r} for {report['topology']!r} must "
                "have all programs of a run; compile it without --programs."
            )
        init = others["initial tables"]
        sizes = {name: other["memory"]["required"] for name, other in others.items()}
        sizes["train step"] = memory["required"]
        largest = max(sizes, key=lambda name: sizes[name])
        # A step with kernels is called "CONFIG with BACKEND kernels".
        config, _, kernels = report["name"].removesuffix(" kernels").partition(" with ")
        rows.append(
            {
                "config": config,
                "topology": report["topology"],
                "slices": report["num_slices"],
                "kernels": kernels or "xla",
                "devices": report["num_devices"],
                "table_and_slot_bytes": memory["tables"] + memory["slots"],
                "temporary_bytes": memory["temporaries"],
                "init_temporary_bytes": init["memory"]["temporaries"],
                "largest_program": largest,
                "largest_bytes": sizes[largest],
                "fits": report["fits"],
            }
        )
    versions = dict(document["reports"][0]["versions"])
    return {"benchmark": "compile_fit", "versions": versions, "results": rows}
