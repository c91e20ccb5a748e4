"""Reads rows of Parquet files that may be larger than memory, by pyarrow.

A row group is the smallest part of a file that can be read by itself. So row groups are
the blocks of the training order, and a few decoded ones are kept.
"""

import collections
import contextlib
import dataclasses
import os
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from tpu_embedding.paths import local_path
from tpu_embedding.tools.data.batch import Batch, DataError
from tpu_embedding.tools.data.block_dataset import BlockDataset
from tpu_embedding.tools.data.block_order import by_part, runs_of, take_runs
from tpu_embedding.tools.data.digests import join_digests
from tpu_embedding.tools.data.parquet_columns import (
    ListColumn,
    ParquetFeature,
    RowGroupPlace,
    check_type,
    read_ids,
    read_numbers,
)
from tpu_embedding.tools.data.pyarrow_modules import PARQUET_FILES, load_pyarrow
from tpu_embedding.types import FeatureIds, RaggedIds

NUM_STREAMS: Final = 8
"""Row groups that a batch mixes, by default."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParquetColumns:
    """Columns that are read; all others are skipped.

    Attributes:
      features: columns of ids.
      label: name of the column of labels.
      dense: names of the columns of dense inputs.
      weight: name of the column of sample weights; None: all weigh 1.
    """

    features: tuple[ParquetFeature, ...]
    label: str
    dense: tuple[str, ...] = ()
    weight: str | None = None

    @property
    def number_columns(self) -> list[str]:
        """Names of the columns of dense inputs, labels and weights."""
        return [*self.dense, self.label, *([self.weight] if self.weight else [])]

    @property
    def names(self) -> list[str]:
        """Names of all columns, each once."""
        ids = [feature.source_column for feature in self.features]
        return list(dict.fromkeys([*ids, *self.number_columns]))


class ParquetClicks(BlockDataset):
    """Samples of Parquet files: ids, dense inputs, labels and weights by column.

    Features: int32 `[batch]` for a column of integers, `RaggedIds` for one of lists.
    Dense: float32 `[batch, num_dense]`, or None without columns. A null list is an
    empty one; any other null is refused.

    Each epoch visits the row groups in a new random order. A batch takes consecutive
    rows of `num_streams` row groups. As many are decoded at a time, so memory is that
    of `num_streams + 1` row groups, whatever the size of the files.

    Attributes:
      batch_size: samples per batch.
      vocabulary_sizes: number of rows by feature name.
      num_dense: dense inputs per sample.
      num_train_samples: number of training rows.
      num_evaluation_samples: number of held-out rows.
    """

    def __init__(
        self,
        paths: Sequence[str | pathlib.Path],
        columns: ParquetColumns,
        *,
        batch_size: int,
        num_evaluation_samples: int | None = None,
        evaluation_paths: Sequence[str | pathlib.Path] = (),
        seed: int = 0,
        num_streams: int = NUM_STREAMS,
    ):
        """Reads the footers of the files, and checks their columns.

        Args:
          paths: training files, at least one.
          columns: columns to read.
          batch_size: samples per batch.
          num_evaluation_samples: rows held out at the end of the evaluation files, or
            of the training files without any. None: all rows of evaluation files.
          evaluation_paths: files of held-out rows, or none.
          seed: seed of the training order, at least 0.
          num_streams: row groups that a batch mixes.

        Raises:
          ValueError: if arguments are out of range.
          DataError: if a file is missing or damaged, or lacks a column.
          MissingPyarrowError: if pyarrow is not installed.
        """
        self.vocabulary_sizes = {
            feature.name: feature.vocabulary_size for feature in columns.features
        }
        self.num_dense = len(columns.dense)

        def read(paths: Sequence[str | pathlib.Path]) -> ParquetRows:
            return ParquetRows(
                [local_path(path) for path in paths],
                columns,
                num_kept=num_streams + 1,
            )

        super().__init__(
            read(paths),
            batch_size=batch_size,
            num_evaluation_samples=num_evaluation_samples,
            evaluation_reader=read(evaluation_paths) if evaluation_paths else None,
            seed=seed,
            num_streams=num_streams,
        )


class ParquetRows:
    """A `SampleReader` of Parquet files, whose samples are the rows of all files.

    It can be pickled; the copy has read no row group yet.

    Attributes:
      block_bounds: first row of each row group, and the number of rows.
      digest: digest of the footers, which hold sizes and statistics of row groups.
    """

    def __init__(
        self, paths: Sequence[pathlib.Path], columns: ParquetColumns, *, num_kept: int
    ):
        """Reads the footers of the files.

        Args:
          paths: paths of the files, at least one.
          columns: columns to read.
          num_kept: decoded row groups that are kept.
        """
        self._columns = columns
        self._num_kept = num_kept
        self._kept: collections.OrderedDict[int, _RowGroup] = collections.OrderedDict()
        self._footers: list[Any] = []
        self._groups: list[tuple[int, RowGroupPlace]] = []
        lengths = []
        for number, path in enumerate(paths):
            footer = read_footer(path)
            _check_columns(path, footer, columns)
            self._footers.append(footer)
            for place, num_rows in row_groups(path, footer):
                self._groups.append((number, place))
                lengths.append(num_rows)
        if not lengths:
            raise DataError(f"{paths[0]} must hold a row, got none.")
        self.block_bounds = np.cumsum([0, *lengths])
        self._paths = [str(path) for path in paths]
        self.digest = join_digests(digest_of_footer(path) for path in paths)

    def read(self, samples: np.ndarray) -> Batch:
        """Returns the given rows.

        Raises:
          DataError: if a row group is damaged, or has a wrong value; the message names
            file, row and column.
        """
        parts = [
            (self._group(number), runs_of(rows))
            for number, _, rows in by_part(samples, self.block_bounds[:-1])
        ]
        columns = self._columns
        dense = [_join_numbers(parts, name) for name in columns.dense]
        return Batch(
            features={
                feature.name: _join_ids(
                    [(group.ids[feature.name], runs) for group, runs in parts]
                )
                for feature in columns.features
            },
            dense=np.stack(dense, axis=1) if dense else None,
            labels=_join_numbers(parts, columns.label),
            weights=(
                _join_numbers(parts, columns.weight)
                if columns.weight
                else np.ones(len(samples), np.float32)
            ),
            origin=lambda sample: self._place(int(samples[sample])),
        )

    def _group(self, number: int) -> "_RowGroup":
        """Returns a decoded row group, and keeps it for a while."""
        group = self._kept.get(number)
        if group is None:
            file_number, place = self._groups[number]
            group = _decode(place, self._footers[file_number], self._columns)
            self._kept[number] = group
            if len(self._kept) > self._num_kept:
                self._kept.popitem(last=False)
        self._kept.move_to_end(number)
        return group

    def _place(self, sample: int) -> str:
        number = int(np.searchsorted(self.block_bounds, sample, side="right")) - 1
        place = self._groups[number][1]
        row = place.first_row + sample - int(self.block_bounds[number])
        return f"{place.path}, row {row}"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": collections.OrderedDict()}

    def __str__(self) -> str:
        return f"{self._paths[0]} to {self._paths[-1]}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RowGroup:
    """Decoded columns: ids by feature name, and numbers by column."""

    ids: dict[str, np.ndarray | ListColumn]
    numbers: dict[str, np.ndarray]


def read_footer(path: pathlib.Path) -> Any:
    """Returns the metadata of a file, by pyarrow.

    Raises:
      DataError: if the file is missing or damaged.
      MissingPyarrowError: if pyarrow is not installed.
    """
    parquet = load_pyarrow("pyarrow.parquet", PARQUET_FILES)
    if not path.is_file():
        raise DataError(f"{path} is not a file; the source reads Parquet files.")
    with _damage_of(str(path)):
        footer = parquet.read_metadata(path)
        footer.schema.to_arrow_schema()
    return footer


def row_groups(path: pathlib.Path, footer: Any) -> Iterator[tuple[RowGroupPlace, int]]:
    """Yields the place and the number of rows of each row group that has rows."""
    first_row = 0
    for number in range(footer.num_row_groups):
        num_rows = footer.row_group(number).num_rows
        if num_rows:
            yield (
                RowGroupPlace(path=str(path), number=number, first_row=first_row),
                num_rows,
            )
        first_row += num_rows


def digest_of_footer(path: pathlib.Path) -> str:
    """Returns the digest of a file's sizes, and of the statistics of its row groups."""
    with path.open("rb") as file:
        # A file ends with the length of its footer, 4 bytes, and 4 bytes of magic.
        file.seek(-8, os.SEEK_END)
        file.seek(-8 - int.from_bytes(file.read(4), "little"), os.SEEK_END)
        return f"{zlib.crc32(file.read()):08x}"


