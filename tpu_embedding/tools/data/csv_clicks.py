"""Clicks of a CSV file, whose columns are recognised from a sample of its rows.

Cells are read in blocks, and columns take few bytes per cell.
"""

import dataclasses
import itertools
import math
import pathlib
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

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
from tpu_embedding.tools.data.csv_columns import read_columns
from tpu_embedding.tools.data.csv_labels import Task, describe_labels
from tpu_embedding.tools.data.csv_numbers import MISSING
from tpu_embedding.tools.data.csv_recognition import (
    fitted,
    named_date,
    number_marks,
    recognise,
)
from tpu_embedding.tools.data.csv_schema import Column, ColumnKind, CsvSchema
from tpu_embedding.tools.data.csv_strings import Strings
from tpu_embedding.tools.data.teacher import splitmix64
from tpu_embedding.types import PADDING_ROW_ID, FeatureIds, RaggedIds


def _is_encoding(name: str | None) -> bool:
    try:
        "".encode(name or "utf-8")
    except (LookupError, ValueError):
        return False
    return True


_RULES: Final = {
    "task": Rule(
        lambda x: x in (None, *typing.get_args(Task)),
        f"one of {typing.get_args(Task)} or None",
    ),
    "encoding": Rule(_is_encoding, "the name of an encoding, such as cp1252, or None"),
    "held_out": Rule(lambda x: 0 < x < 1, "between 0 and 1"),
    "separator": Rule(bool, "at least one character"),
    "delimiter": Rule(
        lambda x: x is None or (x and not set(x) & set('"\r\n')),
        "a text without quotes and line breaks, or None",
    ),
}


_FIELDS_OF_KINDS: Final[dict[ColumnKind, str]] = {
    "category": "categories",
    "number": "numbers",
    "date": "dates",
    "list": "lists",
    "ignored": "ignored",
}


