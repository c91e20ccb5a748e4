"""Reads Parquet files that may be larger than memory, with one column per feature.

The training order shuffles row groups, the smallest parts that can be read separately.
Only a few decoded row groups stay in memory.
"""

import contextlib
import dataclasses
import functools
import importlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import numpy as np

from tpu_embedding.argument_checks import about
from tpu_embedding.extras import require_extra
from tpu_embedding.tools.data.batch import (
    Batch,
    DataError,
    check_counts,
    join_samples,
    required_files,
)
from tpu_embedding.tools.data.block_dataset import BlockDataset, SampleReader
from tpu_embedding.types import PADDING_ROW_ID, RaggedIds


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParquetFeature:
    """A Parquet column with feature ids.

    Attributes:
      name: feature name.
      vocabulary_size: number of table rows.
      column: column name. Defaults to the feature name.
      expected_valence: mean number of ids per row, for a column with lists of integers.
        The compile report sizes buffers with this mean, but training accepts lists with
        any length. Leave it out if the column has one integer per row.
      out_of_range: how to handle ids outside `[0, vocabulary_size)`. `"error"` raises
        an error that names the file and the row. `"modulo"` takes ids modulo
        `vocabulary_size`. `"keep"` lets `FeatureConfig.out_of_range_ids` decide; all
        ids are then int64, or uint64 if the column is uint64.

    Example:
      >>> ParquetFeature(name="user", vocabulary_size=1000, column="uid").column_name
      'uid'
    """

    name: str
    vocabulary_size: int
    column: str | None = None
    expected_valence: float | None = None
    out_of_range: Literal["error", "modulo", "keep"] = "error"

    def __post_init__(self):
        check_counts(self)

    @property
    def column_name(self) -> str:
        """Column name in the files."""
        return self.column or self.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowGroup:
    """A row group in a Parquet file, with at least one row.

    Attributes:
      path: file that contains the group.
      number: position among all row groups in the file, from 0.
      first_row: number of the group's first row, counted from 0 in the file.
      num_rows: number of rows in the group.

    Example:
      >>> path = pathlib.Path("clicks.parquet")
      >>> group = RowGroup(path=path, number=1, first_row=100, num_rows=50)
      >>> print(group.error("user", 3, "an id must not be null"))
      clicks.parquet, row 103 (row group 1), column 'user': an id must not be null.
    """

    path: pathlib.Path
    number: int
    first_row: int
    num_rows: int

    def read(self, names: Sequence[str]) -> dict[str, Any]:
        """Reads columns into a dict from name to Arrow array.

        Raises:
          DataError: if the row group is damaged.
        """
        parquet = load_pyarrow("pyarrow.parquet")
        with _data_errors(f"{self.path}, row group {self.number},"):
            # By default, pyarrow ignores page checksums.
            with parquet.ParquetFile(
                self.path, page_checksum_verification=True
            ) as file:
                table = file.read_row_group(self.number, columns=list(names))
            table = table.combine_chunks()
        return {name: table.column(name).chunk(0) for name in names}

    def numbers(self, array: Any, column: str) -> np.ndarray:
        """Converts a column to NumPy. Nulls and non-numeric types raise a DataError."""
        # `to_numpy` would turn nulls into NaN.
        if array.null_count:
            row = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
            text = "a value must not be null; fill it, or drop the row"
            raise self.error(column, row, text)
        numbers = array.to_numpy(zero_copy_only=False)
        if numbers.dtype.kind not in "biuf":
            raise self.error(column, 0, f"values must be numbers, got {array.type}")
        return numbers

    def error(self, column: str, row: int, text: str) -> DataError:
        """Builds the error for a value; `row` counts from the group's first row."""
        row += self.first_row
        where = f"{self.path}, row {row} (row group {self.number}), column {column!r}"
        return about(DataError(f"{where}: {text}."), where)


