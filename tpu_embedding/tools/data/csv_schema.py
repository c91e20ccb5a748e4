"""The schema that turns the cells of CSV files into inputs of a model.

`CsvClicks` creates the schema of the file that it reads. A run stores it, and encodes
rows of other files with it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, get_args

import numpy as np

from tpu_embedding.strings.string_ids import Vocabulary
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.csv_numbers import (
    CLOCK_FORMAT,
    DATE_FORMATS,
    NUMBER_MARKS,
    UNIX_FORMATS,
    numbers_of,
    seconds_of,
)
from tpu_embedding.types import PADDING_ROW_ID, FeatureIds, RaggedIds

ColumnKind = Literal["category", "list", "number", "date", "ignored"]

Inputs = tuple[dict[str, FeatureIds], dict[str, np.ndarray]]
"""Ids by feature name, int32 `[rows]`, `[rows, columns]` or `RaggedIds`, and numbers by
name, float64 `[rows]`."""

CellError = Callable[[str, int, str, str], DataError]
"""Returns the error for a cell, given column, row, rule and fix."""

DAY_SECONDS: Final = 86_400

_PARTS: Final = {"weekday": 7, "hour": 24}
"""Parts of a date that are categories, and how many values each has."""

MAX_FEATURES: Final = 64
"""Maximum number of features with one id per row that have their own tables.

If there are more, they all share one table, because a step with 400 tables takes
minutes to compile.
"""

SHARED: Final = "all columns"
"""Name of the feature that joins columns if there are more than `MAX_FEATURES`."""

_MAX_EDGES: Final = 2**12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a CSV file.

    Attributes:
      name: name of the column.
      kind: kind of the column. A category or a list becomes ids of a vocabulary. A
        number becomes the number `name` and, with edges, an id of `name (bucket)`. A
        date becomes the number `name (days)` and its bucket, and ids of
        `name (weekday)` and `name (hour)`.
      because: why the column has this kind.
      separator: text between list elements.
      decimal: decimal mark of a number.
      thousands: mark between groups of three digits of a number, or "".
      date_format: one of `DATE_FORMATS` or `UNIX_FORMATS`, or `CLOCK_FORMAT`.
      newest: date from which days are counted back, in seconds since 1970.
      parts: parts of a date that are categories, `weekday` or `hour`.
      edges: lower bounds of the buckets of a number or of days, ascending. The first
        bucket does not have one.
    """

    name: str
    kind: ColumnKind
    because: str = ""
    separator: str = "|"
    decimal: str = "."
    thousands: str = ""
    date_format: str = ""
    newest: float = 0.0
    parts: tuple[str, ...] = ()
    edges: tuple[float, ...] = ()

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, wanted = getattr(self, field.name), type(field.default)
            if field.name in ("name", "kind"):
                wanted = str
            if type(value) is not wanted:
                raise self._error(field.name, f"a {wanted.__name__}")
        if self.kind not in get_args(ColumnKind):
            raise self._error("kind", f"one of {get_args(ColumnKind)}")
        if not self.separator:
            raise self._error("separator", "at least one character")
        if (self.decimal, self.thousands) not in NUMBER_MARKS:
            raise self._error("thousands", "a mark that differs from the decimal mark")
        is_date = self.kind == "date"
        formats = (*DATE_FORMATS, *UNIX_FORMATS, CLOCK_FORMAT)
        if is_date and self.date_format not in formats:
            raise self._error("date_format", "a format of csv_numbers.DATE_FORMATS")
        if not math.isfinite(self.newest):
            raise self._error("newest", "finite")
        if self.parts not in ((), ("weekday",), ("hour",), ("weekday", "hour")):
            raise self._error("parts", f"some of {list(_PARTS)}")
        if len(self.edges) > _MAX_EDGES or not _is_rising(self.edges):
            raise self._error("edges", f"at most {_MAX_EDGES} rising finite floats")

    def _error(self, field: str, rule: str) -> ValueError:
        return ValueError(
            f"Column.{field} must be {rule}, got {getattr(self, field)!r:.80} for the "
            f"column {self.name!r:.80}. Train again to write a new schema."
        )

    @property
    def number_name(self) -> str | None:
        """Name of the column's number, or None if the column does not have one."""
        names = {"number": self.name, "date": f"{self.name} (days)"}
        return names.get(self.kind)

    def feature_sizes(self, vocabularies: Mapping[str, Vocabulary]) -> dict[str, int]:
        """Returns the number of ids of each feature of the column, by feature name."""
        sizes = {}
        if self.kind in ("category", "list"):
            sizes[self.name] = vocabularies[self.name].vocabulary_size
        if self.number_name is not None and self.edges:
            sizes[f"{self.name} (bucket)"] = len(self.edges) + 1
        if self.kind == "date":
            sizes |= {f"{self.name} ({part})": _PARTS[part] for part in self.parts}
        return sizes

    def read(self, cells: Sequence[str], error: CellError) -> np.ndarray:
        """Parses texts as numbers, or as dates in seconds since 1970.

        The result is float64 `[rows]`. NaN means missing, and numbers may be infinite.

        Raises:
          DataError: if a text is not a number, or not a date in the column's format.
        """
        if self.kind == "date":
            rule = f"must be a date in the format {self.date_format!r} or empty"
            values, wrong = seconds_of(cells, self.date_format)
        else:
            rule = "must be a number that fits in float32, or empty"
            values, wrong = numbers_of(cells, self.decimal, self.thousands)
        if wrong is not None:
            fix = f"correct it, or set data.categories={self.name}"
            raise error(self.name, wrong, rule, fix)
        return values

    def inputs(self, values: np.ndarray) -> Inputs:
        """Returns a model's inputs, given the values from `read`."""
        features: dict[str, FeatureIds] = {}
        if self.kind == "date":
            for part in self.parts:
                number = values // (DAY_SECONDS if part == "weekday" else 3600)
                number += 3 * (part == "weekday")  # 1970 started on a Thursday.
                ids = _ids(np.mod(number, _PARTS[part]))
                features[f"{self.name} ({part})"] = ids
            values = (self.newest - values) / DAY_SECONDS
        if self.edges:
            buckets = np.searchsorted(self.edges, values, side="right")
            buckets = np.where(np.isnan(values), np.nan, buckets)
            features[f"{self.name} (bucket)"] = _ids(buckets)
        numbers = np.where(np.isfinite(values), values, np.nan)
        return features, {str(self.number_name): numbers}