class CsvClicks(BlockDataset):
    """The rows of a CSV file in memory, in a random order in each epoch.

    Features and dense inputs have the form that `CsvSchema.encode` returns. An empty
    cell looks up nothing, and neither does an empty list element.

    Attributes:
      schema: how the columns become features and numbers.
      vocabularies: vocabulary of each column of categories or lists. Strings in fewer
        than `CsvSource.min_count` training rows share the id of unknown strings.
      vocabulary_sizes: number of rows of each feature's table.
      sequence_lengths: number of columns of each feature that joins several columns.
      number_scales: dict from the name of a number to four values: mean and standard
        deviation of its `signed_log` over the training rows, then mean and standard
        deviation of the number itself.
      num_classes: number of classes of the label, or None for other tasks.
      label_scale: for a regression, mean and standard deviation of the training labels;
        otherwise None.
      description: lines about the rows and the task, and a table of the columns.
    """

    def __init__(
        self, path: pathlib.Path, source: "CsvSource", *, batch_size: int, seed: int
    ):
        """Reads the file, and encodes its columns; see `CsvSource.open`."""
        source, columns, numbers, strings = read_columns(path, source)
        labels = numbers.pop(source.label)
        is_labelled = ~np.isnan(labels)
        num_labels = int(is_labelled.sum())
        is_held_out = np.zeros_like(is_labelled)
        is_held_out[is_labelled] = source.is_held_out(num_labels, seed)
        is_trained = is_labelled & ~is_held_out
        self.num_classes, self.label_scale = None, None
        if source.task == "classes":
            self.num_classes = len(source.classes)
        elif source.task == "regression":
            trained = labels[is_trained].astype(np.float64)
            self.label_scale = float(trained.mean()), float(trained.std()) or 1.0
        self._labels = labels[is_trained], labels[is_held_out]
        features, dense, lines = self._encode(
            source, columns, numbers, strings, labels, is_trained, is_held_out
        )
        if not features:
            raise DataError(
                f"{path} must have a number that varies, or a category that occurs "
                f"{source.min_count} times. Lower data.min_count, or name the column "
                "in data.categories."
            )
        self.schema = CsvSchema(tuple(columns.values()))
        self.vocabulary_sizes = self.schema.feature_sizes(self.vocabularies)
        self.sequence_lengths = self.schema.sequence_lengths
        features = self.schema.joined(features, self.vocabularies)
        self.number_scales = {
            name: _scale(values[is_trained]) for name, values in dense.items()
        }
        heading = [
            f"{path.name}: {num_labels:,} rows, {is_held_out.sum():,} of them held out",
            describe_labels(source, labels[is_labelled]),
        ]
        if source.encoding not in (None, "utf-8"):
            heading.append(f"read as {source.encoding}; data.encoding changes this")
        if num_labels < len(labels):
            heading.append(f"dropped {len(labels) - num_labels:,} rows without a label")
        self.description = "\n".join([*heading, *lines])
        weights = np.ones(len(labels), np.float32)
        rows = Batch(
            features=features, dense=dense or None, labels=labels, weights=weights
        )
        super().__init__(
            _Rows(rows, np.flatnonzero(is_trained)),
            batch_size=batch_size,
            evaluation_reader=_Rows(rows, np.flatnonzero(is_held_out)),
            seed=seed,
        )

    def _encode(
        self,
        source: "CsvSource",
        columns: dict[str, Column],
        numbers: dict[str, np.ndarray],
        strings: dict[str, Strings],
        labels: np.ndarray,
        is_trained: np.ndarray,
        is_held_out: np.ndarray,
    ) -> tuple[dict[str, FeatureIds], dict[str, np.ndarray], list[str]]:
        """Encodes the columns, frees their cells, and sets the vocabularies.

        Updates `columns` from the training rows: adds bucket edges, and ignores columns
        without a repeated value.

        Returns:
          Ids by feature, numbers by name, and description lines about the columns.
        """
        features: dict[str, FeatureIds] = {}
        dense: dict[str, np.ndarray] = {}
        self.vocabularies: dict[str, Vocabulary] = {}
        shown = [("column", "kind", "distinct values", "table rows", "recognised by")]
        warnings: list[str] = []
        for name, column in columns.items():
            distinct = "-"
            if name in numbers:
                values = numbers.pop(name)
                distinct = f"{len(np.unique(values[~np.isnan(values)])):,}"
                columns[name] = column = fitted(column, values, is_trained)
                ids_by_name, scalars = column.inputs(values)
                features |= ids_by_name
                dense |= scalars
            elif name in strings:
                num_strings, vocabulary, ids = strings.pop(name).encode(
                    is_trained, source.min_count
                )
                distinct = f"{num_strings:,}"
                if vocabulary is None:
                    because = f"no value occurs {source.min_count} times"
                    column = dataclasses.replace(
                        column, kind="ignored", because=because
                    )
                    columns[name] = column
                else:
                    self.vocabularies[name], features[name] = vocabulary, ids
                    warnings += _rare_strings(name, ids, vocabulary)
            sizes = column.feature_sizes(self.vocabularies)
            warnings += _giveaways(sizes, features, labels, is_trained, is_held_out)
            size = " + ".join(f"{size:,}" for size in sizes.values()) or "-"
            shown.append((name, column.kind, distinct, size, column.because))
        shown.append((source.label, "label", "-", "-", "data.label"))
        lines = [format_table(shown, num_left_aligned=2), *warnings]
        fix = "data.categories=COLUMN, or data.numbers, dates, lists or ignored"
        return features, dense, [*lines, f"change a kind with --set {fix}"]

    def constant_loss(self) -> float:
        """Returns the held-out loss of the best constant prediction.

        For a regression, it is the RMSE of predicting the mean of the training labels.
        For classes, it is the log loss of predicting the class shares of the training
        rows.
        """
        trained, held_out = self._labels
        if self.num_classes is None:
            return float(np.sqrt(np.mean((held_out - trained.mean(dtype=float)) ** 2)))
        # A class that occurs only in held-out rows counts as half a row.
        counts = np.bincount(trained.astype(int), minlength=self.num_classes)
        counts = np.maximum(counts, 0.5)
        shares = counts / counts.sum()
        return float(-np.log(shares[held_out.astype(int)]).mean())


