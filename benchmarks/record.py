"""Merges figures into `benchmarks/results.json`, and renders the table of README.md.

    python benchmarks/table_size.py --json sizes.json
    python benchmarks/record.py sizes.json [FILE ...]

Takes what a benchmark wrote with `--json`. A result of the same case replaces the
earlier one. Without a file, it only renders.
"""

import argparse
import json
import pathlib
import re
from typing import Any, Final

from peers_picture import PICTURE, draw
from results_file import KEYS, Results, load_results, merge, save_results

PAGE: Final = pathlib.Path(__file__).with_name("README.md")
_TABLE: Final = re.compile(
    r"(<!-- table of results -->\n).*?(<!-- end of table -->)", re.DOTALL
)

FIGURES: Final[dict[str, tuple[str, ...]]] = {
    "compiler_estimate": ("cycles", "operations", "intercept_ms", "compile_seconds"),
    "partition_estimate": ("cycles", "operations", "optimal_ms"),
    "table_size": ("median_ms", "ratio"),
    "memory_tables": ("median_ms", "ratio"),
    "host_rows": ("median_ms", "ratio", "cpu_ms", "hit_rate", "moved_bytes"),
    "host_rows_planner": ("find_ms", "plan_ms", "all_ms", "modelled_16_ms"),
    "gather_speed": ("ours_ms", "plain_ms", "ratio"),
    "peers": ("train_ms", "train_ratio", "forward_ms", "forward_ratio"),
    "compile_time": ("trace_seconds", "compile_seconds", "ratio"),
    "checkpoint_speed": ("seconds", "ratio", "cpu_seconds", "extra_bytes"),
    "input_speed": ("samples_per_second", "ratio", "peak_bytes"),
    "device_count": ("train_ms", "train_ratio", "forward_ms", "forward_ratio"),
    "first_step": ("until_step_ms", "ratio"),
    "serving_latency": ("p50_ms", "p99_ms", "ratio"),
}
"""Benchmark to the fields of a result that the table shows."""


def render(results: Results) -> str:
    """Returns the table: a line for each result of each benchmark."""
    lines = ["| benchmark | case | figures | CPU | recorded |", "|---|---|---|---|---|"]
    for name, benchmark in results.items():
        for row in benchmark["results"]:
            shown = [x for x in KEYS[name] if x != "device" or x in row]
            case = ", ".join(_show_case(row, field) for field in shown)
            found = [
                _show(field, row[field]) for field in FIGURES[name] if field in row
            ]
            if "left_out" in row:
                found = [f"left out: {row['left_out']}"]
            cpu = row.get("cpu", {}).get("model", "not recorded")
            cells = (name, case, "; ".join(found), cpu, row.get("date", ""))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def render_page(text: str, results: Results) -> str:
    """Returns the text of README.md with the table of these results."""
    return _TABLE.sub(lambda found: found[1] + render(results) + found[2], text)


def _show_case(row: dict[str, Any], field: str) -> str:
    value = row.get(field)
    return f"{field} {value:,}" if isinstance(value, int) else str(value or "-")


def _show(field: str, value: float) -> str:
    """Returns a figure as text; the last word of its field is the unit."""
    name, _, unit = field.rpartition("_")
    name = name.replace("_", " ")
    if field.endswith("per_second"):
        return f"{value:,.0f} samples/s"
    texts = {
        "ns": f"{value:.1f} ns",
        "ms": f"{value:,.2f} ms",
        "seconds": f"{value:.2f} s",
        "bytes": f"{value / 1e6:,.0f} MB",
        "ratio": f"ratio {value:.2f}",
        "rate": f"{value:.1%}",
        "cycles": f"{value:,} cycles",
        "operations": f"{value:,} operations",
    }
    return f"{name} {texts[unit]}".strip()


def main() -> None:
    """Merges all files, then renders."""
    parser = argparse.ArgumentParser(description="Merges figures into results.json.")
    parser.add_argument("file", nargs="*", type=pathlib.Path)
    results = load_results()
    for path in parser.parse_args().file:
        name = merge(results, json.loads(path.read_text()))
        print(f"{path}: {name}")
    save_results(results)
    results = load_results()  # in the file's order, as a test renders it
    PAGE.write_text(render_page(PAGE.read_text(), results))
    PAGE.with_name(PICTURE).write_text(draw(results))


if __name__ == "__main__":
    main()