def _is_rising(edges: tuple[float, ...]) -> bool:
    is_finite = all(type(edge) is float and math.isfinite(edge) for edge in edges)
    return is_finite and all(x < y for x, y in zip(edges, edges[1:], strict=False))


def _ids(numbers: np.ndarray) -> np.ndarray:
    """Converts numbers to int32 ids, and NaN to `PADDING_ROW_ID`."""
    return np.where(np.isnan(numbers), PADDING_ROW_ID, np.nan_to_num(numbers)).astype(
        np.int32
    )


@dataclasses.dataclass(frozen=True)
class CsvSchema:
    """The columns of a CSV file, without its label.

    Example:
      >>> schema = CsvSchema((Column(name="age", kind="number", edges=(30.0,)),))
      >>> schema = CsvSchema.from_json(schema.to_json())
      >>> features, dense = schema.encode({"age": ["41", "30", "?"]}, {})
      >>> features["age (bucket)"].tolist(), dense["age"].tolist()
      ([1, 1, 2147483647], [41.0, 30.0, nan])
    """

    columns: tuple[Column, ...]

    def __post_init__(self):
        names = [SHARED, *(column.name for column in self.columns)]
        made = [
            f"{column.name} ({part})"
            for column in self.columns
            if column.number_name is not None
            for part in ("bucket", "days", *_PARTS)
        ]
        if len(set(names + made)) < len(names) + len(made):
            twice = next(
                name for name in names + made if (names + made).count(name) > 1
            )
            raise ValueError(
                "The columns of a CSV file and their derived features must have "
                f"different names, got {twice!r} twice. Rename the column, or set "
                "data.ignored."
            )

    @property
    def number_names(self) -> tuple[str, ...]:
        """Names of the numbers."""
        return tuple(x.number_name for x in self.columns if x.number_name is not None)

    def feature_sizes(self, vocabularies: Mapping[str, Vocabulary]) -> dict[str, int]:
        """Returns each feature's number of ids, which is its table's number of rows."""
        lists = {x.name for x in self.columns if x.kind == "list"}
        sizes: dict[str, int] = {}
        for column in self.columns:
            sizes |= column.feature_sizes(vocabularies)
        if self.sequence_lengths:
            shared = sum(sizes.pop(name) for name in set(sizes) - lists)
            sizes[SHARED] = shared
        return sizes

    @property
    def sequence_lengths(self) -> dict[str, int]:
        """Number of columns that the feature `SHARED` joins; empty if unused."""
        num = sum(
            len(x.parts) + bool(x.edges) + (x.kind == "category") for x in self.columns
        )
        return {SHARED: num} if num > MAX_FEATURES else {}

    def joined(
        self,
        features: dict[str, FeatureIds],
        vocabularies: Mapping[str, Vocabulary],
    ) -> dict[str, FeatureIds]:
        """Returns the features of a model, given the features of the columns.

        If there are more than `MAX_FEATURES` features with one id per row, they are
        joined into one feature, int32 `[rows, columns]`. The ids of each column start
        after the ids of the previous column.
        """
        if not self.sequence_lengths:
            return features
        offset, shared, rest = 0, [], dict(features)
        for column in self.columns:
            if column.kind != "list":
                for name, size in column.feature_sizes(vocabularies).items():
                    ids = np.asarray(rest.pop(name))
                    shared.append(np.where(ids == PADDING_ROW_ID, ids, ids + offset))
                    offset += size
        rest[SHARED] = np.stack(shared, axis=1).astype(np.int32)
        return rest

    def encode(
        self,
        cells: Mapping[str, Sequence[str]],
        vocabularies: Mapping[str, Vocabulary],
        error: CellError | None = None,
    ) -> Inputs:
        """Returns the model's inputs for rows of any file.

        Args:
          cells: texts `[rows]` of each column, at least one row. Other columns are
            ignored.
          vocabularies: vocabulary of each column of categories or lists.
          error: returns the error for a cell, such as `CsvBlock.error`. By default, the
            error names column and row.

        Returns:
          Features and numbers. A feature is `RaggedIds`, or int32 `[rows]` with
          `PADDING_ROW_ID` where a value is missing; `joined` may join several
          such features as `SHARED`. Strings missing from the vocabulary have the id of
          unknown strings. Numbers are float64 `[rows]`, NaN where missing or infinite.

        Raises:
          DataError: if a column is missing, or a number or a date is invalid.
        """
        columns = [column for column in self.columns if column.kind != "ignored"]
        if missing := [x.name for x in columns if x.name not in cells]:
            raise DataError(
                f"The rows must have the columns {missing}, got only {list(cells)}. "
                "Add these columns, with empty cells for unknown values."
            )

        def default_error(name: str, row: int, rule: str, fix: str) -> DataError:
            return DataError(
                f"Row {row} (from 0), column {name!r}: a value {rule}, got "
                f"{cells[name][row]!r:.80}; {fix}."
            )

        features: dict[str, FeatureIds] = {}
        dense: dict[str, np.ndarray] = {}
        for column in columns:
            name, texts = column.name, cells[column.name]
            if column.number_name is not None:
                values = column.read(texts, error or default_error)
                ids, numbers = column.inputs(values)
                features |= ids
                dense |= numbers
                continue
            strings: Any = np.array(texts, object)
            if column.kind == "list":
                lists = [x.split(column.separator) if x.strip() else [] for x in texts]
                strings = RaggedIds.from_lists(lists)
            features[name] = vocabularies[name].ids(strings)
        return self.joined(features, vocabularies), dense

    def to_json(self) -> dict[str, Any]:
        """Returns a document for `json.dumps`."""
        return {"columns": [dataclasses.asdict(column) for column in self.columns]}

    @classmethod
    def from_json(cls, document: Any) -> "CsvSchema":
        """Returns the schema of a document from `to_json`. It may be untrusted.

        Raises:
          ValueError: if the document is damaged; the message names the field.
        """
        columns = document.get("columns") if isinstance(document, dict) else None
        if not isinstance(columns, list):
            raise ValueError("A CsvSchema must be a dict with a list 'columns'.")
        known = {field.name for field in dataclasses.fields(Column)}
        made = []
        for values in columns:
            if not isinstance(values, dict) or not {"name", "kind"} <= set(values):
                raise ValueError(
                    f"A Column must be a dict with name and kind, got {values!r:.80}."
                )
            if unknown := set(values) - known:
                raise ValueError(f"Column has no fields {sorted(unknown)!r:.80}.")
            values = {
                k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
            }
            made.append(Column(**values))
        return cls(tuple(made))
