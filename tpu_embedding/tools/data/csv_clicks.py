"""Clicks of a CSV file, whose columns are recognised from its first rows.

Cells are read in blocks, and columns keep few bytes per cell.
"""

import collections
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
from typing import IO, Any, Final, Literal

import numpy as np

from tpu_embedding.argument_checks import Rule, broken_rules, raise_all
from tpu_embedding.plan.memory import format_table
from tpu_embedding.strings.string_ids import Vocabulary
from tpu_embedding.tools.data.batch import (
    Batch,
    DataError,
    check_counts,
    join_samples,
    required_files,
)
from tpu_embedding.tools.data.block_dataset import BlockDataset
from tpu_embedding.tools.data.teacher import splitmix64
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
      delimiter: character between the fields of a row. By default, it is the one of
        comma, tab and semicolon that the first line has most.
      names: names of the columns. If there are none, the first line has them.

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
            names = [name.strip() or f"column {i}" for i, name in enumerate(first, 1)]
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
          separator: text between the elements of a list. By default, each cell is one
            string.
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
            cells = [
                element.strip() for element in itertools.chain.from_iterable(lists)
            ]
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
        numbers, hashes, first_places = self._number_strings()
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

    def _number_strings(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Numbers the strings of all blocks in the order of their hashes.

        Returns:
          int32 number of each string; and by number its hash, and a place that orders
          the numbers by first occurrence.
        """
        block_ends = np.cumsum([len(hashes) for hashes in self._hashes])
        hashes = np.concatenate(self._hashes)
        order = np.argsort(hashes, kind="stable")
        hashes = hashes[order]
        is_first = np.ones(len(hashes), bool)
        np.not_equal(hashes[1:], hashes[:-1], out=is_first[1:])
        # The number of each string that is distinct within its block.
        new_numbers = np.empty(len(hashes), np.int32)
        new_numbers[order] = np.cumsum(is_first, dtype=np.int32) - np.int32(1)
        blocks = zip(np.split(new_numbers, block_ends[:-1]), self._numbers, strict=True)
        numbers = np.concatenate([renumbered[old] for renumbered, old in blocks])
        self._hashes.clear()
        self._numbers.clear()
        return numbers, hashes[is_first], order[is_first]

    def _texts_of(self, hashes: np.ndarray) -> list[str]:
        """Returns the strings that have some hashes."""
        order = np.argsort(hashes)
        rising, texts = hashes[order], np.empty(len(hashes), object)
        for compressed in self._texts:
            block = zlib.decompress(compressed).decode().split("\n")
            block_hashes = _hashes(block)
            places = np.searchsorted(rising, block_hashes)
            places = np.minimum(places, len(rising) - 1)
            is_wanted = rising[places] == block_hashes
            is_wanted &= np.equal(texts[order[places]], None)  # Not in earlier blocks.
            texts[order[places[is_wanted]]] = np.array(block, object)[is_wanted]
        return texts.tolist()


def _hashes(strings: Collection[str]) -> np.ndarray:
    return np.fromiter(map(hash, strings), np.int64, len(strings))


def _number(cell: str) -> float:
    """Returns a number, NaN for a missing one, and infinity for another text."""
    if _NUMBER.fullmatch(cell):
        return float(cell)
    return _WORDS.get(cell.lower(), math.inf)


Kind = Literal["label", "category", "number", "list", "ignored"]

_RULES: Final = {
    "held_out": Rule(lambda x: 0 < x < 1, "between 0 and 1"),
    "separator": Rule(bool, "a text of a character or more"),
    "delimiter": Rule(
        lambda x: x is None or (len(x) == 1 and x not in ' "\r\n'),
        "one character other than a blank, a quote and a line break, or None",
    ),
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
        self, path: pathlib.Path, source: "CsvSource", *, batch_size: int, seed: int
    ):
        """Reads the file, and encodes its columns.

        Args:
          path: path of the file.
          source: kinds of the columns, and choice of the held-out rows.
          batch_size: samples per batch.
          seed: seed of the order, and of the held-out rows.
        """
        kinds, numbers, strings = _read_columns(path, source)
        is_held_out = source.is_held_out(len(numbers[source.label]), seed)
        features: dict[str, FeatureIds] = {}
        self.vocabularies: dict[str, Vocabulary] = {}
        shown = [("column", "kind", "distinct values", "table rows")]
        for name, kind in kinds.items():
            distinct, size = "-", "-"
            if name in numbers:
                values = numbers[name]
                distinct = f"{len(np.unique(values[~np.isnan(values)])):,}"
            elif name in strings:
                num_strings, vocabulary, ids = strings.pop(name).encode(
                    ~is_held_out, source.min_count
                )
                distinct, size = f"{num_strings:,}", "none: no value repeats"
                if vocabulary is not None:
                    self.vocabularies[name], features[name] = vocabulary, ids
                    size = f"{vocabulary.vocabulary_size:,}"
            shown.append((name, kind, distinct, size))
        if not features:
            raise DataError(
                f"{path} must have a category that occurs {source.min_count} "
                "times; lower data.min_count, or name its column by data.categories."
            )
        labels = numbers.pop(source.label)
        self.vocabulary_sizes = {
            name: v.vocabulary_size for name, v in self.vocabularies.items()
        }
        self.number_scales = {
            name: _scale(values[~is_held_out]) for name, values in numbers.items()
        }
        self.description = (
            f"{path.name}: {len(labels):,} rows, {is_held_out.sum():,} of them "
            f"held out; {labels.mean():.1%} of the labels are 1\n"
            f"{format_table(shown, num_left_aligned=2)}\n"
            "change a kind by --set data.categories=COLUMN, data.numbers, data.lists "
            "or data.ignored"
        )
        weights = np.ones(len(labels), np.float32)
        rows = Batch(
            features=features, dense=numbers or None, labels=labels, weights=weights
        )
        super().__init__(
            _Rows(rows, np.flatnonzero(~is_held_out)),
            batch_size=batch_size,
            evaluation_reader=_Rows(rows, np.flatnonzero(is_held_out)),
            seed=seed,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CsvSource:
    """Source of `CsvClicks`: a CSV file whose first line names the columns.

    White space around a cell or an element of a list does not count. Columns that are
    named in no field are recognised from the first rows. Cells with the separator are
    lists. A column is one of numbers if all its cells are numbers, and some of them
    have a decimal point: ASCII digits, with a sign and an exponent if you like. All
    others are categories: texts, integers, `true` and `false`, `1e3`, `10_24`. A label
    and a column named in `numbers` may also have the words `true`, for 1, and `false`.

    Attributes:
      label: name of the column of labels, 0 or 1.
      positive_from: smallest number in the label's column that counts as 1, for
        ratings; smaller ones count as 0. By default, the column holds 0 and 1.
      categories: columns of categories, one string or integer per row.
      numbers: columns of numbers.
      lists: columns of several categories per row.
      ignored: columns that the model does not see.
      separator: text between the elements of a list.
      delimiter: character between the fields of a row. By default, it is the one of
        comma, tab and semicolon that the first line has most.
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
        return CsvClicks(path, self, batch_size=batch_size, seed=seed)

    def outline(self, *, batch_size: int, seed: int) -> CsvClicks:
        """Raises a DataError: only the file tells the sizes of the tables."""
        raise DataError(
            "A CSV file tells the sizes of its tables only when it is read; to compile "
            "for a slice, write a config with a ParquetSource, which declares them."
        )

    def kind_of(self, name: str, cells: Sequence[str]) -> Kind:
        """Returns the kind of a column: the one that a field names, or recognises it.

        Args:
          name: name of the column.
          cells: first cells of the column.

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
        present = [cell for cell in cells if cell.lower() not in _MISSING]
        if any(self.separator in cell for cell in present):
            return "list"
        has_numbers = all(map(_NUMBER.fullmatch, present))
        has_points = any("." in cell for cell in present)
        return "number" if has_numbers and has_points else "category"

    def _names_of_kinds(self) -> dict[Kind, tuple[str, ...]]:
        return {
            "label": (self.label,),
            "category": self.categories,
            "number": self.numbers,
            "list": self.lists,
            "ignored": self.ignored,
        }

    def check_columns(self, path: pathlib.Path, names: Sequence[str]) -> None:
        """Raises a DataError if a file lacks a column."""
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


def _read_columns(
    path: pathlib.Path, source: CsvSource
) -> tuple[dict[str, Kind], dict[str, np.ndarray], dict[str, Strings]]:
    """Returns the kind of each column, numbers and labels, and strings, by column.

    Numbers are float64 `[rows]`, and labels float32 `[rows]`.
    """
    kinds: dict[str, Kind] = {}
    strings: dict[str, Strings] = {}
    blocks: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    for block in read_blocks(path, source.delimiter, source.column_names):
        if not kinds:
            source.check_columns(path, list(block.cells))
            kinds = {name: source.kind_of(name, x) for name, x in block.cells.items()}
            for name, kind in kinds.items():
                if kind in ("category", "list"):
                    strings[name] = Strings(
                        source.separator if kind == "list" else None
                    )
        for name, kind in kinds.items():
            if name in strings:
                strings[name].add(block.cells[name])
            elif kind == "label":
                labels = read_labels(block, name, source.positive_from)
                blocks[name].append(labels)
            elif kind == "number":
                blocks[name].append(read_numbers(block, name))
    # A column's blocks are freed before the next column is joined.
    numbers = {name: np.concatenate(blocks.pop(name)) for name in list(blocks)}
    labels = numbers[source.label]
    if len(np.unique(labels)) < 2:
        raise DataError(
            f"{path}, column {source.label!r}: the labels of {len(labels)} rows must "
            "hold both 0 and 1; give rows of both kinds."
        )
    return kinds, numbers, strings


class _Rows:
    """A `SampleReader` of some rows of the columns; each row is a block."""

    def __init__(self, columns: Batch, rows: np.ndarray):
        self._columns, self._rows = columns, rows
        self.block_bounds = np.arange(len(rows) + 1)

    def read(self, samples: np.ndarray) -> Batch:
        return join_samples([self._columns], [self._rows[samples]])


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