class ParquetRows:
    """A `SampleReader` for all rows in one or more files."""

    def __init__(self, paths: Sequence[pathlib.Path], source: "ParquetSource"):
        self._source, self._paths = source, paths
        names = source.column_names
        self._groups = [group for path in paths for group in row_groups(path, names)]
        if not self._groups:
            raise DataError(f"{paths[0]} must have rows, but has none.")
        self.block_bounds = np.cumsum([0, *(group.num_rows for group in self._groups)])
        # A batch mixes `num_streams` row groups. If one of them ends within the batch,
        # the batch also needs the next one.
        self._decoded = functools.lru_cache(source.num_streams + 1)(self._decode)
        self._array_types: dict[str, tuple[Any, ...]] = {}

    def read(self, samples: np.ndarray) -> Batch:
        groups = np.searchsorted(self.block_bounds, samples, side="right") - 1
        rows = samples - self.block_bounds[groups]
        # Consecutive samples from the same row group are taken together.
        breaks = np.flatnonzero(np.diff(groups)) + 1
        run_groups = groups[np.append(0, breaks)].tolist()
        batches = [self._decoded(number) for number in run_groups]
        return join_samples(batches, np.split(rows, breaks))

    def _decode(self, number: int) -> Batch:
        source, group = self._source, self._groups[number]
        arrays = group.read(source.column_names)

        def numbers(column: str) -> np.ndarray:
            return group.numbers(arrays[column], column).astype(np.float32)

        dense = [numbers(name) for name in source.dense]
        features = {}
        for feature in source.features:
            column = feature.column_name
            ids = _read_ids(arrays[column], feature, group)
            # A batch joins ids from several row groups, and NumPy would join int64 and
            # uint64 arrays as floats.
            is_ragged = isinstance(ids, RaggedIds)
            kind = (ids.values.dtype,) if is_ragged else (ids.dtype, ids.shape[1:])
            if self._array_types.setdefault(column, kind) != kind:
                text = "a column must have the same type in all files, here it is"
                raise group.error(column, 0, f"{text} {arrays[column].type}")
            features[feature.name] = ids
        labels, weights = numbers(source.label), np.ones(group.num_rows, np.float32)
        if source.weight is not None:
            weights = numbers(source.weight)
        return Batch(
            features=features,
            dense=np.stack(dense, axis=1) if dense else None,
            labels=labels,
            weights=weights,
        )

    def __str__(self) -> str:
        return f"{self._paths[0]} to {self._paths[-1]}"


def row_groups(path: pathlib.Path, columns: Sequence[str]) -> list[RowGroup]:
    """Lists the nonempty row groups in a file.

    The file must have the given columns.

    Raises:
      DataError: if the file is missing, is damaged or lacks a column, or if pyarrow is
        not installed.

    Example:
      With a file `clicks.parquet`::

          for group in row_groups(pathlib.Path("clicks.parquet"), ["user"]):
              users = group.numbers(group.read(["user"])["user"], "user")
    """
    with _data_errors(str(path)):
        footer = load_pyarrow("pyarrow.parquet").read_metadata(path)
        names = footer.schema.to_arrow_schema().names
    for column in columns:
        if column not in names:
            raise DataError(f"{path} has no column {column!r}; it has {names}.")
    lengths = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
    first_rows = np.cumsum([0, *lengths]).tolist()
    return [
        RowGroup(path=path, number=i, first_row=first_rows[i], num_rows=length)
        for i, length in enumerate(lengths)
        if length
    ]


def load_pyarrow(module: str) -> Any:
    """Imports a pyarrow module, such as `"pyarrow.csv"`, or raises a DataError."""
    require_extra("parquet", "pyarrow", purpose="This data set", error=DataError)
    return importlib.import_module(module)


@contextlib.contextmanager
def _data_errors(owner: str) -> Iterator[None]:
    """Turns pyarrow errors into a `DataError` that begins with `owner`."""
    pyarrow = load_pyarrow("pyarrow")
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        text = str(error).splitlines()[0].rstrip(".")
        raise DataError(
            f"{owner} is missing, damaged or not a Parquet file: {text}. Download or "
            "write it again."
        ) from error


