"""Numbers and labels of the columns of a CSV file, and the kinds of columns."""

import math
import re
from typing import Final, Literal

import numpy as np

from tpu_embedding.tools.data.csv_text import CsvBlock

Kind = Literal["label", "category", "number", "list", "ignored"]

NUMBER: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")

MISSING: Final = frozenset(("", "na", "n/a", "nan", "null", "none", "\\n"))
"""Words for a missing number, in lower case."""

_WORDS: Final = {"true": 1.0, "false": 0.0} | dict.fromkeys(MISSING, math.nan)

_MAXNUMBER: Final = float(np.finfo(np.float32).max)


def read_numbers(block: CsvBlock, name: str) -> np.ndarray:
    """Returns a column of numbers, float64 `[rows]`, NaN where one is missing.

    Raises:
      DataError: if a cell is neither a number of float32, nor empty, nor a word that
        stands for one or for none.
    """
    numbers = np.array([_number(cell) for cell in block.cells[name]], np.float64)
    is_wrong = np.abs(numbers) > _MAXNUMBER
    if is_wrong.any():
        fix = f"correct it, or set data.categories={name}"
        rule = "must be a number of float32 or empty"
        raise block.error(name, int(is_wrong.argmax()), rule, fix)
    return numbers


def _number(cell: str) -> float:
    """Returns a number, NaN for a missing one, and infinity for another text."""
    if NUMBER.fullmatch(cell):
        return float(cell)
    return _WORDS.get(cell.lower(), math.inf)
