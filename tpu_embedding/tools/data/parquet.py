"""Samples of Parquet files, one column per feature."""

import dataclasses
import pathlib
from typing import Any, Final

import numpy as np

from tpu_embedding.tools.data.batch import (
    Batch,
    DataError,
    check_counts,
    required_files,
)
from tpu_embedding.tools.data.block_dataset import BlockDataset, SampleReader
from tpu_embedding.tools.data.parquet_rows import ParquetColumns, ParquetRows
from tpu_embedding.types import FeatureIds, RaggedIds

NUM_STREAMS: Final = 8
"""Row groups that a batch mixes, by default."""


class ParquetClicks(BlockDataset):
    """The rows of Parquet files, in an order shuffled by row groups.

    Features: int32 `[batch]` for a column of integers, int32 `[batch, size]` for one of
    lists of a fixed size, and `RaggedIds` for other lists. Dense: float32
    `[batch, num_dense]`, or None without columns. A null list is an empty one, or one
    of `PADDING_ROW_ID` if its size is fixed; any other null raises a DataError.

    A batch takes consecutive rows of `num_streams` row groups. As many are decoded at a
    time, so memory is that of `num_streams + 1` row groups, whatever the files' size.

    Attributes:
      vocabulary_sizes: number of rows by feature name.
      num_dense: dense inputs per sample.
    """

    vocabulary_sizes: dict[str, int]
    num_dense: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParquetSource(ParquetColumns):
    """Source of `ParquetClicks`, which reads the columns of `ParquetColumns`.

    Attributes:
      num_evaluation_samples: number of held-out rows: the last ones of the evaluation
        files, or of the training files without `evaluation_files`. None: all rows of
        the evaluation files.
      files: pattern of the training files within the data directory, in the order of
        their names.
      evaluation_files: pattern of the files of held-out rows, or None.
      num_streams: row groups that a batch mixes. One more than these are in memory.
    """

    num_evaluation_samples: int | None = None
    files: str = "*.parquet"
    evaluation_files: str | None = None
    num_streams: int = NUM_STREAMS

    def __post_init__(self):
        check_counts(self)

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> ParquetClicks:
        """Returns the data set.

        Args:
          data_dir: directory of the files, or one file.
          batch_size: samples per batch, over all devices.
          seed: seed of the order of the row groups.

        Raises:
          DataError: if there is no file, or one is damaged or lacks a column; or if
            pyarrow is not installed.
        """
        directory = required_files(data_dir, "Parquet files")
        held_out = []
        if self.evaluation_files is not None:
            held_out = _matching(directory, self.evaluation_files)
        paths = [p for p in _matching(directory, self.files) if p not in held_out]
        if not paths:
            raise DataError(
                f"{directory} must hold a training file: evaluation_files="
                f"{self.evaluation_files!r} takes every file of files={self.files!r}."
            )
        return self._data_set(
            self._rows(paths),
            batch_size=batch_size,
            num_evaluation_samples=self.num_evaluation_samples,
            evaluation_reader=self._rows(held_out) if held_out else None,
            seed=seed,
            num_streams=self.num_streams,
        )

    def outline(self, *, batch_size: int, seed: int) -> ParquetClicks:
        """Returns a data set of the declared columns: ids of 0, in expected lengths."""
        return self._data_set(
            _Zeros(self), batch_size=batch_size, num_evaluation_samples=batch_size
        )

    def _data_set(self, reader: SampleReader, **options: Any) -> ParquetClicks:
        data = ParquetClicks(reader, **options)
        data.vocabulary_sizes = {f.name: f.vocabulary_size for f in self.features}
        data.num_dense = len(self.dense)
        return data

    def _rows(self, paths: list[pathlib.Path]) -> ParquetRows:
        return ParquetRows(paths, self, num_kept=self.num_streams + 1)


class _Zeros:
    """A `SampleReader` of ids and numbers of 0, in lists of the expected lengths."""

    block_bounds = np.array([0, 2**31])

    def __init__(self, source: ParquetSource):
        self._source = source

    def read(self, samples: np.ndarray) -> Batch:
        num_samples = len(samples)

        def ids(expected_valence: float | None) -> FeatureIds:
            if expected_valence is None:
                return np.zeros(num_samples, np.int32)
            ends = np.ceil(np.arange(num_samples + 1) * expected_valence)
            splits = ends.astype(np.int64)
            return RaggedIds(values=np.zeros(splits[-1], np.int32), row_splits=splits)

        dense = np.zeros((num_samples, len(self._source.dense)), np.float32)
        return Batch(
            features={f.name: ids(f.expected_valence) for f in self._source.features},
            dense=dense if self._source.dense else None,
            labels=np.ones(num_samples, np.float32),
            weights=np.ones(num_samples, np.float32),
        )


def _matching(directory: pathlib.Path, pattern: str) -> list[pathlib.Path]:
    """Returns the files of a pattern by name; a file matches any pattern."""
    if directory.is_file():
        return [directory]
    paths = sorted(path for path in directory.glob(pattern) if path.is_file())
    if not paths:
        raise DataError(f"{directory} must hold files {pattern!r}, got none.")
    return paths
