"""Reads the cells of a CSV file in blocks, and keeps columns in few bytes per cell."""

import contextlib
import csv
import dataclasses
import gzip
import io
import itertools
import math
import pathlib
import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import IO, Any, Final

import numpy as np

from tpu_embedding.strings.string_ids import Vocabulary
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.types import PADDING_ROW_ID, FeatureIds, RaggedIds

BLOCK_ROWS: Final = 10_000
"""Rows that are read at a time. The first ones tell the kinds of the columns."""


@dataclasses.dataclass(frozen=True)
class CsvBlock:
    """Consecutive rows of a file.

    Attributes:
      path: path of the file.
      lines: number of the line of each row.
      cells: texts of each column, without white space around them.
    """

    path: pathlib.Path
    lines: Sequence[int]
    cells: dict[str, list[str]]

    def error(self, name: str, row: int, rule: str, fix: str) -> DataError:
        """Returns the error of a cell that breaks a rule."""
        return DataError(
            f"{self.path}, line {self.lines[row]}, column {name!r}: a value {rule}, "
            f"got {self.cells[name][row]!r}; {fix}."
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
    except (UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} must be a CSV file in UTF-8: {error}.") from error


def read_blocks(
    path: pathlib.Path, delimiter: str | None, names: Sequence[str]
) -> Iterator[CsvBlock]:
    """Yields the rows of a file in blocks; at least one, which may have no rows.

    Args:
      path: path of the file.
      delimiter: character between the fields of a row; None: comma, tab or semicolon,
        the one that the first line has most.
      names: names of the columns; none: the first line has them.

    Raises:
      DataError: if the file is empty or damaged, names a column twice, or has a row of
        another number of fields; the message names the line.
    """
    with open_csv(path) as binary:
        file = io.TextIOWrapper(binary, encoding="utf-8-sig", newline="")
        if delimiter is None:
            first_line = next(filter(str.strip, file), "")
            delimiter = max(",\t;", key=first_line.count)
            file.seek(0)
        rows = _rows(path, file, delimiter)
        if not names:
            _, first = next(rows, (0, []))
            names = [x.strip() or f"column {i}" for i, x in enumerate(first, 1)]
        if not names:
            raise DataError(f"{path} must have rows, got an empty file.")
        if len(set(names)) < len(names):
            raise DataError(f"The columns of {path} must have different names: {names}")
        is_last = False
        while not is_last:
            lines, columns = [], [[] for _ in names]
            for line, row in itertools.islice(rows, BLOCK_ROWS):
                if len(row) != len(names):
                    raise DataError(
                        f"{path}, line {line}: a row must have the {len(names)} fields "
                        f"of the first line, got {row}; quote fields that hold "
                        f"{delimiter!r}, or set data.delimiter."
                    )
                lines.append(line)
                for column, cell in zip(columns, row, strict=True):
                    column.append(cell.strip())
            is_last = len(lines) < BLOCK_ROWS
            yield CsvBlock(path, lines, dict(zip(names, columns, strict=True)))


def _rows(
    path: pathlib.Path, file: IO[str], delimiter: str
) -> Iterator[tuple[int, list[str]]]:
    """Yields the number of each line that is not blank, and its fields.

    A quote that nothing closes would make one field of all lines up to the next quote,
    so fields must not have line breaks.
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
        limit = csv.field_size_limit()
        if rows.line_num == line and "field larger" in str(error):
            raise DataError(
                f"{path}, line {line}: a field must have at most {limit:,} characters, "
                "got more; shorten it, or set data.delimiter."
            ) from error
        raise DataError(
            f"{path}, line {line}: a field that begins with a quote must end with one "
            f"on the same line, got: {error}; remove the quote or close it, double the "
            "quotes inside, and replace line breaks by blanks; or set data.delimiter."
        ) from error


_NUMBER: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")

_MISSING: Final = frozenset(("", "na", "n/a", "nan", "null", "none", "\\n"))
"""Words for a missing number, in lower case."""

_WORDS: Final = {"true": 1.0, "false": 0.0} | dict.fromkeys(_MISSING, math.nan)

_MAX_NUMBER: Final = float(np.finfo(np.float32).max)


def are_numbers(cells: Sequence[str]) -> bool:
    """Returns True if all cells are numbers or missing, and some have a decimal point.

    Example:
      >>> are_numbers(["3.5", "4", "1e-05", "NA"])
      True
      >>> [are_numbers([cell]) for cell in ("4", "1e3", "1_0.5", "true", "inf")]
      [False, False, False, False, False]
    """
    present = [cell for cell in cells if cell.lower() not in _MISSING]
    return all(map(_NUMBER.fullmatch, present)) and any("." in x for x in present)


def are_lists(cells: Sequence[str], separator: str) -> bool:
    """Returns True if a cell has the separator, and is not a word such as `"n/a"`."""
    return any(separator in x for x in cells if x.lower() not in _MISSING)


def read_numbers(block: CsvBlock, name: str) -> np.ndarray:
    """Returns a column of numbers, float64 `[rows]`, NaN where one is missing.

    Raises:
      DataError: if a cell is neither a number of float32, nor empty, nor a word that
        stands for one or for none.
    """
    numbers = np.array([_number(cell) for cell in block.cells[name]], np.float64)
    is_wrong = np.abs(numbers) > _MAX_NUMBER
    if is_wrong.any():
        fix = f"correct it, or set data.categories={name}"
        rule = "must be a number of float32 or empty"
        raise block.error(name, int(is_wrong.argmax()), rule, fix)
    return numbers


def read_labels(
    block: CsvBlock, name: str, positive_from: float | None = None
) -> np.ndarray:
    """Returns a column of labels, float32 `[rows]`, each 0 or 1.

    Args:
      block: rows of the file.
      name: the column.
      positive_from: smallest number that becomes 1; None: the column has 0 and 1.

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


class Strings:
    """A column of strings or of lists of strings.

    It numbers the strings of each block, and keeps a hash of 64 bits and the compressed
    text of each. Python draws the key of its hashes for each process, so a file cannot
    be made to collide; among ten million strings two do with a probability of 3e-6.

    Example:
      >>> strings = Strings("|")
      >>> strings.add(["b|a", "", "b"])
      >>> number, vocabulary, ids = strings.encode(np.ones(3, bool), min_count=2)
      >>> number, vocabulary.tokens, ids.values.tolist(), ids.row_splits.tolist()
      (2, ('b',), [2, 1, 2], [0, 2, 2, 3])
    """

    def __init__(self, separator: str | None = None):
        """Begins a column.

        Args:
          separator: text between the elements of a list; None: one string per cell.
        """
        self._separator = separator
        self._lengths: list[np.ndarray] = []
        self._numbers: list[np.ndarray] = []
        self._hashes: list[np.ndarray] = []
        self._texts: list[bytes] = []

    def add(self, cells: Sequence[str]) -> None:
        """Adds cells, without white space around them."""
        if self._separator is not None:
            lists = [cell.split(self._separator) if cell else [] for cell in cells]
            self._lengths.append(np.fromiter(map(len, lists), np.int32, len(lists)))
            cells = [part.strip() for part in chain.from_iterable(lists)]
        distinct: dict[str, int] = {}
        numbers = [distinct.setdefault(cell, len(distinct)) for cell in cells]
        self._numbers.append(np.array(numbers, np.min_scalar_type(len(distinct))))
        self._hashes.append(_hashes(distinct))
        texts = "\n".join(distinct)  # Cells have no line breaks.
        self._texts.append(zlib.compress(texts.encode(), level=1))

    def encode(
        self, is_trained: np.ndarray, min_count: int
    ) -> tuple[int, Vocabulary | None, FeatureIds]:
        """Numbers the strings, the most frequent ones first; the column is then empty.

        Args:
          is_trained: bool `[rows]`, rows whose strings count.
          min_count: minimum number of occurrences of a string of the vocabulary.

        Returns:
          Number of different strings; their vocabulary, or None if none is frequent
          enough; and the ids of the rows.
        """
        row_splits = None
        if self._separator is not None:
            lengths = np.concatenate(self._lengths)
            row_splits = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            is_trained = np.repeat(is_trained, lengths)
        numbers, hashes, first_places = self._number()
        counts = np.bincount(numbers[is_trained], minlength=len(hashes))
        is_empty = hashes == hash("")
        num_strings = len(hashes) - int(is_empty.sum())
        kept = np.flatnonzero((counts >= min_count) & ~is_empty)
        if not kept.size:
            return num_strings, None, numbers
        kept = kept[np.lexsort((first_places[kept], -counts[kept]))]
        vocabulary = Vocabulary(
            self._texts_of(hashes[kept]),
            num_oov_buckets=1,
            mask_token="",
            strip_whitespace=True,
        )
        first_id = vocabulary.vocabulary_size - len(kept)
        ids = np.full(len(hashes), first_id - 1, np.int32)
        ids[is_empty] = PADDING_ROW_ID
        ids[kept] = first_id + np.arange(len(kept), dtype=np.int32)
        values = ids[numbers]
        if row_splits is None:
            return num_strings, vocabulary, values
        return num_strings, vocabulary, RaggedIds(values=values, row_splits=row_splits)

    def _number(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Numbers the strings of all blocks in the order of their hashes.

        Returns:
          int32 number of each string; and by number its hash, and a place that orders
          the numbers by first occurrence.
        """
        ends = np.cumsum([len(hashes) for hashes in self._hashes])
        hashes = np.concatenate(self._hashes)
        order = np.argsort(hashes, kind="stable")
        hashes = hashes[order]
        is_first = np.ones(len(hashes), bool)
        np.not_equal(hashes[1:], hashes[:-1], out=is_first[1:])
        of_blocks = np.empty(len(hashes), np.int32)
        of_blocks[order] = np.cumsum(is_first, dtype=np.int32) - np.int32(1)
        parts = zip(np.split(of_blocks, ends[:-1]), self._numbers, strict=True)
        numbers = np.concatenate([of_block[part] for of_block, part in parts])
        self._hashes.clear()
        self._numbers.clear()
        return numbers, hashes[is_first], order[is_first]

    def _texts_of(self, hashes: np.ndarray) -> list[str]:
        """Returns the strings that have some hashes."""
        order = np.argsort(hashes)
        rising, texts = hashes[order], np.empty(len(hashes), object)
        for compressed in self._texts:
            of_block = zlib.decompress(compressed).decode().split("\n")
            found = _hashes(of_block)
            places = np.minimum(np.searchsorted(rising, found), len(rising) - 1)
            is_new = (rising[places] == found) & np.equal(texts[order[places]], None)
            texts[order[places[is_new]]] = np.array(of_block, object)[is_new]
        return texts.tolist()


def _hashes(strings: Collection[str]) -> np.ndarray:
    return np.fromiter(map(hash, strings), np.int64, len(strings))


def _number(cell: str) -> float:
    """Returns a number, NaN for a missing one, and infinity for another text."""
    if _NUMBER.fullmatch(cell):
        return float(cell)
    return _WORDS.get(cell.lower(), math.inf)