def _read_ids(
    array: Any, feature: ParquetFeature, group: RowGroup
) -> np.ndarray | RaggedIds:
    if hasattr(array.type, "value_type") != (feature.expected_valence is not None):
        rule = "integers without expected_valence, or lists of integers with it"
        text = f"values must be {rule}, got {array.type}"
        raise group.error(feature.column_name, 0, text)
    if feature.expected_valence is None:
        return _check_ids(array, np.arange(len(array) + 1), feature, group)
    compute = load_pyarrow("pyarrow.compute")
    # A null list may contain values. `list_flatten` skips them, unlike `array.values`,
    # so the list must count as empty.
    lengths = compute.list_value_length(array).fill_null(0).to_numpy()
    row_splits = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    values = _check_ids(compute.list_flatten(array), row_splits, feature, group)
    if hasattr(array.type, "list_size"):
        shape = (len(array), array.type.list_size)
        matrix = np.full(shape, PADDING_ROW_ID, values.dtype)
        is_list = array.is_valid().to_numpy(zero_copy_only=False)
        matrix[is_list] = values.reshape(-1, array.type.list_size)
        return matrix
    return RaggedIds(values=values, row_splits=row_splits)


def _check_ids(
    values: Any, row_splits: np.ndarray, feature: ParquetFeature, group: RowGroup
) -> np.ndarray:
    """Converts ids to int32, or to int64 or uint64 if out-of-range ids are kept."""
    column, size = feature.column_name, feature.vocabulary_size

    def error(is_wrong: np.ndarray, text: str) -> DataError:
        row = np.searchsorted(row_splits, np.argmax(is_wrong), side="right") - 1
        return group.error(column, int(row), text)

    if values.null_count:
        is_null = values.is_null().to_numpy(zero_copy_only=False)
        raise error(is_null, "an id must not be null; fill it, or drop the row")
    ids = values.to_numpy(zero_copy_only=False)
    if ids.dtype.kind not in "iu":
        raise group.error(column, 0, f"ids must be integers, got {values.type}")
    if feature.out_of_range != "error":
        # `size` could overflow the column's type, such as int8. uint64 columns stay
        # uint64, because int64 can't hold ids from 2**63 on. NumPy's remainder by
        # `size` is never negative.
        is_wide = ids.dtype == np.uint64
        ids = ids.astype(np.uint64 if is_wide else np.int64, copy=False)
        return ids if feature.out_of_range == "keep" else (ids % size).astype(np.int32)
    # Checked before the cast to int32, which could wrap an id into range.
    is_outside = (ids < 0) | (ids >= size)
    if not is_outside.any():
        return ids.astype(np.int32, copy=False)
    raise error(
        is_outside,
        f"an id of the feature {feature.name!r} must be in [0, {size}), got "
        f"{ids[np.argmax(is_outside)]}; correct the data, or set "
        "ParquetFeature.out_of_range",
    )


NUM_STREAMS: Final = 8
"""Default number of row groups that a batch mixes."""


