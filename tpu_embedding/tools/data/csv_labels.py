"""Labels of a CSV file: the task that they define, and their numbers."""

import dataclasses
import math
import pathlib
import re
from typing import Any, Final, Literal

import numpy as np

from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.csv_numbers import MISSING
from tpu_embedding.tools.data.csv_text import CsvBlock, find_encoding, read_blocks

NUMBER: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")

Task = Literal["binary", "classes", "regression"]

MAX_INTEGER_CLASSES: Final = 20
"""Maximum number of distinct integers that are classes; more make a regression."""

MAX_CLASSES: Final = 1000

_POSITIVE: Final = frozenset(
    "1 true yes y t positive pos on good click clicked".split()
)


class LabelColumn:
    """The cells of the label column, numbered by value.

    `1` and `1.0` are the same value, and so are `true` and `True`. If 0 or 1 occurs,
    `true` is 1 and `false` is 0. Missing cells are skipped.

    Attributes:
      values: dict from key to value in its first spelling. All spellings of a value
        share a key.
    """

    def __init__(self, path: pathlib.Path, name: str):

        self._path, self._name = path, name
        self._key_of_cell: dict[str, int] = {}
        self._first_lines: dict[str, int] = {}
        self._numbers: list[np.ndarray] = []
        self._keys: dict[str, int] = {}
        self.values: dict[str, str] = {}

    def add(self, block: CsvBlock) -> None:
        """Adds the rows of a block."""
        cells, known = block.cells[self._name], self._key_of_cell
        for line, cell in zip(block.lines, cells, strict=True):
            if cell not in known:
                key = _key(cell)
                known[cell] = -1 if not key else self._keys.setdefault(key, len(known))
                if key:
                    self.values.setdefault(key, cell)
                    self._first_lines.setdefault(key, line)
        self._numbers.append(np.fromiter(map(known.get, cells), np.int32, len(cells)))

    def fields(self, source: Any) -> dict[str, Any]:
        """Returns a `CsvSource`'s `task`, `positive` and `classes` for these labels.

        Fields that are set in the `CsvSource` take precedence.

        Raises:
          DataError: if the labels do not determine what to predict.
        """
        keys, task = self._merged(), source.task
        if source.positive_from is not None:
            return {"task": "binary", "positive": None, "classes": ()}
        if task is not None and (source.positive is not None or source.classes):
            return {}  # Already known, perhaps from another file.
        if source.positive is not None:
            task = "binary"
        elif len(keys) < 2:
            raise self._error(
                f"the labels of {sum(map(len, self._numbers)):,} rows must have two "
                f"different values, got {list(self.values.values())}",
                "add rows with another label, or name another column with --label",
            )
        others = [key for key in keys if not NUMBER.fullmatch(key)]
        has_many = len(keys) > MAX_INTEGER_CLASSES
        if task is None and len(keys) == 2:
            task = "binary"
        elif task is None and not others:
            has_fractions = any(not float(key).is_integer() for key in keys)
            task = "regression" if has_fractions or has_many else "classes"
        if task == "regression" or (
            task is None and has_many and len(others) <= 0.1 * len(keys)
        ):
            if others:
                raise self._error(
                    f"a label must be a number like the rest, got "
                    f"{self._text(others[0])!r}",
                    "correct it or leave it empty, or set data.task=classes",
                    line=self._first_lines[others[0]],
                )
            return {"task": "regression", "positive": None, "classes": ()}
        if task == "binary":
            return self._binary_fields(source, keys)
        if len(keys) > MAX_CLASSES:
            raise self._error(
                f"the labels must have at most {MAX_CLASSES:,} classes, got "
                f"{len(keys):,} such as {self._text((others or keys)[0])!r}",
                "name another column with --label, or one class with --positive",
            )
        rising = sorted(keys, key=float) if not others else sorted(keys)
        classes = tuple(source.classes) or tuple(map(self._text, rising))
        return {"task": "classes", "positive": None, "classes": classes}

    def _binary_fields(self, source: Any, keys: list[str]) -> dict[str, Any]:
        """Returns the fields for two values, or for one value against the rest."""
        positive = source.positive
        if positive is None:
            if len(keys) != 2:
                raise self._error(
                    f"data.task=binary needs two label values, got {len(keys):,}",
                    "choose one with --positive",
                )
            positive = self._text(self._default_positive(keys))
        if _key(positive) not in keys:
            some = list(self.values.values())[:20]
            raise self._error(
                f"the labels must include the positive value {positive!r}, got {some}",
                "choose one of them with --positive",
            )
        negative = [self._text(key) for key in keys if key != _key(positive)]
        classes = (*negative, positive) if len(negative) == 1 else ()
        return {"task": "binary", "positive": positive, "classes": classes}

    def _default_positive(self, keys: list[str]) -> str:
        """Returns the positive value's key; see `CsvSource`."""
        if all(map(NUMBER.fullmatch, keys)):
            return max(keys, key=float)
        first, second = sorted(keys)
        for key, other in ((first, second), (second, first)):
            if key.lower() in _POSITIVE and other.lower() not in _POSITIVE:
                return key
            if key.startswith(">") and other.startswith("<"):
                return key
        numbers = np.concatenate(self._numbers)
        counts = [np.sum(numbers == self._keys[key]) for key in (first, second)]
        return first if counts[0] < counts[1] else second

    def labels(self, source: Any) -> np.ndarray:
        """Returns the labels, float32 `[rows]`, NaN for missing cells.

        `source` has the `fields` of this column, or of another file's column.

        Raises:
          DataError: if a value is not a number or not one of the classes, as the task
            requires.
        """
        keys = self._merged()
        classes = {_key(value): i for i, value in enumerate(source.classes)}
        if source.positive is not None:
            positive = _key(source.positive)
            classes = dict.fromkeys(classes or keys, 0) | {positive: 1}
        by_number = np.full(1 + max(self._keys.values(), default=0), np.nan, np.float64)
        for spelled, number in self._keys.items():
            key = spelled if spelled in keys else _WORDS[spelled]
            label = _float(key) if source.positive_from is not None else None
            if source.task == "regression":
                label = _float(key)
            elif label is None:
                label = classes.get(key, math.inf)
            if not abs(label) < 1e18:
                rule = f"must be one of {list(source.classes)[:20]}"
                if source.task == "regression" or source.positive_from is not None:
                    rule = "must be a number of at most 1e18"
                raise self._error(
                    f"a label {rule}, got {self.values[spelled]!r}",
                    "correct it, leave it empty to drop the row, or name another "
                    "column with --label",
                    line=self._first_lines[spelled],
                )
            if source.positive_from is not None:
                label = label >= source.positive_from
            by_number[number] = label
        by_number = np.append(by_number, np.nan).astype(np.float32)  # If missing.
        return by_number[np.concatenate(self._numbers)]

    def check_both(self, labels: np.ndarray) -> None:
        """Raises a DataError if the labels of a binary task lack 0 or 1."""
        present = labels[~np.isnan(labels)]
        if len(np.unique(present)) < 2:
            raise self._error(
                f"the labels of {len(present)} rows must include both 0 and 1",
                "add rows of both kinds, or change data.positive or positive_from",
            )

    def _merged(self) -> list[str]:
        """Returns the keys; if 0 or 1 is among them, 1 and 0 replace true and false."""
        has_numbers = not self.values.keys().isdisjoint(("0", "1"))
        keys = [_WORDS.get(key, key) if has_numbers else key for key in self.values]
        return list(dict.fromkeys(keys))

    def _text(self, key: str) -> str:
        return self.values.get(key, key)

    def _error(self, rule: str, fix: str, line: int | None = None) -> DataError:
        place = f", line {line}" if line is not None else ""
        return DataError(f"{self._path}{place}, column {self._name!r}: {rule}; {fix}.")


