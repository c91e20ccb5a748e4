"""Draws the losses of training runs, which curves.json beside this file has.

    python docs/pictures/curves.py

takes the figures of finished runs in addition, by their directories:

    tpu-embedding train synthetic --devices 8 --output-dir runs/synthetic
    python docs/pictures/curves.py runs/synthetic

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

LOSS_OF_METRIC: Final = {"log_loss": "log_loss", "softmax_loss": "in_batch_softmax"}
"""Metrics that are the loss of the training, too."""

LABELS: Final = {
    "log_loss": "log loss (nats)",
    "softmax_loss": "softmax loss (nats)",
    "rmse": "RMSE (stars)",
}
"""Name and unit of each metric."""

INK: Final = "#444444"
"""Colour of words and axes: the theme's, where a page has a theme."""

INK_RULES: Final = (
    f"svg {{ --ink: {INK}; }} "
    "@media (prefers-color-scheme: dark) { svg { --ink: #cccccc; } } "
)

STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "curves",
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


def svg_of(figure: Figure, title: str) -> str:
    """Returns a chart as SVG for a page; the title is what screen readers say."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(
        INK, "var(--pst-color-text-base, var(--ink))"
    )
    text = text.replace('<style type="text/css">', f"<style>{INK_RULES}", 1)
    size = r'width="[\d.]+pt" height="[\d.]+pt"'
    return re.sub(size, f'role="img" aria-label="{title}"', text, count=1)


def read_curves(directory: pathlib.Path, teacher: float | None) -> dict[str, Any]:
    """Returns the losses and the main metric of a run, by step.

    Args:
      directory: output directory of the run.
      teacher: metric of the teacher, the best possible one, if there is a teacher.
    """
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    first, *records = [json.loads(line) for line in lines]
    run = first["run"]
    evaluations = [record for record in records if "evaluation" in record]
    metric = next(iter(evaluations[0]["evaluation"]))
    is_loss = run["loss"] == LOSS_OF_METRIC.get(metric)
    return {
        "config": run["name"],
        "metric": metric,
        "loss": [
            [record["step"], round(record["train"]["loss"], 4)]
            for record in records
            if is_loss and "train" in record
        ],
        "held_out": [
            [record["step"], round(record["evaluation"][metric], 4)]
            for record in evaluations
        ],
        "teacher": teacher,
    }


def main() -> None:
    """Draws the runs of curves.json, with the figures of the given directories."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("directories", nargs="*", type=pathlib.Path)
    runs = {run["config"]: run for run in json.loads(CURVES.read_text())}
    for directory in parser.parse_args().directories:
        run = read_curves(directory, teacher=None)
        run["teacher"] = runs.get(run["config"], run)["teacher"]
        runs[run["config"]] = run
    lines = ",\n".join(json.dumps(run) for run in runs.values())
    CURVES.write_text(f"[\n{lines}\n]\n")
    title = f"Losses over the steps of training runs: {', '.join(runs)}"
    with mpl.rc_context(STYLE):
        figure = draw_curves(list(runs.values()))
        CURVES.with_suffix(".svg").write_text(svg_of(figure, title))


if __name__ == "__main__":
    main()