class ParquetClicks(BlockDataset):
    """Rows from Parquet files, with the row groups in shuffled order.

    Ids are int32. With `out_of_range="keep"`, they are int64 or uint64. Columns of
    integers become arrays `[batch]`, lists with a fixed size become arrays
    `[batch, size]`, and other lists become `RaggedIds`. A null list has no ids: it is
    empty, or full of `PADDING_ROW_ID` if its size is fixed. Any other null is an error.
    """

    def __init__(self, source: "ParquetSource", reader: SampleReader, **options: Any):
        super().__init__(reader, **options)
        self.vocabulary_sizes = {f.name: f.vocabulary_size for f in source.features}
        self.num_dense = len(source.dense)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParquetSource:
    """Parquet files with training data. Columns that you don't name are skipped.

    Attributes:
      features: columns with ids.
      label: label column.
      dense: columns with dense inputs.
      weight: column with sample weights. By default, all weights are 1.
      num_evaluation_samples: number of held-out rows. They are the last rows in the
        evaluation files, or in the training files if you don't set `evaluation_files`.
        Defaults to all rows in the evaluation files.
      files: pattern for training files in the data directory. Files are sorted by name.
      evaluation_files: pattern for files with held-out rows, or None.
      num_streams: number of row groups that a batch mixes. Memory holds one more group.

    Example:
      >>> source = ParquetSource(
      ...     features=(ParquetFeature(name="user", vocabulary_size=1000),),
      ...     label="clicked",
      ...     num_evaluation_samples=10,
      ... )
      >>> source.column_names
      ['user', 'clicked']
    """

    features: tuple[ParquetFeature, ...]
    label: str
    dense: tuple[str, ...] = ()
    weight: str | None = None
    num_evaluation_samples: int | None = None
    files: str = "*.parquet"
    evaluation_files: str | None = None
    num_streams: int = NUM_STREAMS

    def __post_init__(self):
        check_counts(self)

    @property
    def column_names(self) -> list[str]:
        """Names of the columns to read, without repetitions."""
        ids = [feature.column_name for feature in self.features]
        weight = [] if self.weight is None else [self.weight]
        return list(dict.fromkeys([*ids, *self.dense, self.label, *weight]))

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> ParquetClicks:
        """Opens the files.

        Pass a directory or one file as `data_dir`. `seed` shuffles the row groups.

        Raises:
          DataError: if a file is missing, is damaged or lacks a column, or if
            pyarrow is not installed.
        """
        directory = required_files(data_dir, "Parquet files")
        held_out = []
        if self.evaluation_files is not None:
            held_out = _matching(directory, self.evaluation_files)
        # By default, `files` also matches the evaluation files.
        paths = [p for p in _matching(directory, self.files) if p not in held_out]
        if not paths:
            raise DataError(
                f"{directory} has no training file, because evaluation_files="
                f"{self.evaluation_files!r} matches every file of files={self.files!r}."
            )
        return ParquetClicks(
            self,
            ParquetRows(paths, self),
            batch_size=batch_size,
            num_evaluation_samples=self.num_evaluation_samples,
            evaluation_reader=ParquetRows(held_out, self) if held_out else None,
            seed=seed,
            num_streams=self.num_streams,
        )

    def outline(self, *, batch_size: int, seed: int) -> ParquetClicks:
        """Makes a data set with the declared columns, where every id is 0."""
        return ParquetClicks(
            self,
            _Zeros(self),
            batch_size=batch_size,
            num_evaluation_samples=batch_size,
        )


class _Zeros:
    """A `SampleReader` that makes zeros in the declared shapes."""

    # Without files, the row count is unknown. This number allows any batch size.
    block_bounds = np.array([0, 2**31])

    def __init__(self, source: ParquetSource):
        self._source = source

    def read(self, samples: np.ndarray) -> Batch:
        source, features = self._source, {}
        for feature in source.features:
            ends = np.arange(len(samples) + 1) * (feature.expected_valence or 1)
            # The mean valence may be a fraction, so lengths differ between samples.
            splits = np.ceil(ends).astype(np.int64)
            ids = values = np.zeros(splits[-1], np.int32)
            if feature.expected_valence is not None:
                ids = RaggedIds(values=values, row_splits=splits)
            features[feature.name] = ids
        dense = np.zeros((len(samples), len(source.dense)), np.float32)
        ones = np.ones(len(samples), np.float32)
        dense = dense if source.dense else None
        return Batch(features=features, dense=dense, labels=ones, weights=ones)


def _matching(directory: pathlib.Path, pattern: str) -> list[pathlib.Path]:
    """Lists the files that match a pattern, or only `directory` if it is a file."""
    if directory.is_file():
        return [directory]
    # `glob` has no fixed order, but all processes must number the rows alike.
    paths = sorted(path for path in directory.glob(pattern) if path.is_file())
    if not paths:
        raise DataError(f"No file in {directory} matches {pattern!r}.")
    return paths
