"""Labels of a CSV file, and the kinds of columns that a user names."""

import math
import re
from typing import Final, Literal

import numpy as np

from tpu_embedding.tools.data.csv_numbers import MISSING
from tpu_embedding.tools.data.csv_text import CsvBlock

Kind = Literal["label", "category", "number", "list", "ignored"]

NUMBER: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")

_WORDS: Final = {"true": 1.0, "false": 0.0} | dict.fromkeys(MISSING, math.nan)


def read_labels(
    block: CsvBlock, name: str, positive_from: float | None = None
) -> np.ndarray:
    """Returns a column of labels, float32 `[rows]`, each 0 or 1.

    Args:
      block: rows of the file.
      name: the column.
      positive_from: smallest number that becomes 1. By default, the column has the
        labels 0 and 1 already.

    Raises:
      DataError: if a cell is not a label.
    """
    labels = np.array([_number(cell) for cell in block.cells[name]], np.float64)
    is_label, rule = np.isin(labels, (0, 1)), "must be 0 or 1"
    if positive_from is not None:
        is_label, rule = np.isfinite(labels), "must be a number"
        labels = labels >= positive_from
    if not is_label.all():
        fix = (
            "correct it, drop the row, or name another column by --label; for ratings, "
            "set data.positive_from=4, which makes 4 and more a 1; to predict numbers, "
            "write them to Parquet, and a config with a ParquetSource and the loss "
            "squared_error"
        )
        raise block.error(name, int(is_label.argmin()), rule, fix)
    return labels.astype(np.float32)


def _number(cell: str) -> float:
    """Returns a number, NaN for a missing one, and infinity for another text."""
    if NUMBER.fullmatch(cell):
        return float(cell)
    return _WORDS.get(cell.lower(), math.inf)
