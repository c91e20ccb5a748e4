"""Draws the charts of the documentation, whose figures are beside this file.

    python docs/pictures/charts.py

New figures come from finished runs and from compile reports:

    tpu-embedding train synthetic --devices 8 --output-dir runs/synthetic
    python docs/pictures/charts.py --runs runs/synthetic [DIR ...]
    tpu-embedding compile dlrm_dcnv2 --topology v6e:4x4 --json report.json
    python docs/pictures/charts.py --reports report.json [FILE ...]

Times are left out, so the figures depend on no machine.
"""

import argparse
import io
import json
import pathlib
import re
from typing import Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure

CURVES: Final = pathlib.Path(__file__).with_name("curves.json")
MEMORY: Final = pathlib.Path(__file__).with_name("memory.json")

LOSS_OF_METRIC: Final = {"log_loss": "log_loss", "softmax_loss": "in_batch_softmax"}
"""Metrics that are the loss of the training, too."""

LABELS: Final = {
    "log_loss": "log loss (nats)",
    "softmax_loss": "softmax loss (nats)",
    "rmse": "RMSE (stars)",
}
"""Name and unit of each metric."""

PARTS: Final = {
    "tables": "#4285f4",
    "slot variables": "#8ab4f8",
    "dense parameters": "#e08214",
    "inputs": "#c77ac0",
    "temporaries": "#34a853",
    "others": "#999999",
}
"""Colour of each part of the memory; others are outputs, padding and code."""

INK: Final = "#444444"
"""Colour of words and axes: the theme's, where a page includes the chart."""

STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "charts",
    "font.size": 12,
    "legend.frameon": False,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def draw_curves(runs: list[dict[str, Any]]) -> Figure:
    """Draws losses and held-out metrics of training runs, a panel for each config."""
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    *panels, legend = figure.subplots(2, 3).flat
    for run, panel in zip(runs, panels, strict=False):
        if run["loss"]:
            panel.plot(*zip(*run["loss"], strict=True), color="#4285f4")
        panel.plot(*zip(*run["held_out"], strict=True), "o-", color="#e08214")
        if run["teacher"]:
            panel.axhline(run["teacher"], color=INK, linestyle="--")
        panel.set_title(f"{run['config']}: {LABELS[run['metric']]}")
        panel.set_xlim(left=0)
        panel.set_xlabel("step")
    for unused in (*panels[len(runs) :], legend):
        unused.axis("off")
    legend.plot([], color="#4285f4", label="training batches")
    legend.plot([], "o-", color="#e08214", label="held-out samples")
    legend.plot([], color=INK, linestyle="--", label="teacher: the best possible")
    legend.legend(loc="center")
    return figure


def draw_memory(entries: list[dict[str, Any]]) -> Figure:
    """Draws the memory that the train step of a config takes on each device."""
    figure = Figure(figsize=(12, 1.6 + 0.8 * len(entries)), layout="constrained")
    axes = figure.subplots()
    names = [f"{x['config']}\n{x['slice']}, {x['devices']} devices" for x in entries]
    left = [0.0] * len(entries)
    for part, colour in PARTS.items():
        # What the other parts leave is `others`.
        sizes = [
            entry.get(part, entry["required_bytes"]) / 2**30 - (part == "others") * end
            for entry, end in zip(entries, left, strict=True)
        ]
        axes.barh(names, sizes, left=left, height=0.6, color=colour, label=part)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for line, end in enumerate(left):
        axes.text(end + 0.2, line, f"{end:.1f}", va="center")
    capacity = max(entry["capacity_bytes"] for entry in entries) / 2**30
    axes.axvline(capacity, color=INK, linestyle="--", label="HBM")
    axes.invert_yaxis()
    axes.set_xlabel("GiB per device")
    figure.legend(loc="outside lower center", ncols=len(PARTS) + 1)
    return figure


def svg_of(figure: Figure, title: str) -> str:
    """Returns a chart as SVG for a page; the title is what screen readers say."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(INK, f"var(--pst-color-text-base, {INK})")
    size = r'width="[\d.]+pt" height="[\d.]+pt"'
    return re.sub(size, f'role="img" aria-label="{title}"', text, count=1)


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


def draw_charts() -> dict[pathlib.Path, str]:
    """Returns the text of each chart by its file."""
    runs = json.loads(CURVES.read_text())
    configs = ", ".join(run["config"] for run in runs)
    with mpl.rc_context(STYLE):
        curves = draw_curves(runs)
        memory = draw_memory(json.loads(MEMORY.read_text()))
        return {
            CURVES.with_suffix(".svg"): svg_of(
                curves, f"Losses over the steps of training runs: {configs}"
            ),
            MEMORY.with_suffix(".svg"): svg_of(
                memory, "Memory of a train step per device, by part"
            ),
        }


def main() -> None:
    """Stores the figures of the runs or reports that are named, and draws all."""
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
    for file, text in draw_charts().items():
        file.write_text(text)


if __name__ == "__main__":
    main()
