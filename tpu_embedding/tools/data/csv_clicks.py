"""Clicks of a CSV file, whose columns are recognised from its first rows."""

import array
import contextlib
import csv
import dataclasses
import gzip
import io
import math
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import IO, Any, Final, Literal

import numpy as np

from tpu_embedding.field_checks import Rule, broken_rules, raise_all
from tpu_embedding.plan.memory import format_table
from tpu_embedding.strings.string_ids import Vocabulary
from tpu_embedding.tools.data.batch import Batch, DataError, rows_of_batches
from tpu_embedding.tools.data.block_dataset import BlockDataset
from tpu_embedding.tools.data.random_streams import splitmix64
from tpu_embedding.tools.data.source import check_counts, required_files
from tpu_embedding.types import FeatureIds, RaggedIds

Kind = Literal["label", "category", "number", "list", "ignored"]

FIRST_ROWS: Final = 10_000
"""Rows from which the kinds of the columns are recognised."""

_WORDS: Final = {"true": 1.0, "false": 0.0} | dict.fromkeys(
    ("", "na", "n/a", "nan", "null", "none", "\\n"), math.nan
)
"""Words that are numbers, in lower case; NaN stands for a missing one."""

_MAX_NUMBER: Final = float(np.finfo(np.float32).max)

_RULES: Final = {
    "held_out": Rule(lambda x: 0 < x < 1, "between 0 and 1"),
    "separator": Rule(bool, "a text of a character or more"),
}


