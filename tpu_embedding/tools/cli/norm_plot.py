"""Draws the norms of the rows of tables, one histogram per table."""

import math
import pathlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from tpu_embedding.checkpoint.row_statistics import NormHistogram, TableStatistics
from tpu_embedding.tools.cli.arguments import UsageError
from tpu_embedding.tools.plotting import make_figure

MAX_TABLES: Final = 24
"""Maximum number of histograms in a plot; those of the first tables."""

_MAX_BINS: Final = 60
_COLUMNS: Final = 3


def plot_norms(
    statistics: Mapping[str, TableStatistics], title: str, path: pathlib.Path
) -> None:
    """Writes a plot with a histogram of norms for each table.

    Args:
      statistics: table name to statistics of its rows.
      title: title of the plot.
      path: file to write; its ending gives its type.

    Raises:
      UsageError: if no table has a row of finite values.
    """
    shown = {
        name: found.norms
        for name, found in list(statistics.items())[:MAX_TABLES]
        if found.norms is not None
    }
    if not shown:
        raise UsageError("--plot: no table has a row of finite values.")
    columns = min(_COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure = make_figure("--plot", width=1 + 3.6 * columns, height=1 + 2.4 * rows)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, (name, norms) in zip(axes, shown.items(), strict=False):
        _draw(axis, name, norms)
    for axis in axes[len(shown) :]:
        axis.set_axis_off()
    hidden = len(statistics) - len(shown)
    figure.suptitle(title + (f" ({hidden} tables not shown)" if hidden else ""))
    figure.supxlabel("Euclidean norm of a row")
    figure.supylabel("rows")
    figure.savefig(path, dpi=120)


def _draw(axis: Any, name: str, norms: NormHistogram) -> None:
    """Draws one histogram: linear norms, unless they span orders of magnitude."""
    low, high = norms.minimum, norms.maximum
    is_log = low > 0 and high / low > 100
    if low == high:  # One bar, as wide as a tenth of its norm.
        low, high = low - 0.05 * abs(low) - 1e-3, high + 0.05 * abs(high) + 1e-3
    space = np.geomspace if is_log else np.linspace
    num_rows = int(norms.counts.sum())
    edges = space(low, high, int(np.clip(2 * num_rows**0.5, 5, _MAX_BINS)) + 1)
    edges[0], edges[-1] = min(low, edges[0]), max(high, edges[-1])
    rows = norms.in_bins(edges)
    axis.stairs(rows, edges, fill=True, alpha=0.8)
    median = norms.median
    axis.axvline(median, color="black", linewidth=1, label=f"median {median:.3g}")
    axis.set_xscale("log" if is_log else "linear")
    if rows.max() > 100:  # Few rows of a rare norm still show.
        axis.set_yscale("symlog", linthresh=1)
    axis.set_ylim(bottom=0)
    axis.set_title(name, fontsize="medium")
    axis.legend(fontsize="small", frameon=False)
