"""Draws the memory of each program of a run, for `tpu-embedding compile --plot`."""

import pathlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from tpu_embedding.tools.compile_report.step_report import CompileReport
from tpu_embedding.tools.plotting import make_figure

# From Okabe and Ito, "Color Universal Design" (2008): safe for colour-blind readers.
_COLOURS: Final = {
    "tables": "#0072b2",
    "slot variables": "#56b4e9",
    "dense parameters and optimizer state": "#e69f00",
    "inputs": "#f0e442",
    "tile padding of dense and inputs": "#999999",
    "outputs": "#cc79a7",
    "temporaries": "#009e73",
    "program code": "#5d3a9b",
    "not itemised by the compiler": "#dddddd",
}
_GIBIBYTE: Final = 2**30


def plot_memory(reports: Sequence[CompileReport], path: pathlib.Path) -> None:
    """Writes a picture with a stacked bar of memory for each program of each report.

    Args:
      reports: one or more reports from `compile_report`.
      path: file to write; its ending gives its type.

    Raises:
      MissingPlotLibraryError: if matplotlib is not installed.
    """
    num_bars = [len(report.programs) for report in reports]
    height = 1.5 + sum(0.9 + 0.35 * count for count in num_bars)
    figure = make_figure("--plot", width=10, height=height)
    axes = figure.subplots(len(reports), squeeze=False, height_ratios=num_bars)[:, 0]
    for axis, report in zip(axes, reports, strict=True):
        _draw(axis, report)
    legend = {
        label: handle
        for axis in axes
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(legend.values(), legend, loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=120)


def _draw(axis: Any, report: CompileReport) -> None:
    """Draws the bars of one report, and its device's memory as a line."""
    programs = report.programs
    places = np.arange(len(programs))
    left = np.zeros(len(programs))
    for part, colour in _COLOURS.items():
        sizes = [program.memory.parts.get(part, 0) for program in programs]
        if any(sizes):
            gibibytes = np.array(sizes) / _GIBIBYTE
            axis.barh(places, gibibytes, left=left, color=colour, label=part)
            left += gibibytes
    capacity = report.memory.capacity
    if capacity is not None:
        axis.axvline(
            capacity / _GIBIBYTE, color="black", linestyle="--", label="HBM of a device"
        )
    names = [
        program.name + ("" if program.memory.fits else ": DOES NOT FIT")
        for program in programs
    ]
    axis.set_yticks(places, names)
    axis.invert_yaxis()
    axis.set_title(report.title, fontsize="medium")
    axis.set_xlabel("GiB per device")
