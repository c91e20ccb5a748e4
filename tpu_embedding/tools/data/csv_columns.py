"""Reads a CSV file's columns, and recognises their kinds from a sample of all rows."""

import collections
import dataclasses
import pathlib
from typing import Any, Final

import numpy as np

from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.csv_labels import LabelColumn
from tpu_embedding.tools.data.csv_schema import Column
from tpu_embedding.tools.data.csv_strings import Strings
from tpu_embedding.tools.data.csv_text import CsvBlock, find_encoding, read_blocks
from tpu_embedding.tools.data.teacher import splitmix64

SAMPLE_ROWS: Final = 10_000
"""Maximum number of sampled rows, without added cells that do not fit a kind."""

_MAX_ODD: Final = 5
"""Maximum number of cells that may change the notation of a column named by a field."""


def read_columns(
    path: pathlib.Path, source: Any
) -> tuple[Any, dict[str, Column], dict[str, np.ndarray], dict[str, Strings]]:
    """Reads the columns of a file.

    The first rows determine preliminary kinds. If a sample of all rows gives a column a
    different kind, or a cell does not fit its kind, the column is read again.

    Returns:
      The `CsvSource` with its encoding and task, and three dicts by column name: all
      columns except the label, the numbers including the labels, and the strings.
      Numbers and dates are float64 `[rows]`, as from `Column.read`. Labels are float32
      `[rows]`, NaN if missing.

    Raises:
      DataError: see `CsvSource.open`.
    """
    encoding = source.encoding or find_encoding(path)
    source = dataclasses.replace(source, encoding=encoding)
    columns: dict[str, Column] = {}
    numbers: dict[str, np.ndarray] = {}
    strings: dict[str, Strings] = {}
    odd: dict[str, list[str]] = {}
    labels, sample, made = LabelColumn(path, source.label), RowSample(), None
    is_first, changed = True, set()
    while is_first or changed:
        for block in read_blocks(
            path, source.delimiter, source.column_names, encoding=encoding
        ):
            if not columns:
                source.check_columns(path, list(block.cells))
                columns = source.columns_of(block.cells)
                changed = set(columns)
            if made is None:
                made = _Cells(source, {name: columns[name] for name in changed})
            made.add(block)
            if is_first:
                labels.add(block)
                sample.add(block.cells)
        assert made is not None  # There is at least one block.
        numbers |= made.numbers()
        strings |= made.strings
        for name, cell in made.odd.items():
            odd.setdefault(name, []).append(cell)
        sampled = {name: x + odd.get(name, []) for name, x in sample.cells.items()}
        before, columns = columns, source.columns_of(sampled, sample.rows)
        changed = {
            name
            for name, column in columns.items()
            if dataclasses.replace(before[name], because=column.because) != column
        }
        for name, error in made.errors.items():
            is_final = name not in changed or len(odd[name]) > _MAX_ODD
            if is_final and name in source.named_columns:
                raise error
        changed |= set(made.odd)
        for name in changed:
            numbers.pop(name, None)
            strings.pop(name, None)
        is_first, made = False, None
    source = dataclasses.replace(source, **labels.fields(source))
    numbers[source.label] = labels.labels(source)
    if source.task == "binary":
        labels.check_both(numbers[source.label])
    return source, columns, numbers, strings


class RowSample:
    """Cells of random rows of a file, selected by a hash of the row number.

    Attributes:
      cells: texts of each column.
      rows: row numbers, ascending.
    """

    def __init__(self):
        self.cells: dict[str, list[str]] = {}
        self.rows = np.empty(0, np.int64)
        self._num_rows, self._share = 0, 1.0

    def add(self, cells: dict[str, list[str]]) -> None:
        """Adds the next rows, then drops half of the rows while there are too many."""
        new = self._num_rows + np.arange(len(next(iter(cells.values()))))
        self._num_rows += len(new)
        kept = self._kept(new)
        for name, texts in cells.items():
            self.cells.setdefault(name, []).extend(texts[i] for i in kept)
        self.rows = np.append(self.rows, new[kept])
        while len(self.rows) > SAMPLE_ROWS:
            self._share /= 2
            kept = self._kept(self.rows)
            self.rows = self.rows[kept]
            for name, texts in self.cells.items():
                self.cells[name] = [texts[i] for i in kept]

    def _kept(self, rows: np.ndarray) -> np.ndarray:
        hashes = splitmix64(rows.astype(np.uint64))
        return np.flatnonzero(hashes < self._share * 2.0**64)


class _Cells:
    """Cells of one pass over a file: numbers, strings, and cells that do not fit.

    Attributes:
      strings: strings by column.
      odd: each column's first cell that does not fit its kind.
      errors: errors for these cells, by column.
    """

    def __init__(self, source: Any, columns: dict[str, Column]):
        self._source, self._columns = source, columns
        self._blocks: dict[str, list[np.ndarray]] = collections.defaultdict(list)
        self.odd: dict[str, str] = {}
        self.errors: dict[str, DataError] = {}
        self.strings = {
            name: Strings(source.separator if column.kind == "list" else None)
            for name, column in columns.items()
            if column.kind in ("category", "list")
        }

    def add(self, block: CsvBlock) -> None:

        def note(name: str, row: int, rule: str, fix: str) -> DataError:
            self.odd[name] = block.cells[name][row]
            return block.error(name, row, rule, fix)

        for name, column in self._columns.items():
            cells = block.cells[name]
            if name in self.odd or column.kind == "ignored":
                continue
            is_recognised = name not in self._source.named_columns
            if column.kind == "category" and is_recognised:
                if self._source.separator in "\n".join(cells):
                    self.odd[name] = self._source.separator
            if name in self.strings:
                self.strings[name].add(cells)
                continue
            try:
                values = column.read(cells, note)
                self._blocks[name].append(values)
            except DataError as error:
                self.errors[name] = error

    def numbers(self) -> dict[str, np.ndarray]:
        """Returns the numbers of each column, and frees the blocks."""
        names = list(self._blocks)
        return {name: np.concatenate(self._blocks.pop(name)) for name in names}
