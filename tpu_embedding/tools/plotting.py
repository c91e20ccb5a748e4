"""Makes figures with matplotlib, which only the commands that draw need."""

from typing import Any, Final

PLOT_TYPES: Final = (".png", ".svg", ".pdf")
"""Endings of the files that a figure is written to."""


class MissingPlotLibraryError(ImportError):
    """Raised if a figure is wanted, but matplotlib is not installed."""


def check_plot_library(purpose: str) -> None:
    """Raises an error if matplotlib is missing, before any work is done.

    Args:
      purpose: what needs the figure, for the error.

    Raises:
      MissingPlotLibraryError: if matplotlib is not installed.
    """
    make_figure(purpose, width=1, height=1)


def make_figure(purpose: str, *, width: float, height: float) -> Any:
    """Returns an empty matplotlib figure, which arranges its axes by itself.

    Args:
      purpose: what needs the figure, for the error.
      width: width in inches.
      height: height in inches.

    Raises:
      MissingPlotLibraryError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPlotLibraryError(
            f"{purpose} needs matplotlib, which is not installed. Install "
            "tpu-embedding with its extra `train`: pip install 'tpu-embedding[train]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")