class CsvClicks(BlockDataset):
    """The rows of a CSV file in memory, in a random order in each epoch.

    Features: int32 `[batch]` for a column of categories, `RaggedIds` for one of lists.
    An empty cell looks up nothing, and so does an empty element of a list. Dense: a
    dict with a float `[batch]` for each column of numbers, NaN where one is missing.

    Attributes:
      vocabularies: vocabulary of each feature. Strings that fewer than
        `CsvSource.min_count` training rows have share the id of unknown ones.
      vocabulary_sizes: rows of its table.
      number_scales: mean and standard deviation over the training rows of each column
        of numbers, on the scale of `signed_log`.
      description: a line about the rows, and a table of the columns.
    """

    def __init__(
        self, table: "_Table", source: "CsvSource", *, batch_size: int, seed: int
    ):
        """Encodes the columns.

        Args:
          table: cells of the file.
          source: kinds of columns, and the choice of the held-out rows.
          batch_size: samples per batch.
          seed: seed of the order, and of the held-out rows.
        """
        labels = table.labels(source)
        is_held_out = source.is_held_out(len(labels), seed)
        features: dict[str, FeatureIds] = {}
        numbers: dict[str, np.ndarray] = {}
        self.vocabularies: dict[str, Vocabulary] = {}
        shown = [("column", "kind", "distinct values", "table rows")]
        for name, cells in table.cells.items():
            kind = source.kind_of(name, cells)
            distinct, size = len(set(cells) - {""}), "-"
            if kind == "number":
                numbers[name] = table.numbers(name)
            elif kind in ("category", "list"):
                separator = source.separator if kind == "list" else None
                distinct, vocabulary, ids = _encode(
                    cells, separator, ~is_held_out, source.min_count
                )
                size = "none: no value repeats"
                if vocabulary is not None:
                    self.vocabularies[name], features[name] = vocabulary, ids
                    size = f"{vocabulary.vocabulary_size:,}"
            shown.append((name, kind, f"{distinct:,}", size))
        if not features:
            raise DataError(
                f"{table.path} must have a category that occurs {source.min_count} "
                "times; lower data.min_count, or name its column by data.categories."
            )
        self.vocabulary_sizes = {
            name: v.vocabulary_size for name, v in self.vocabularies.items()
        }
        self.number_scales = {
            name: _scale(values[~is_held_out]) for name, values in numbers.items()
        }
        self.description = (
            f"{table.path.name}: {len(labels):,} rows, {is_held_out.sum():,} of them "
            f"held out; {labels.mean():.1%} of the labels are 1\n"
            f"{format_table(shown, num_left_aligned=2)}\n"
            "change a kind by --set data.categories=COLUMN, data.numbers, data.lists "
            "or data.ignored"
        )
        weights = np.ones(len(labels), np.float32)
        columns = Batch(
            features=features, dense=numbers or None, labels=labels, weights=weights
        )
        super().__init__(
            _Rows(columns, np.flatnonzero(~is_held_out)),
            batch_size=batch_size,
            evaluation_reader=_Rows(columns, np.flatnonzero(is_held_out)),
            seed=seed,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CsvSource:
    """Source of `CsvClicks`: a CSV file whose first line names the columns.

    Columns that are named in no field are recognised from the first rows: numbers with
    a decimal point are numbers, cells with the separator are lists, and all others,
    integers and texts, are categories.

    Attributes:
      label: name of the column of labels, 0 or 1.
      positive_from: smallest number in the label's column that counts as 1, for
        ratings; smaller ones count as 0. None: the column holds 0 and 1.
      categories: columns of categories, one string or integer per row.
      numbers: columns of numbers.
      lists: columns of several categories per row.
      ignored: columns that the model does not see.
      separator: text between the elements of a list.
      delimiter: text between the fields of a row; None: comma, tab or semicolon, the
        one that the first line has most.
      column_names: names of the columns, if the first line is a row already.
      min_count: occurrences in the training rows that a string needs for a table row
        of its own.
      held_out: share of the rows that are held out for the evaluation.
      split: `"random"` holds out random rows, by a hash of the row's number and the
        seed; `"last"` the last ones of the file.
    """

    label: str
    positive_from: float | None = None
    categories: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    separator: str = "|"
    delimiter: str | None = None
    column_names: tuple[str, ...] = ()
    min_count: int = 2
    held_out: float = 0.1
    split: Literal["random", "last"] = "random"

    def __post_init__(self):
        check_counts(self)
        raise_all(broken_rules(self, _RULES))
        named = [name for names in self._names_of_kinds().values() for name in names]
        if len(set(named)) < len(named):
            raise ValueError(
                f"CsvSource must name a column for one kind, got {sorted(named)}."
            )

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> CsvClicks:
        """Reads the file, and returns the data set.

        Args:
          data_dir: path of the file, in UTF-8, compressed if it ends with `.gz`. Each
            row is one line; blank lines do not count. Columns without a name get that
            of their place, as `column 1`.
          batch_size: samples per batch, over all devices.
          seed: seed of the order, and of the choice of held-out rows.

        Raises:
          DataError: if the file is missing, empty or damaged, a column is missing, or a
            cell breaks the rule of its column; the message names the line.
        """
        path = required_files(data_dir, "a CSV file")
        table = _Table.read(path, self)
        return CsvClicks(table, self, batch_size=batch_size, seed=seed)

    def outline(self, *, batch_size: int, seed: int) -> CsvClicks:
        """Refuses: only the file tells the sizes of the tables."""
        raise DataError(
            "A CSV file tells the sizes of its tables only when it is read; to compile "
            "for a slice, write a config with a ParquetSource, which declares them."
        )

    def kind_of(self, name: str, cells: Sequence[str]) -> Kind:
        """Returns the kind of a column: the one that a field names, or recognises it.

        Args:
          name: name of the column.
          cells: its cells.

        Example:
          >>> source = CsvSource(label="click", numbers=("age",))
          >>> [source.kind_of("", x) for x in (["3.5", "4"], ["a|b", "c"], ["3", "4"])]
          ['number', 'list', 'category']
          >>> source.kind_of("age", ["3", "4"])
          'number'
        """
        for kind, names in self._names_of_kinds().items():
            if name in names:
                return kind
        first = cells[:FIRST_ROWS]
        present = [c for c in first if not math.isnan(_word(c) or 0)]
        if any(self.separator in cell for cell in present):
            return "list"
        is_integer = [cell.removeprefix("-").isdecimal() for cell in present]
        is_number = not all(is_integer) and all(map(_is_number, present))
        return "number" if is_number else "category"

    def _names_of_kinds(self) -> dict[Kind, tuple[str, ...]]:
        return {
            "label": (self.label,),
            "category": self.categories,
            "number": self.numbers,
            "list": self.lists,
            "ignored": self.ignored,
        }

    def check_columns(self, path: pathlib.Path, names: Sequence[str]) -> None:
        """Refuses names of columns that a file lacks, and a file that repeats one."""
        if len(set(names)) < len(names):
            raise DataError(f"The columns of {path} must have different names: {names}")
        for kind, wanted in self._names_of_kinds().items():
            if missing := [name for name in wanted if name not in names]:
                raise DataError(
                    f"{path} has no column {missing[0]!r} for a {kind}, but {names}; "
                    "name one of them by --label or --set, or, if these are values, "
                    'all columns by --set data.column_names="NAME NAME".'
                )

    def is_held_out(self, num_rows: int, seed: int) -> np.ndarray:
        """Returns bool `[rows]`, True for the rows of the evaluation.

        Raises:
          DataError: if all rows are, or none is.
        """
        places = 1 - np.arange(num_rows) / num_rows
        if self.split == "random":
            start = splitmix64(np.full(1, seed, np.uint64))
            hashes = splitmix64(start ^ np.arange(num_rows, dtype=np.uint64))
            places = hashes / 2.0**64
        is_held_out = places <= self.held_out
        if is_held_out.all() or not is_held_out.any():
            raise DataError(
                f"data.held_out={self.held_out} must leave rows to train and to "
                f"evaluate, got {num_rows} rows; give more, or change it."
            )
        return is_held_out


@dataclasses.dataclass(frozen=True)
class _Table:
    """The cells of a file.

    Attributes:
      path: path of the file.
      cells: texts of each column. Equal texts are one object, so a cell takes 8 bytes.
      lines: number of the line of each row.
    """

    path: pathlib.Path
    cells: dict[str, list[str]]
    lines: Sequence[int]

    @classmethod
    def read(cls, path: pathlib.Path, source: CsvSource) -> "_Table":
        lines, shared = array.array("q"), {}
        with open_csv(path) as binary:
            file = io.TextIOWrapper(binary, encoding="utf-8-sig", newline="")
            delimiter = source.delimiter
            if delimiter is None:
                first_line = next(filter(str.strip, file), "")
                delimiter = max(",\t;", key=first_line.count)
                file.seek(0)
            rows = _rows(path, file, delimiter)
            names = list(source.column_names)
            if not names:
                _, first = next(rows, (0, []))
                names = [x.strip() or f"column {i}" for i, x in enumerate(first, 1)]
            if not names:
                raise DataError(f"{path} must have rows, got an empty file.")
            source.check_columns(path, names)
            columns: list[list[str]] = [[] for _ in names]
            for line, row in rows:
                if len(row) != len(names):
                    raise DataError(
                        f"{path}, line {line}: a row must have the {len(names)} fields "
                        f"of the first line, got {row}; quote fields that hold "
                        f"{delimiter!r}, or set data.delimiter."
                    )
                lines.append(line)
                for column, cell in zip(columns, row, strict=True):
                    column.append(shared.setdefault(cell, cell))
        return cls(path, dict(zip(names, columns, strict=True)), lines)

    def numbers(self, name: str, way_out: str | None = None) -> np.ndarray:
        """Returns a column of numbers, float64 `[rows]`, NaN where one is missing.

        Args:
          name: the column.
          way_out: what to do about a cell that is no number, for the error.
        """
        cells = self.cells[name]
        if not all(map(_is_number, cells)):
            wrong = [_is_number(cell) for cell in cells].index(False)
            way_out = way_out or f"correct it, or set data.categories={name}"
            raise self._error(
                name, wrong, "must be a number of float32 or empty", way_out
            )
        pairs = zip(cells, map(_word, cells), strict=True)
        return np.array([float(x) if word is None else word for x, word in pairs])

    def labels(self, source: CsvSource) -> np.ndarray:
        """Returns the labels, float32 `[rows]`."""
        name, minimum = source.label, source.positive_from
        labels = self.numbers(name, "write 0 and 1, or name another column by --label")
        if minimum is not None:
            labels = np.where(np.isnan(labels), np.nan, labels >= minimum)
        is_label = np.isin(labels, (0, 1))
        if not is_label.all():
            way_out = (
                "drop the row; for ratings, set data.positive_from=4, which makes 4 "
                "and more a 1; to predict numbers, write a config with the loss "
                "squared_error"
            )
            wrong = int(np.argmin(is_label))
            raise self._error(name, wrong, "must be 0 or 1", way_out)
        if len(np.unique(labels)) < 2:
            raise DataError(
                f"{self.path}, column {name!r}: the labels of {len(labels)} rows must "
                "hold both 0 and 1; give rows of both kinds."
            )
        return labels.astype(np.float32)

    def _error(self, name: str, row: int, rule: str, way_out: str) -> DataError:
        return DataError(
            f"{self.path}, line {self.lines[row]}, column {name!r}: a value {rule}, "
            f"got {self.cells[name][row]!r}; {way_out}."
        )


@contextlib.contextmanager
def open_csv(path: pathlib.Path) -> Iterator[IO[bytes]]:
    """Opens a CSV file, compressed if its name ends with `.gz`.

    Raises:
      DataError: if the file cannot be read.
    """
    opens: Any = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with opens(path, "rb") as file:
            yield file
    except (TypeError, UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} must be a CSV file in UTF-8: {error}.") from error


def _rows(
    path: pathlib.Path, file: IO[str], delimiter: str
) -> Iterator[tuple[int, list[str]]]:
    """Yields the number of each line that is not blank, and its fields.

    A quote that nothing closes would make one field of all lines up to the next quote,
    so fields with line breaks are refused.
    """
    rows = csv.reader(file, delimiter=delimiter, skipinitialspace=True, strict=True)
    line = 1
    try:
        for row in rows:
            if rows.line_num > line:
                raise csv.Error("a field of several lines")
            if row:
                yield line, row
            line += 1
    except csv.Error as error:
        raise DataError(
            f"{path}, line {line}: a field that begins with a quote must end with one "
            f"on the same line, got: {error}; remove the quote or close it, double the "
            "quotes inside, and replace line breaks by blanks; or set data.delimiter."
        ) from error


def _encode(
    cells: Sequence[str],
    separator: str | None,
    is_trained: np.ndarray,
    min_count: int,
) -> tuple[int, Vocabulary | None, FeatureIds]:
    """Numbers the strings of a column, the most frequent ones first.

    Args:
      cells: cells of the column.
      separator: text between the elements of a list; None: one string per cell.
      is_trained: bool `[rows]`, rows whose strings count.
      min_count: minimum number of occurrences of a string of the vocabulary.

    Returns:
      Number of different strings; their vocabulary, or None if none is frequent
      enough; and the ids of the rows.
    """
    row_splits = None
    if separator is not None:
        lists = [cell.split(separator) if cell else [] for cell in cells]
        row_splits = np.cumsum([0, *map(len, lists)])
        cells = [part.strip() for part in chain.from_iterable(lists)]
        is_trained = np.repeat(is_trained, np.diff(row_splits))
    numbers: dict[str, int] = {}
    found = [numbers.setdefault(cell, len(numbers)) for cell in cells]
    ids, strings = np.array(found, np.int32), np.array(list(numbers), object)
    counts = np.bincount(ids[is_trained], minlength=len(strings))
    order = np.argsort(-counts, kind="stable")
    order = order[(counts[order] >= min_count) & (strings[order] != "")]
    num_strings = len(numbers.keys() - {""})
    if not order.size:
        return num_strings, None, ids
    vocabulary = Vocabulary(strings[order], num_oov_buckets=1, mask_token="")
    ids = vocabulary.ids(strings)[ids]
    if row_splits is not None:
        return num_strings, vocabulary, RaggedIds(values=ids, row_splits=row_splits)
    return num_strings, vocabulary, ids


class _Rows:
    """A `SampleReader` of some rows of the columns; each row is a block."""

    def __init__(self, columns: Batch, rows: np.ndarray):
        self._columns, self._rows = columns, rows
        self.block_bounds = np.arange(len(rows) + 1)

    def read(self, samples: np.ndarray) -> Batch:
        return rows_of_batches([(self._columns, self._rows[samples])])


def signed_log(values: Any, xp: Any = np) -> Any:
    """Returns `sign(x) * log(1 + |x|)`, which keeps the order and shortens tails.

    Args:
      values: array of numbers.
      xp: module of the array, `numpy` or `jax.numpy`.

    Example:
      >>> signed_log(np.array([0.0, -1.0])).round(3).tolist()
      [0.0, -0.693]
    """
    return xp.sign(values) * xp.log1p(xp.abs(values))


def _scale(values: np.ndarray) -> tuple[float, float]:
    """Returns mean and standard deviation of the numbers that are not missing."""
    scaled = signed_log(values[~np.isnan(values)])
    if not scaled.size or not scaled.std() > 0:
        return 0.0, 1.0
    return float(scaled.mean()), float(scaled.std())


def _word(cell: str) -> float | None:
    """Returns the number that a word stands for, None if it is no such word."""
    return _WORDS.get(cell.strip().lower())


def _is_number(cell: str) -> bool:
    """Returns True for a finite float32, and for the words of one or of none."""
    try:
        return _word(cell) is not None or abs(float(cell)) <= _MAX_NUMBER
    except ValueError:
        return False
