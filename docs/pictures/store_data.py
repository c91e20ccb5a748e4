"""Stores figures of finished runs and of compile reports as data of the pictures.

    tpu-embedding train synthetic --devices 8 --output-dir runs/synthetic
    python docs/pictures/store_data.py --runs runs/synthetic [DIR ...]
    tpu-embedding compile dlrm_dcnv2 --topology v6e:4x4 --json report.json
    python docs/pictures/store_data.py --reports report.json [FILE ...]

Then `draw.py` draws them. Times are left out, so the data depend on no machine.
"""

import argparse
import json
import pathlib
from typing import Any

from charts import CURVES, MEMORY

LOSS_OF_METRIC = {"log_loss": "log_loss", "softmax_loss": "in_batch_softmax"}
"""Metrics that are the loss of the training, too."""


def read_curves(directory: pathlib.Path) -> dict[str, Any]:
    """Returns the losses and the main metric of a run, by step."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    run = records[0]["run"]
    (result,) = (record["result"] for record in records if "result" in record)
    metric = result["metric"]
    is_loss = run["loss"] == LOSS_OF_METRIC.get(metric)
    return {
        "config": run["name"],
        "metric": metric,
        "loss": [
            [record["step"], round(record["loss"], 4)]
            for record in records
            if is_loss and "loss" in record
        ],
        "held_out": [
            [record["step"], round(record["evaluation"][metric], 4)]
            for record in records
            if "evaluation" in record
        ],
        "teacher": result["teacher"] and round(result["teacher"], 4),
    }


def read_memory(file: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the memory of the train step per device, of each report of a file."""
    document = json.loads(file.read_text())
    return [
        {
            "config": document["config"]["name"],
            "slice": report["topology"],
            "devices": report["num_devices"],
            "capacity_bytes": report["memory"]["capacity"],
            "required_bytes": report["memory"]["required"],
            "tables": report["memory"]["tables"],
            "slot variables": report["memory"]["slots"],
            "dense parameters": report["memory"]["dense"],
            "inputs": report["memory"]["inputs"],
            "temporaries": report["memory"]["temporaries"],
        }
        for report in document["reports"]
    ]


def main() -> None:
    """Writes the data of the runs, or of the reports, that are named."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--runs", nargs="+", type=pathlib.Path, default=[])
    parser.add_argument("--reports", nargs="+", type=pathlib.Path, default=[])
    arguments = parser.parse_args()
    curves = [read_curves(directory) for directory in arguments.runs]
    memory = [entry for file in arguments.reports for entry in read_memory(file)]
    for file, entries in ((CURVES, curves), (MEMORY, memory)):
        if entries:
            lines = ",\n".join(json.dumps(entry) for entry in entries)
            file.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
