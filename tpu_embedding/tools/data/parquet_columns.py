"""Columns of Parquet files: their declaration, checks, and conversion to NumPy arrays.

`parquet_rows.py` reads the files. pyarrow is needed only once a file is opened.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.zipf import MAX_VOCABULARY_SIZE


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParquetFeature:
    """A column of ids.

    Attributes:
      name: name of the feature.
      vocabulary_size: rows of its table.
      column: name of the column; None is the feature's name.
      expected_valence: None for a column of integers, one id per row. For a column of
        lists of integers, the mean number of ids per row. The compile report sizes its
        buffers by it; the training takes lists of any length.
      out_of_range: `"error"` refuses ids outside `[0, vocabulary_size)`, with file and
        row. `"keep"` leaves them to `FeatureConfig.out_of_range_ids`.
    """

    name: str
    vocabulary_size: int
    column: str | None = None
    expected_valence: float | None = None
    out_of_range: Literal["error", "keep"] = "error"

    def __post_init__(self):
        problems = []
        if not 1 <= self.vocabulary_size <= MAX_VOCABULARY_SIZE:
            problems.append(
                f"ParquetFeature.vocabulary_size must lie in [1, {MAX_VOCABULARY_SIZE}]"
                f", got {self.vocabulary_size!r}"
            )
        valence = self.expected_valence
        if valence is not None and not 0 < valence < float("inf"):
            problems.append(
                "ParquetFeature.expected_valence must be positive, or None for a "
                f"column of integers, got {valence!r}"
            )
        if self.out_of_range not in ("error", "keep"):
            problems.append(
                "ParquetFeature.out_of_range must be 'error' or 'keep', got "
                f"{self.out_of_range!r}"
            )
        if problems:
            raise ValueError("; ".join(problems) + f" (feature {self.name!r}).")

    @property
    def source_column(self) -> str:
        """Name of the column."""
        return self.column or self.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListColumn:
    """The lists of a row group.

    Attributes:
      values: integers of all lists, in order.
      row_splits: int64 `[rows + 1]`; row `i` owns
        `values[row_splits[i]:row_splits[i + 1]]`.
    """

    values: np.ndarray
    row_splits: np.ndarray

    def take(self, runs: Sequence[slice]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the values and the lengths of runs of rows."""
        splits = self.row_splits
        values = [self.values[splits[r.start] : splits[r.stop]] for r in runs]
        lengths = [np.diff(splits[r.start : r.stop + 1]) for r in runs]
        return np.concatenate(values), np.concatenate(lengths)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowGroupPlace:
    """A row group, for errors.

    Attributes:
      path: path of the file.
      number: number of the row group in the file.
      first_row: first row of the group, counted from 0 in the file.
    """

    path: str
    number: int
    first_row: int

    def error(self, column: str, row: int, text: str) -> DataError:
        """Returns the error of a value.

        Args:
          column: name of the column.
          row: number of the row in the row group.
          text: rule, and the value got.
        """
        return DataError(
            f"{self.path}, row {self.first_row + row} (row group {self.number}), "
            f"column {column!r}: {text}."
        )


def check_type(path: str, schema: Any, column: str, kind: str) -> None:
    """Refuses a column that is missing, or of another type.

    Args:
      path: path of the file, for errors.
      schema: Arrow schema of the file.
      column: name of the column.
      kind: `"integers"`, `"lists"` of integers, or `"numbers"`.

    Raises:
      DataError: if the column does not fit.
    """
    import pyarrow.types as types

    if column not in schema.names:
        raise DataError(
            f"{path} has no column {column!r}; it has {', '.join(schema.names)}."
        )
    found = schema.field(column).type
    is_list = any(
        is_kind(found)
        for is_kind in (types.is_list, types.is_large_list, types.is_fixed_size_list)
    )
    fits = {
        "integers": types.is_integer(found),
        "lists": is_list and types.is_integer(found.value_type),
        "numbers": types.is_integer(found)
        or types.is_floating(found)
        or types.is_boolean(found),
    }[kind]
    if not fits:
        rule = {
            "integers": "integers, as the feature has no expected_valence",
            "lists": "lists of integers, as the feature has an expected_valence",
            "numbers": "integers, floating-point numbers or booleans",
        }[kind]
        raise DataError(f"{path}, column {column!r}: it must hold {rule}, got {found}.")


def read_numbers(array: Any, column: str, place: RowGroupPlace) -> np.ndarray:
    """Returns a column of numbers as NumPy array.

    Raises:
      DataError: if a value is null.
    """
    if array.null_count:
        row = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
        raise place.error(
            column, row, "a value must not be null; fill it, or drop the row"
        )
    return array.to_numpy(zero_copy_only=False)


def read_ids(
    array: Any, feature: ParquetFeature, place: RowGroupPlace
) -> np.ndarray | ListColumn:
    """Returns a column of ids: int32 `[rows]`, or lists. A null list is an empty one.

    Args:
      array: Arrow array of the row group.
      feature: declaration of the column.
      place: place of the row group, for errors.

    Raises:
      DataError: if another value is null, or an id is no row of the table.
    """
    column = feature.source_column
    if feature.expected_valence is None:
        ids = read_numbers(array, column, place)
        return _check_range(ids, np.arange(len(ids) + 1), feature, place)
    import pyarrow.compute

    compute: Any = pyarrow.compute  # whose functions are made when it is imported
    lengths = compute.list_value_length(array).fill_null(0).to_numpy()
    row_splits = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    values = compute.list_flatten(array)
    if values.null_count:
        index = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
        raise place.error(
            column, _row_of(index, row_splits), "an id in a list must not be null"
        )
    ids = values.to_numpy(zero_copy_only=False)
    return ListColumn(
        values=_check_range(ids, row_splits, feature, place), row_splits=row_splits
    )


def _check_range(
    ids: np.ndarray,
    row_splits: np.ndarray,
    feature: ParquetFeature,
    place: RowGroupPlace,
) -> np.ndarray:
    """Returns the ids as int32 if each is a row of the table; refuses others."""
    size = feature.vocabulary_size
    if not len(ids) or (ids.min() >= 0 and ids.max() < size):
        return ids.astype(np.int32, copy=False)
    is_outside = (ids < 0) | (ids >= size)
    if feature.out_of_range == "keep":
        return ids
    index = int(np.argmax(is_outside))
    raise place.error(
        feature.source_column,
        _row_of(index, row_splits),
        f"an id of the feature {feature.name!r} must lie in [0, {size}), got "
        f"{ids[index]}, and {int(is_outside.sum())} such ids in the row group; correct "
        "the data, or set ParquetFeature.out_of_range to 'keep'",
    )


def _row_of(index: int, row_splits: np.ndarray) -> int:
    """Returns the row that owns a value."""
    return int(np.searchsorted(row_splits, index, side="right")) - 1