def read_row_group(
    place: RowGroupPlace, footer: Any, names: Sequence[str]
) -> dict[str, Any]:
    """Returns columns of a row group, which has a row or more, as arrays of Arrow.

    Args:
      place: place of the row group.
      footer: metadata of the file.
      names: names of the columns.

    Raises:
      DataError: if the row group is damaged.
    """
    parquet = load_pyarrow("pyarrow.parquet", PARQUET_FILES)
    with _damage_of(
        f"{place.path}, row group {place.number} from row {place.first_row} on,"
    ):
        with parquet.ParquetFile(
            place.path, metadata=footer, page_checksum_verification=True
        ) as file:
            table = file.read_row_group(place.number, columns=list(names))
            table = table.combine_chunks()
    return {name: table.column(name).chunk(0) for name in names}


def _check_columns(path: pathlib.Path, footer: Any, columns: ParquetColumns) -> None:
    schema = footer.schema.to_arrow_schema()
    for feature in columns.features:
        kind = "integers" if feature.expected_valence is None else "lists"
        check_type(str(path), schema, feature.source_column, kind)
    for name in columns.number_columns:
        check_type(str(path), schema, name, "numbers")


def _decode(place: RowGroupPlace, footer: Any, columns: ParquetColumns) -> _RowGroup:
    arrays = read_row_group(place, footer, columns.names)
    return _RowGroup(
        ids={
            feature.name: read_ids(arrays[feature.source_column], feature, place)
            for feature in columns.features
        },
        numbers={
            name: read_numbers(arrays[name], name, place)
            for name in columns.number_columns
        },
    )


@contextlib.contextmanager
def _damage_of(owner: str) -> Iterator[None]:
    """Raises errors of pyarrow as a `DataError`."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        text = str(error).splitlines()[0].rstrip(".")
        raise DataError(
            f"{owner} is damaged or no Parquet file: {text}; fetch or write it again."
        ) from error


def _join_ids(
    parts: Sequence[tuple[Any, list[slice]]],
) -> FeatureIds:
    """Returns the ids of rows of several row groups, whose columns are of one form."""
    if isinstance(parts[0][0], ListColumn):
        taken = [lists.take(runs) for lists, runs in parts]
        lengths = np.concatenate([lengths for _, lengths in taken])
        return RaggedIds(
            values=np.concatenate([values for values, _ in taken]),
            row_splits=np.concatenate([[0], np.cumsum(lengths)]),
        )
    return np.concatenate([take_runs(ids, runs) for ids, runs in parts])


def _join_numbers(
    parts: Sequence[tuple[_RowGroup, list[slice]]], name: str
) -> np.ndarray:
    numbers = [take_runs(group.numbers[name], runs) for group, runs in parts]
    return np.concatenate(numbers).astype(np.float32)
