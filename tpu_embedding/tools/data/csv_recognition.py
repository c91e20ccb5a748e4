"""Recognises the kinds of a CSV file's columns from the cells of sampled rows."""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import numpy as np

from tpu_embedding.tools.data.csv_numbers import (
    CLOCK_FORMAT,
    DATE_FORMATS,
    MISSING,
    NUMBER_MARKS,
    UNIX_FORMATS,
    numbers_of,
    seconds_of,
)
from tpu_embedding.tools.data.csv_schema import DAY_SECONDS, Column, ColumnKind

MAX_CATEGORIES: Final = 20
"""Maximum number of distinct integers that are always categories."""

NUM_BUCKETS: Final = 12
"""Maximum number of buckets. With 32, the AUC of a credit file was 0.001 lower."""

_MIN_BUCKET_ROWS: Final = 16

_CODE_NAME: Final = re.compile(
    r"(.*[\W_])?(id|ids|uid|code|key|zip|zipcode|postcode|sku|phone|user|item|movie"
    r"|product|customer|session|device|account)([\W_]*(id|code|number|no))?|.*[a-z]I[Dd]",
)
_TIME_NAME: Final = re.compile(r"(?i).*(time|date|stamp|unix|epoch)|ts|.*[\W_](ts|at)")

_UNIX_RANGE: Final = (8.5e8, 2.2e9)
"""Range of Unix seconds, from 1996 to 2039."""

_MIN_CLOCK_TIMES: Final = 120
"""Integers are times of day only if more than this many are distinct.

Among so many integers of other kinds, some would end with 60 to 99."""


def recognise(
    cells: Mapping[str, Sequence[str]],
    separator: str,
    rows: np.ndarray | None = None,
) -> dict[str, Column]:
    """Returns the columns with their kinds.

    All columns of a file have the same decimal mark. Thus `1,234` is 1.234 if other
    columns have decimal commas, and 1234 otherwise.

    Args:
      cells: some cells of each column, stripped of white space.
      separator: text between list elements.
      rows: row numbers of the cells, ascending. By default, they are consecutive.

    Example:
      >>> made = recognise({"x": ["1,5", "2"], "y": ["1,234", "?"]}, "|")
      >>> [(x.kind, x.decimal, x.because) for x in made.values()]
      ... # doctest: +NORMALIZE_WHITESPACE
      [('number', ',', 'numbers with a decimal comma'),
       ('number', ',', 'numbers with a decimal comma')]
    """
    present, places = {}, {}
    for name, texts in cells.items():
        kept = [i for i, text in enumerate(texts) if text.lower() not in MISSING]
        present[name] = [texts[i] for i in kept]
        places[name] = np.array(kept, int)
        if rows is not None:  # Cells after the sampled rows lack numbers.
            places[name] = rows[[i for i in kept if i < len(rows)]]
    marks = {name: number_marks(set(texts)) for name, texts in present.items()}
    has_commas = any(m and all(mark == "," for mark, _ in m) for m in marks.values())
    return {
        name: _column(
            name, texts, places[name], separator, _preferred(marks[name], has_commas)
        )
        for name, texts in present.items()
    }


def number_marks(texts: Collection[str]) -> list[tuple[str, str]]:
    """Returns the pairs of decimal and thousands marks that fit all texts."""
    some = list(texts)[:20]  # A quick check, which most columns of text fail.
    return [
        marks
        for marks in NUMBER_MARKS
        if numbers_of(some, *marks)[1] is None
        and numbers_of(list(texts), *marks)[1] is None
    ]


def _preferred(
    marks: Sequence[tuple[str, str]], has_commas: bool
) -> tuple[str, str] | None:
    commas = [pair for pair in marks if pair[0] == ","]
    return (commas if has_commas and commas else [*marks, None])[0]


def _column(
    name: str,
    texts: list[str],
    rows: np.ndarray,
    separator: str,
    marks: tuple[str, str] | None,
) -> Column:
    """Returns a column with its kind, given the texts that are not missing."""
    different = set(texts)
    if not different:
        return Column(name=name, kind="category", because="empty in the rows read")
    if any(separator in text for text in different):
        because = f"cells have {separator!r}"
        return Column(name=name, kind="list", because=because, separator=separator)
    words = {text.lower() for text in different} & {"true", "false"}
    if marks is None or words:
        date_format = _date_format(different)
        if date_format is None:
            return Column(name=name, kind="category", because="texts")
        because = f"dates in the format {date_format}"
        return Column(name=name, kind="date", because=because, date_format=date_format)
    decimal, thousands = marks
    values = numbers_of(texts, decimal, thousands)[0]
    column = Column(name=name, kind="number", decimal=decimal, thousands=thousands)
    is_plain = all(text.lstrip("+-").isdigit() for text in different)
    is_whole = bool((np.isfinite(values) & (values == np.round(values))).all())
    is_code = _CODE_NAME.fullmatch(name) is not None
    if is_whole and not is_code and _is_clock(texts, different):
        because = "times of day in hours and minutes"
        return Column(name=name, kind="date", because=because, date_format=CLOCK_FORMAT)
    if not is_plain and not (is_whole and is_code):
        return _because(column, "number", _notation(decimal, thousands))
    if any(re.fullmatch("0[0-9]+", text) for text in different):
        return _because(column, "category", "codes with leading zeros")
    if date_format := _integer_dates(name, texts, values):
        because = f"dates as {date_format}"
        return Column(name=name, kind="date", because=because, date_format=date_format)
    return _integers(column, values, rows)


