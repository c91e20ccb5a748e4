"""Draws figures that `store_data.py` stored as data beside this file."""

import json
import math
import pathlib
from typing import Any, Final

from canvas import CHART_STYLE, Picture

CURVES: Final = pathlib.Path(__file__).with_name("curves.json")
MEMORY: Final = pathlib.Path(__file__).with_name("memory.json")

NAMES: Final = {
    "log_loss": "log loss (nats)",
    "softmax_loss": "softmax loss (nats)",
    "rmse": "RMSE (stars)",
}
"""Name and unit of each metric, for its axis."""

PARTS: Final = {
    "tables": "tables",
    "slot variables": "slots",
    "dense parameters": "dense",
    "inputs": "inputs",
    "temporaries": "temporaries",
    "others": "rest",
}
"""Style of each part of the memory; others are outputs, padding and code."""


class Axis:
    """Maps values to pixels, and chooses round values for its ticks."""

    def __init__(self, values: list[float], start: float, stop: float, num_ticks: int):
        """Covers all values, with at most so many intervals between ticks."""
        low, high = min(values), max(values)
        rough = (high - low) / num_ticks
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(k * unit for k in (1, 2, 5, 10) if k * unit >= rough * 0.999)
        first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
        self.ticks = [round(i * step, 10) for i in range(first, last + 1)]
        self._decimals = max(0, -math.floor(math.log10(step)))
        self._start, self._stop = start, stop

    def label(self, tick: float) -> str:
        """Returns a tick as text, with the decimals that its neighbours need."""
        return f"{tick:,.{self._decimals}f}"

    def place(self, value: float) -> float:
        """Returns the pixel of a value."""
        low, high = self.ticks[0], self.ticks[-1]
        part = (value - low) / (high - low)
        return round(self._start + part * (self._stop - self._start), 1)


def draw_curves() -> str:
    """Draws losses and held-out metrics of training runs, a panel for each config."""
    runs = json.loads(CURVES.read_text())
    names = ", ".join(run["config"] for run in runs)
    title = f"Losses over the steps of training runs: {names}"
    picture = Picture(1000, 500, title, CHART_STYLE)
    places = [(330 * (i % 3), 256 * (i // 3)) for i in range(6)]
    for run, (left, top) in zip(runs, places, strict=False):
        _panel(picture, run, left, top)
    left, top = places[len(runs)]
    for line, (style, words) in enumerate(
        (
            ("trained", "training batches"),
            ("held", "held-out samples"),
            ("mark dashed", "teacher: the best possible"),
        )
    ):
        y = top + 90 + 30 * line
        picture.path([(left + 70, y), (left + 110, y)], style)
        picture.text(left + 120, y + 5, words, "small left")
    picture.dot(left + 90, top + 120, "helddot")
    return picture.svg()


def _panel(picture: Picture, run: dict[str, Any], left: float, top: float) -> None:
    points = [*run["loss"], *run["held_out"]]
    values = [value for _, value in points]
    if run["teacher"]:
        values.append(run["teacher"])
    x = Axis([0, *(step for step, _ in points)], left + 58, left + 312, 4)
    y = Axis(values, top + 196, top + 34, 4)
    picture.text(left + 58, top + 20, run["config"], "left head")
    picture.text(left + 312, top + 20, NAMES[run["metric"]], "small end")
    for tick in y.ticks:
        picture.path([(left + 58, y.place(tick)), (left + 312, y.place(tick))], "grid")
        picture.text(left + 52, y.place(tick) + 5, y.label(tick), "small end")
    for tick in x.ticks:
        picture.text(x.place(tick), top + 214, x.label(tick), "small")
    picture.text(left + 185, top + 234, "step", "small")
    if run["teacher"]:
        level = y.place(run["teacher"])
        picture.path([(left + 58, level), (left + 312, level)], "mark dashed")
    for name, style in (("loss", "trained"), ("held_out", "held")):
        line = [(x.place(step), y.place(value)) for step, value in run[name]]
        if len(line) > 1:
            picture.path(line, style)
        if name == "held_out":
            for point in line:
                picture.dot(*point, "helddot")


def draw_memory() -> str:
    """Draws the memory that the train step of a config takes on each device."""
    entries = json.loads(MEMORY.read_text())
    capacity = max(entry["capacity_bytes"] for entry in entries) / 2**30
    height = 64 * len(entries) + 130
    title = "Memory of a train step per device, by part"
    picture = Picture(1000, height, title, CHART_STYLE)
    x = Axis([0, capacity], 170, 980, 8)
    bottom = 64 * len(entries) + 20
    for tick in x.ticks:
        picture.path([(x.place(tick), 16), (x.place(tick), bottom)], "grid")
        picture.text(x.place(tick), bottom + 20, x.label(tick), "small")
    picture.text(575, bottom + 42, "GiB per device", "small")
    for line, entry in enumerate(entries):
        _memory_bar(picture, entry, x, 24 + 64 * line)
    for i, (part, style) in enumerate(PARTS.items()):
        left = 170 + (0, 90, 222, 382, 472, 598)[i]
        picture.box(left, bottom + 62, 16, 16, style)
        picture.text(left + 22, bottom + 75, part, "small left")
    picture.path([(865, bottom + 60), (865, bottom + 80)], "mark dashed")
    picture.text(875, bottom + 75, "HBM", "small left")
    return picture.svg()


def _memory_bar(picture: Picture, entry: dict[str, Any], x: Axis, y: float) -> None:
    picture.text(158, y + 19, entry["config"], "head end")
    picture.text(
        158, y + 38, f"{entry['slice']}, {entry['devices']} devices", "small end"
    )
    sizes = {part: entry[part] for part in PARTS if part != "others"}
    sizes["others"] = entry["required_bytes"] - sum(sizes.values())
    total = 0
    for part, size in sizes.items():
        left, right = x.place(total / 2**30), x.place((total + size) / 2**30)
        if right > left:
            picture.box(left, y, round(right - left, 1), 44, PARTS[part])
        total += size
    picture.text(x.place(total / 2**30) + 8, y + 27, f"{total / 2**30:.1f}", "left")
    end = x.place(entry["capacity_bytes"] / 2**30)
    picture.path([(end, y - 6), (end, y + 50)], "mark dashed")