_WORDS: Final = {"true": "1", "false": "0"}


def read_label_fields(path: pathlib.Path, source: Any) -> tuple[Any, float]:
    """Reads the labels of a file.

    Returns:
      The `CsvSource` with `task`, `positive` and `classes`, and the standard deviation
      of the labels.
    """
    encoding = source.encoding or find_encoding(path)
    source = dataclasses.replace(source, encoding=encoding)
    column = LabelColumn(path, source.label)
    for block in read_blocks(
        path, source.delimiter, source.column_names, encoding=encoding
    ):
        source.check_columns(path, list(block.cells))
        column.add(block)
    source = dataclasses.replace(source, **column.fields(source))
    labels = column.labels(source)
    if source.task == "binary":
        column.check_both(labels)
    return source, float(np.nanstd(labels, dtype=np.float64))


def describe_labels(source: Any, labels: np.ndarray) -> str:
    """Returns a phrase that describes what a model predicts."""
    if source.task == "regression":
        return (
            f"regression: {source.label} from {labels.min():g} to {labels.max():g}, "
            f"mean {labels.mean():g}, deviation {labels.std():g}"
        )
    if source.task == "classes":
        counts = np.bincount(labels.astype(int), minlength=len(source.classes))
        shown = [
            f"{name!r} {count / len(labels):.1%}"
            for name, count in zip(source.classes, counts, strict=True)
        ]
        rest = ", ..." if len(shown) > 10 else ""
        return f"{len(shown)} classes of {source.label}: {', '.join(shown[:10])}{rest}"
    value = f"= {source.positive!r}"
    if source.positive_from is not None:
        value = f">= {source.positive_from:g}"
    return f"predicts {source.label} {value} ({labels.mean():.1%} of the rows)"


def _key(cell: str) -> str:
    """Returns the same text for all spellings of a value, or "" if it is missing."""
    if NUMBER.fullmatch(cell):
        return repr(float(cell) + 0.0).removesuffix(".0")  # -0.0 becomes 0.
    lower = cell.lower()
    return "" if lower in MISSING else lower if lower in _WORDS else cell


def _float(key: str) -> float:
    return float(key) if NUMBER.fullmatch(key) else math.inf