@dataclasses.dataclass(frozen=True, kw_only=True)
class CsvSource:
    """Source of `CsvClicks`: a CSV file whose first line names the columns.

    Cells and list elements are stripped of white space. If no field names a column, its
    kind is recognised from rows throughout the file. A column contains lists if any
    cell has the separator, and numbers or dates if all cells are numbers or dates. All
    other columns are categories, and so are integers that have few distinct values or
    identify something.

    The label selects the task. Two values make a binary task. The positive value is the
    one that means yes (`1`, `true`, `yes`, `y`, `positive`, `>50K`), or else the
    greater number, or else the rarer text. Numbers with fractions, or more than 20
    integers, make a regression. All other labels are classes. Rows without a label are
    dropped.

    Attributes:
      label: name of the column of labels.
      task: task to train for: `"binary"`, `"classes"` or `"regression"`. By default, it
        is recognised from the labels.
      positive: label value that counts as 1; all other values count as 0.
      classes: label values, in the order of the model's outputs. Defaults to all values
        in the file.
      positive_from: smallest label that counts as 1, for ratings; smaller labels count
        as 0.
      categories: columns of categories, one string or integer per row.
      numbers: columns of numbers in any notation; `true` is 1, and `false` is 0.
      dates: columns of dates or times in any notation.
      lists: columns of several categories per row.
      ignored: columns that the model does not see.
      separator: text between list elements.
      delimiter: text between the fields of a row. By default, the one of comma, tab,
        semicolon, `|`, `::` and space that splits the first lines into equal numbers of
        fields. A space matches any number of spaces.
      encoding: encoding of the file. By default, UTF-8, UTF-16 or Windows' Latin-1 is
        detected.
      column_names: names of the columns, if the first line is already a row.
      min_count: number of times that a string must occur in the training rows to get
        its own table row.
      held_out: share of the rows held out for evaluation.
      split: `"random"` holds out random rows, selected by a hash of the row number and
        the seed. `"last"` holds out the last rows of the file.
    """

    label: str
    task: Task | None = None
    positive: str | None = None
    classes: tuple[str, ...] = ()
    positive_from: float | None = None
    categories: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    dates: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    separator: str = "|"
    delimiter: str | None = None
    encoding: str | None = None
    column_names: tuple[str, ...] = ()
    min_count: int = 2
    held_out: float = 0.1
    split: Literal["random", "last"] = "random"

    def __post_init__(self):
        check_counts(self)
        raise_all(broken_rules(self, _RULES))
        named = [*itertools.chain(*self._names_of_kinds().values())]
        if len(set(named)) < len(named):
            raise ValueError(
                f"CsvSource must name each column only once, got {sorted(named)}."
            )

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> CsvClicks:
        """Reads the file, and returns the data set.

        The file is decompressed if its name ends with `.gz`. Blank lines are skipped. A
        column without a name is named after its position, such as `column 1`. `seed`
        selects the order and the held-out rows.

        Raises:
          DataError: if the file is missing, empty or damaged, a column is missing, or a
            cell breaks its column's rule. The message names the line.
        """
        path = required_files(data_dir, "a CSV file")
        return CsvClicks(path, self, batch_size=batch_size, seed=seed)

    def outline(self, *, batch_size: int, seed: int) -> CsvClicks:
        """Raises a DataError, because the tables' sizes depend on the file."""
        raise DataError(
            "The table sizes of a CSV file are known only after reading it. To compile "
            "for a slice, write a config with a ParquetSource, which declares them."
        )

    def columns_of(
        self, cells: Mapping[str, Sequence[str]], rows: np.ndarray | None = None
    ) -> dict[str, Column]:
        """Returns all columns except the label, as named in fields or recognised.

        Args:
          cells: some cells of each column.
          rows: row numbers of the cells, ascending. By default, they are consecutive.

        Example:
          >>> source = CsvSource(label="click", numbers=("age",))
          >>> columns = source.columns_of({"price": ["3.5", "4"], "age": ["3", "4"]})
          >>> [(column.kind, column.because) for column in columns.values()]
          [('number', 'numbers'), ('number', 'data.numbers')]
        """
        columns = recognise(cells, self.separator, rows)
        columns.pop(self.label, None)
        for kind, field in _FIELDS_OF_KINDS.items():
            for name in getattr(self, field):
                texts = {x for x in cells[name] if x.lower() not in MISSING}
                if kind == "date":
                    columns[name] = named_date(name, texts)
                    continue
                decimal, thousands = [*number_marks(texts), (".", "")][0]
                columns[name] = Column(
                    name=name,
                    kind=kind,
                    because=f"data.{field}",
                    separator=self.separator,
                    decimal=decimal,
                    thousands=thousands,
                )
        return columns

    @property
    def named_columns(self) -> frozenset[str]:
        """Columns named in fields, including the label."""
        return frozenset(itertools.chain(*self._names_of_kinds().values()))

    def _names_of_kinds(self) -> dict[str, tuple[str, ...]]:
        named = {kind: getattr(self, field) for kind, field in _FIELDS_OF_KINDS.items()}
        return {"label": (self.label,), **named}

    def check_columns(self, path: pathlib.Path, names: Sequence[str]) -> None:
        """Raises a DataError if a file lacks a column."""
        for kind, wanted in self._names_of_kinds().items():
            if missing := [name for name in wanted if name not in names]:
                raise DataError(
                    f"{path} has no column {missing[0]!r} for a {kind}, only {names}. "
                    "Name one of them with --label or --set. If these are values, name "
                    'all columns with --set data.column_names="NAME NAME".'
                )

    def is_held_out(self, num_rows: int, seed: int) -> np.ndarray:
        """Returns bool `[rows]`, True for held-out rows.

        Raises:
          DataError: if all rows or no rows are held out.
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
                f"evaluate, got {num_rows} rows. Add rows, or change held_out."
            )
        return is_held_out


def _rare_strings(name: str, ids: FeatureIds, vocabulary: Vocabulary) -> list[str]:
    """Returns a warning if most strings have the id of unknown strings."""
    values = np.asarray(ids.values if isinstance(ids, RaggedIds) else ids)
    values = values[values != PADDING_ROW_ID]
    is_unknown = values < vocabulary.vocabulary_size - len(vocabulary.tokens)
    if not values.size or is_unknown.mean() <= 0.5:
        return []
    return [
        f"warning: {is_unknown.mean():.0%} of the values of {name!r} share the row of "
        "unknown strings, because so few repeat; set data.ignored or data.numbers"
    ]


def _giveaways(
    sizes: Mapping[str, int],
    features: Mapping[str, FeatureIds],
    labels: np.ndarray,
    is_trained: np.ndarray,
    is_held_out: np.ndarray,
) -> list[str]:
    """Returns a warning for each feature that predicts labels of 0 and 1 on its own.

    A feature's score for a row is the smoothed mean label of all training rows that
    have the same id.
    """
    if not np.isin(labels[is_trained | is_held_out], (0, 1)).all():
        return []
    mean = labels[is_trained].mean()
    warnings = []
    for name, size in sizes.items():
        ids = features[name]
        if isinstance(ids, RaggedIds):
            continue
        ids = np.where(ids == PADDING_ROW_ID, size, ids)
        trained, held_out = ids[is_trained], ids[is_held_out]
        counts = np.bincount(trained, minlength=size + 1)
        sums = np.bincount(trained, labels[is_trained], minlength=size + 1)
        scores = ((sums + mean) / (counts + 1))[held_out]
        auc = _auc(scores, labels[is_held_out])
        if auc > 0.99:
            warnings.append(
                f"warning: {name!r} alone predicts the held-out labels, AUC {auc:.3f}; "
                "if it is known only after the label, set data.ignored"
            )
    return warnings


def _auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Returns the AUC, or NaN with fewer than five positive or negative labels."""
    _, places = np.unique(scores, return_inverse=True)
    positive = np.bincount(places, labels)
    negative = np.bincount(places) - positive
    if min(positive.sum(), negative.sum()) < 5:
        return math.nan
    below = np.cumsum(negative) - negative / 2
    return float(positive @ below / positive.sum() / negative.sum())


