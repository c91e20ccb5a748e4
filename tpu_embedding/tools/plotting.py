"""Makes figures with matplotlib, which only the commands that draw need."""

import importlib.util
from typing import Any, Final

PLOT_TYPES: Final = (".png", ".svg", ".pdf")
"""Endings of the files that a figure is written to."""


class MissingPlotLibraryError(ImportError):
    """Raised if a figure is wanted, but matplotlib is not installed."""


def check_plot_library(purpose: str) -> None:
    """Raises an error if matplotlib is missing, before any work is done.

    It does not import matplotlib, which takes a third of a second.

    Args:
      purpose: what needs the figure, for the error.

    Raises:
      MissingPlotLibraryError: if matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise _missing(purpose)


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
        raise _missing(purpose) from error
    return Figure(figsize=(width, height), layout="constrained")


def _missing(purpose: str) -> MissingPlotLibraryError:
    return MissingPlotLibraryError(
        f"{purpose} needs matplotlib, which is not installed. Install "
        "tpu-embedding with its extra `train`: pip install 'tpu-embedding[train]'"
    )
