"""Parses numbers and dates in the notations that files use."""

import datetime
import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

MISSING: Final = frozenset(
    ("", "?", "-", "--", "na", "n/a", "#n/a", "nan", "nat", "null", "none", "\\n")
)
"""Lower-case words for a missing value."""

_WORDS: Final = {"true": 1.0, "false": 0.0, "∞": math.inf, "-∞": -math.inf} | {
    sign + word: float(sign + word)
    for sign, word in itertools.product(("", "+", "-"), ("inf", "infinity"))
}

_AROUND: Final = "$€£¥₹₩₽% \u00a0\u202f"
"""Characters around a number that are ignored."""

_MARKS: Final = {"": "", " ": "[ \u00a0\u202f]", "'": "['’]", ",": ",", ".": r"\."}

NUMBER_MARKS: Final = (
    (".", ""),
    (".", ","),
    (".", " "),
    (".", "'"),
    (",", ""),
    (",", "."),
    (",", " "),
)
"""Decimal and thousands marks of each notation."""

UNIX_FORMATS: Final = {"Unix seconds": 1.0, "Unix milliseconds": 1000.0}

CLOCK_FORMAT: Final = "HHMM"
"""Format of times of day as numbers: 5 means 0:05, and 1730 means 17:30."""

_ISO: Final = "ISO 8601"

DATE_FORMATS: Final = (
    _ISO,
    *(
        date + time
        for date, time in itertools.product(
            ("%Y/%m/%d", "%m/%d/%Y", "%d/%m/%Y", "%d.%m.%Y", "%m-%d-%Y", "%d-%m-%Y")
            + ("%m/%d/%y", "%d/%m/%y", "%d.%m.%y", "%d-%b-%Y", "%d-%b-%y", "%d %b %Y")
            + ("%b %d, %Y", "%d %B %Y", "%B %d, %Y", "%Y%m%d"),
            ("", " %H:%M:%S", " %H:%M", " %I:%M:%S %p", " %I:%M %p"),
        )
    ),
)
"""Formats for `datetime.strptime`, and ISO 8601 for `datetime.fromisoformat`."""

_ISO_DATE: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}(?:[T ][0-9].*)?")

_EPOCH: Final = datetime.datetime(1970, 1, 1)

_MAX_NUMBER: Final = float(np.finfo(np.float32).max)


def numbers_of(
    cells: Sequence[str], decimal: str = ".", thousands: str = ""
) -> tuple[np.ndarray, int | None]:
    """Returns float64 numbers, and the index of the first cell that is not a number.

    A number can have a sign, an exponent, a currency sign or `%`. `true` is 1, `false`
    is 0, and a missing number is NaN.

    Args:
      cells: texts `[rows]`.
      decimal: decimal mark.
      thousands: mark between groups of three digits, or `""`. `" "` also matches
        no-break spaces.

    Example:
      >>> numbers_of(["$1,234.50", "?", "-inf", "12 %"], thousands=",")
      (array([1234.5,    nan,   -inf,   12. ]), None)
      >>> numbers_of(["1.234,5", "x"], ",", ".")[1]
      1
    """
    return _by_text(cells, functools.partial(_number, decimal, thousands))


def seconds_of(cells: Sequence[str], date_format: str) -> tuple[np.ndarray, int | None]:
    """Returns float64 seconds since 1970, and the index of the first wrong cell.

    Times are local: a UTC offset in a cell is ignored.

    Args:
      cells: texts `[rows]`.
      date_format: one of `DATE_FORMATS` or `UNIX_FORMATS`, or `CLOCK_FORMAT` for times
        on January 1, 1970.

    Example:
      >>> seconds_of(["1970-01-01 01:00", "1970-01-01T00:01:00+05:00"], "ISO 8601")
      (array([3600.,   60.]), None)
      >>> seconds_of(["130", "2359.0", "1260"], CLOCK_FORMAT)
      (array([ 5400., 86340., 46800.]), 2)
    """
    if date_format == CLOCK_FORMAT:
        numbers, wrong = numbers_of(cells)
        hours, minutes = np.divmod(numbers, 100)
        is_wrong = (
            (numbers < 0) | (numbers > 2400) | (minutes >= 60) | (minutes % 1 > 0)
        )
        if wrong is None and is_wrong.any():
            wrong = int(is_wrong.argmax())
        return 3600 * hours + 60 * minutes, wrong
    if date_format in UNIX_FORMATS:
        numbers, wrong = numbers_of(cells)
        return numbers / UNIX_FORMATS[date_format], wrong
    return _by_text(cells, functools.partial(_seconds, date_format))


def _by_text(
    cells: Sequence[str], parse: Callable[[str], float | None]
) -> tuple[np.ndarray, int | None]:
    """Parses each distinct text. `parse` returns None for a wrong text."""
    parsed = {text: parse(text) for text in set(cells)}
    is_wrong = None in parsed.values()
    wrong = is_wrong and next(i for i, x in enumerate(cells) if parsed[x] is None)
    values = np.array([parsed[text] for text in cells], np.float64)
    return values, wrong if is_wrong else None


def _number(decimal: str, thousands: str, cell: str) -> float | None:
    text = cell.strip(_AROUND)
    if cell.strip().lower() in MISSING:
        return math.nan
    if (word := text.lower()) in _WORDS:
        return _WORDS[word]
    sign = text[:1] if text[:1] in "+-" else ""
    text = text.removeprefix(sign).lstrip(_AROUND)
    if not _pattern(decimal, thousands).fullmatch(text):
        return None
    if thousands:
        text = re.sub(_MARKS[thousands], "", text)
    number = float(sign + text.replace(decimal, "."))
    return number if abs(number) <= _MAX_NUMBER else None


@functools.cache
def _pattern(decimal: str, thousands: str) -> re.Pattern[str]:
    digits, point = "[0-9]+", _MARKS[decimal]
    if thousands:
        digits = f"(?:[1-9][0-9]{{0,2}}(?:{_MARKS[thousands]}[0-9]{{3}})+|[0-9]+)"
    return re.compile(rf"(?:{digits}{point}?[0-9]*|{point}[0-9]+)(?:[eE][+-]?[0-9]+)?")


def _seconds(date_format: str, cell: str) -> float | None:
    text = cell.strip()
    if text.lower() in MISSING:
        return math.nan
    try:
        if date_format != _ISO:
            date = datetime.datetime.strptime(text, date_format)
        elif _ISO_DATE.fullmatch(text):
            date = datetime.datetime.fromisoformat(text)
        else:
            return None
    except ValueError:
        return None
    return (date.replace(tzinfo=None) - _EPOCH).total_seconds()