class _Rows:
    """A `SampleReader` of selected rows; each row is a block."""

    def __init__(self, columns: Batch, rows: np.ndarray):
        self._columns, self._rows = columns, rows
        self.block_bounds = np.arange(len(rows) + 1)

    def read(self, samples: np.ndarray) -> Batch:
        return join_samples([self._columns], [self._rows[samples]])


def signed_log(values: Any, xp: Any = np) -> Any:
    """Returns `sign(x) * log(1 + |x|)`, which keeps the order and shortens tails.

    `xp` is the array's module, `numpy` or `jax.numpy`.

    Example:
      >>> signed_log(np.array([0.0, -1.0])).round(3).tolist()
      [0.0, -0.693]
    """
    return xp.sign(values) * xp.log1p(xp.abs(values))


def _scale(values: np.ndarray) -> tuple[float, ...]:
    """Returns mean and standard deviation of the logarithms, then of the numbers.

    Missing numbers are ignored. If there are no two distinct numbers, each mean is 0
    and each standard deviation is 1.
    """
    present, scales = values[~np.isnan(values)], []
    for scaled in (signed_log(present), present):
        if scaled.size and scaled.std() > 0:
            scales += [float(scaled.mean()), float(scaled.std())]
        else:
            scales += [0.0, 1.0]
    return tuple(scales)
