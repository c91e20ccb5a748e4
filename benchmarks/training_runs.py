"""Collects the results of finished training runs.

    bash scripts/train.sh synthetic --devices 8
    python benchmarks/training_runs.py runs/synthetic [DIR ...] --json FILE
    python benchmarks/record.py FILE

Each directory is the output of one `tpu-embedding train`. Runs of one config that
differ in their seeds (`--set seed=1 --output-dir ...`) become one result, their mean.
"""

import argparse
import itertools
import json
import pathlib
import statistics
from typing import Any

from markdown_tables import show_teacher
from processor import describe_machine

RECORDS_FILE = "metrics.jsonl"


def read_run(directory: pathlib.Path) -> dict[str, Any]:
    """Returns the first record of a run, joined with its result."""
    lines = (directory / RECORDS_FILE).read_text().splitlines()
    records = [json.loads(line) for line in lines]
    results = [record["result"] for record in records if "result" in record]
    if not results:
        raise SystemExit(f"{directory} holds no finished run.")
    return records[0] | {"result": results[-1]}


def summarize(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns one result for the runs of one config."""
    first, target = runs[0], runs[0]["run"]["target"]
    metric = target["metric"]
    values = [run["result"]["metrics"][metric] for run in runs]
    summary = {
        "config": first["run"]["name"],
        "metric": metric,
        "value": statistics.mean(values),
        "target": target["at_least"]
        if target["at_most"] is None
        else target["at_most"],
        "seconds": statistics.mean(run["result"]["seconds"] for run in runs),
        "devices": first["devices"]["count"],
    }
    if len(runs) > 1:
        summary["by_seed"] = values
    teacher = first["result"]["teacher"]
    if teacher is not None:
        summary |= {"teacher": teacher} | _against_teacher(
            metric, summary["value"], teacher
        )
    return summary


def _against_teacher(metric: str, value: float, teacher: float) -> dict[str, float]:
    """Returns how near a value is to the teacher's, as a target counts it."""
    if metric != "auc":
        return {"ratio": value / teacher}
    if teacher <= 0.5:
        return {}
    return {"share_of_lead": (value - 0.5) / (teacher - 0.5)}


def main() -> None:
    """Reads the runs, prints a line for each config, and writes JSON."""
    parser = argparse.ArgumentParser(description="Collects training results.")
    parser.add_argument("directory", nargs="+", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    runs = [read_run(directory) for directory in arguments.directory]
    runs.sort(key=lambda run: (run["run"]["name"], run["run"]["seed"]))
    results = [
        summarize(list(group))
        for _, group in itertools.groupby(runs, key=lambda run: run["run"]["name"])
    ]
    for result in results:
        line = f"{result['config']}: {result['metric']} {result['value']:.4f}"
        if "teacher" in result:
            line += f", teacher {show_teacher(result)}"
        print(line)
    document = {
        "benchmark": "training_runs",
        "device": runs[0]["devices"]["kind"],
        **describe_machine(),
        "versions": runs[0]["versions"],
        "results": results,
    }
    arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