def _is_clock(texts: list[str], different: set[str]) -> bool:
    """Returns True for many distinct times such as 1730."""
    if len(different) <= _MIN_CLOCK_TIMES:
        return False
    return seconds_of(texts, CLOCK_FORMAT)[1] is None


def _because(column: Column, kind: ColumnKind, because: str) -> Column:
    return dataclasses.replace(column, kind=kind, because=because)


def _notation(decimal: str, thousands: str) -> str:
    words = ["numbers"]
    if decimal == ",":
        words.append("with a decimal comma")
    if thousands:
        words.append(f"with {thousands!r} between thousands")
    return " ".join(words)


def _integers(column: Column, values: np.ndarray, rows: np.ndarray) -> Column:
    """Returns a column of numbers, or of categories if the integers are identifiers.

    Integers are identifiers if the column's name says so, or if they cover a large part
    of a range and occur in several rows on average.
    """
    different = np.unique(values)
    num, first, last = len(different), different[0], different[-1]
    if num <= MAX_CATEGORIES:
        return _because(column, "category", f"{num} distinct integers")
    if _CODE_NAME.fullmatch(column.name):
        return _because(column, "category", "integers with a code's name")
    if num == len(values) and np.array_equal(np.diff(values), np.diff(rows)):
        return _because(column, "ignored", "numbers the rows")
    if num > 120 and num > 0.3 * (last - first) and len(values) >= 4 * num:
        because = f"{num} integers from {first:.0f} to {last:.0f}, like identifiers"
        return _because(column, "category", because)
    return _because(column, "number", f"more than {MAX_CATEGORIES} distinct integers")


def _integer_dates(name: str, texts: list[str], values: np.ndarray) -> str | None:
    """Returns the format of integers that are dates or times, or None."""
    low, high = values.min(), values.max()
    if 19000101 <= low and high <= 21001231 and seconds_of(texts, "%Y%m%d")[1] is None:
        return "%Y%m%d"
    is_time = _TIME_NAME.fullmatch(name) is not None
    is_code = _CODE_NAME.fullmatch(name) is not None
    for date_format, unit in UNIX_FORMATS.items():
        first, last = low / unit, high / unit
        is_spread = len(texts) >= 20 and last - first > DAY_SECONDS
        if _UNIX_RANGE[0] <= first and last <= _UNIX_RANGE[1]:
            return date_format if is_time or (is_spread and not is_code) else None
    return None


def _date_format(different: set[str]) -> str | None:
    """Returns the date format that fits all texts, or None."""
    texts = list(different)
    if not all(5 < len(text) < 40 and re.search("[0-9]", text) for text in texts[:20]):
        return None
    for date_format in DATE_FORMATS:
        if seconds_of(texts[:20], date_format)[1] is None:
            if seconds_of(texts, date_format)[1] is None:
                return date_format
    return None


def named_date(name: str, texts: Collection[str]) -> Column:
    """Returns a column that `data.dates` names, given the cells that are not missing.

    The column's format is the first one that fits all texts. If no format fits, it is
    the one that fits the most texts before the first wrong one. Reading the column then
    raises an error for that cell.
    """
    cells = sorted(texts)
    formats = [*DATE_FORMATS, CLOCK_FORMAT, *UNIX_FORMATS]
    numbers, wrong = numbers_of(cells)
    if wrong is None and cells and numbers.min() > 1e11:
        formats.remove("Unix seconds")

    def fits(date_format: str) -> int:
        wrong = seconds_of(cells, date_format)[1]
        return len(cells) if wrong is None else wrong

    date_format = max(formats, key=fits)
    return Column(name=name, kind="date", because="data.dates", date_format=date_format)


def fitted(column: Column, values: np.ndarray, is_trained: np.ndarray) -> Column:
    """Returns a column of numbers or dates with its buckets and date parts.

    All buckets have about the same number of training rows. `is_trained`, bool
    `[rows]`, is True for training rows. `values` are from `Column.read`.
    """
    values = values[is_trained]
    values = values[np.isfinite(values)]
    if not values.size:
        return column
    if column.kind == "date":
        parts = ("weekday", "hour") if np.ptp(values % DAY_SECONDS) else ("weekday",)
        parts = ("hour",) if column.date_format == CLOCK_FORMAT else parts
        column = dataclasses.replace(column, newest=float(values.max()), parts=parts)
        values = (column.newest - values) / DAY_SECONDS
    num_buckets = min(NUM_BUCKETS, len(values) // _MIN_BUCKET_ROWS)
    if num_buckets < 2:
        return column
    different, counts = np.unique(values, return_counts=True)
    most = counts.argmax()
    frequent = different[most : most + 2]  # The edges of its own bucket.
    others = values
    if counts[most] > len(values) / 2:
        others = values[values != frequent[0]]
    shares = np.linspace(0, 1, num_buckets + 1)[1:-1]
    edges = np.quantile(others, shares, method="lower") if others.size else []
    if len(others) < len(values):
        edges = np.concatenate([edges, frequent])
    edges = np.unique(edges)
    return dataclasses.replace(
        column, edges=tuple(edges[edges > values.min()].tolist())
    )
