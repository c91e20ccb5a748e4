"""Merges figures into `benchmarks/results.json`, and renders all tables anew.

    python benchmarks/compiled_traffic.py --json traffic.json
    python benchmarks/record.py traffic.json [FILE ...]

Takes what a benchmark wrote with `--json`, or `tpu-embedding compile ... --json`. A
result of the same case replaces the earlier one.
"""

import argparse
import json
import pathlib

from render_tables import render_all
from results_file import load_results, merge, save_results


def main() -> None:
    """Merges all files, then renders."""
    parser = argparse.ArgumentParser(description="Merges figures into results.json.")
    parser.add_argument("file", nargs="+", type=pathlib.Path)
    results = load_results()
    for path in parser.parse_args().file:
        name = merge(results, json.loads(path.read_text()))
        print(f"{path}: {name}")
    save_results(results)
    # The file has an order of its own, in which tables are rendered later, too.
    for path in render_all(load_results()):
        print(f"rendered {path}")


if __name__ == "__main__":
    main()
