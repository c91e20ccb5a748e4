"""Data sources of files that may be larger than memory, for run configs.

Without files, the sources of click logs draw synthetic samples of the same shape.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np

from tpu_embedding.field_checks import raise_all
from tpu_embedding.tools.data.batch import Batch, DataError
from tpu_embedding.tools.data.criteo import Criteo
from tpu_embedding.tools.data.criteo_format import CATEGORY_NAMES, NUM_CATEGORIES
from tpu_embedding.tools.data.criteo_lines import find_logs
from tpu_embedding.tools.data.multi_hot_clicks import MultiHotClicks
from tpu_embedding.tools.data.parquet_columns import ParquetFeature
from tpu_embedding.tools.data.parquet_rows import (
    NUM_STREAMS,
    ParquetClicks,
    ParquetColumns,
)
from tpu_embedding.tools.data.synthetic_criteo import SyntheticCriteo
from tpu_embedding.tools.train.config.data_source import local_data_dir
from tpu_embedding.types import FeatureIds, RaggedIds


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriteoSource:
    """Source of `Criteo` if files are given, and of `SyntheticCriteo` otherwise.

    Attributes:
      vocabulary_size: table rows of each of the 26 features.
      num_evaluation_samples: number of held-out samples; the last ones of the files.
    """

    vocabulary_size: int
    num_evaluation_samples: int

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> Criteo | SyntheticCriteo:
        """Returns the data set: the rows of a log, or synthetic ones without a file.

        Args:
          data_dir: a log file; a directory that contains `train.txt`, or `day_0`,
            `day_1` and so on; or None.
          batch_size: samples per batch, over all devices.
          seed: seed of the order of a log's samples, or of synthetic samples.

        Raises:
          DataError: if a file is missing or damaged.
        """
        if data_dir is None:
            return self.outline(batch_size=batch_size, seed=seed)
        return Criteo(
            find_logs(local_data_dir(data_dir)),
            batch_size=batch_size,
            seed=seed,
            vocabulary_sizes=self.vocabulary_size,
            num_evaluation_samples=self.num_evaluation_samples,
        )

    def outline(self, *, batch_size: int, seed: int) -> SyntheticCriteo:
        """Returns synthetic rows, which have the shapes of those of a log."""
        return SyntheticCriteo(
            batch_size=batch_size,
            seed=seed,
            vocabulary_sizes=self.vocabulary_size,
            num_evaluation_samples=self.num_evaluation_samples,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiHotClicksSource:
    """Source of `MultiHotClicks` if files are given, of `SyntheticCriteo` otherwise.

    The features are named `cat_00`, `cat_01` and so on.

    Attributes:
      vocabulary_sizes: table rows of each feature; at most 26 features.
      valences: ids per sample of each feature, which are the columns of its array.
      num_evaluation_samples: number of held-out samples.
      max_vocabulary_size: upper limit for all `vocabulary_sizes`, so that a small
        machine can hold the tables. Ids of files are taken modulo the smaller size.
        None is no limit.
      max_valence: upper limit for all `valences`: the first ids of each sample are
        read. None is no limit.
    """

    vocabulary_sizes: tuple[int, ...]
    valences: tuple[int, ...]
    num_evaluation_samples: int
    max_vocabulary_size: int | None = None
    max_valence: int | None = None

    def __post_init__(self):
        problems = []
        num_features = len(self.vocabulary_sizes)
        if num_features != len(self.valences) or num_features > NUM_CATEGORIES:
            problems.append(
                "MultiHotClicksSource.vocabulary_sizes and valences must be of one "
                f"length, at most {NUM_CATEGORIES}, got {num_features} and "
                f"{len(self.valences)}"
            )
        problems += [
            f"MultiHotClicksSource.{name} must be at least 1 or None, got {value!r}"
            for name, value in (
                ("max_vocabulary_size", self.max_vocabulary_size),
                ("max_valence", self.max_valence),
            )
            if value is not None and value < 1
        ]
        raise_all(problems)

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> MultiHotClicks | SyntheticCriteo:
        """Returns the data set: the rows of the files, or synthetic ones without.

        Args:
          data_dir: directory of MLPerf's preprocessed files, or None.
          batch_size: samples per batch, over all devices.
          seed: seed of the order of the samples, or of synthetic samples.

        Raises:
          DataError: if a file is missing or damaged.
        """
        if data_dir is None:
            return self.outline(batch_size=batch_size, seed=seed)
        return MultiHotClicks(
            local_data_dir(data_dir),
            batch_size=batch_size,
            seed=seed,
            vocabulary_sizes=dict(zip(CATEGORY_NAMES, self._sizes, strict=False)),
            valences=dict(zip(CATEGORY_NAMES, self.valences, strict=False)),
            max_valence=self.max_valence,
            num_evaluation_samples=self.num_evaluation_samples,
        )

    def outline(self, *, batch_size: int, seed: int) -> SyntheticCriteo:
        """Returns synthetic rows, which have the shapes of those of the files."""
        return SyntheticCriteo(
            batch_size=batch_size,
            seed=seed,
            vocabulary_sizes=self._sizes,
            valences=_limited(self.valences, self.max_valence),
            num_evaluation_samples=self.num_evaluation_samples,
        )

    @property
    def _sizes(self) -> list[int]:
        return _limited(self.vocabulary_sizes, self.max_vocabulary_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParquetSource:
    """Source of `ParquetClicks`, which reads Parquet files by pyarrow.

    Attributes:
      features: columns of ids.
      label: name of the column of labels.
      num_evaluation_samples: number of held-out rows: the last ones of the evaluation
        files, or of the training files without `evaluation_files`. None: all rows of
        the evaluation files.
      dense: names of the columns of dense inputs.
      weight: name of the column of sample weights; None: all weigh 1.
      files: pattern of the training files within the data directory, in the order of
        their names.
      evaluation_files: pattern of the files of held-out rows, or None.
      num_streams: row groups that a batch mixes. One more than these are in memory, in
        each loader process a share of them.
    """

    features: tuple[ParquetFeature, ...]
    label: str
    num_evaluation_samples: int | None = None
    dense: tuple[str, ...] = ()
    weight: str | None = None
    files: str = "*.parquet"
    evaluation_files: str | None = None
    num_streams: int = NUM_STREAMS

    def __post_init__(self):
        names = [feature.name for feature in self.features]
        if not names or len(set(names)) < len(names):
            raise ValueError(
                "ParquetSource.features must have one feature or more, of different "
                f"names, got {names}."
            )

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> ParquetClicks:
        """Returns the data set.

        Args:
          data_dir: directory of the files, or one file.
          batch_size: samples per batch, over all devices.
          seed: seed of the order of the row groups.

        Raises:
          DataError: if there is no file, or one is damaged or lacks a column.
          MissingPyarrowError: if pyarrow is not installed.
        """
        if data_dir is None:
            raise DataError(
                "This config reads Parquet files: pass their directory with --data-dir."
            )
        data_dir = local_data_dir(data_dir)
        evaluation_paths = []
        if self.evaluation_files is not None:
            evaluation_paths = _matching(data_dir, self.evaluation_files)
        matching = _matching(data_dir, self.files)
        paths = [path for path in matching if path not in evaluation_paths]
        if not paths:
            raise DataError(
                f"{data_dir} must hold a training file: evaluation_files="
                f"{self.evaluation_files!r} takes every file of files={self.files!r}. "
                "Pass a directory with files of both kinds, narrow evaluation_files, "
                "or leave it out and set num_evaluation_samples."
            )
        return ParquetClicks(
            paths,
            self._columns,
            batch_size=batch_size,
            num_evaluation_samples=self.num_evaluation_samples,
            evaluation_paths=evaluation_paths,
            seed=seed,
            num_streams=self.num_streams,
        )

    def outline(self, *, batch_size: int, seed: int) -> "ParquetOutline":
        """Returns a data set of the declared columns, without rows."""
        del seed
        return ParquetOutline(self._columns, batch_size)

    @property
    def _columns(self) -> ParquetColumns:
        return ParquetColumns(
            features=self.features,
            label=self.label,
            dense=self.dense,
            weight=self.weight,
        )


class ParquetOutline:
    """Stands in for `ParquetClicks` when its files are absent: columns, but no rows.

    Attributes:
      batch_size: samples per batch.
      vocabulary_sizes: number of rows by feature name.
      num_dense: dense inputs per sample.
    """

    def __init__(self, columns: ParquetColumns, batch_size: int):
        self.batch_size = batch_size
        self.vocabulary_sizes = {
            feature.name: feature.vocabulary_size for feature in columns.features
        }
        self.num_dense = len(columns.dense)
        self._columns = columns

    def train_batch(self, step: int) -> Batch:
        """Returns a batch whose ids are 0; lists have their expected length."""
        del step
        size = self.batch_size
        dense = np.zeros((size, self.num_dense), np.float32)
        return Batch(
            features={f.name: self._ids(f) for f in self._columns.features},
            dense=dense if self.num_dense else None,
            labels=np.ones(size, np.float32),
            weights=np.ones(size, np.float32),
        )

    def _ids(self, feature: ParquetFeature) -> FeatureIds:
        if feature.expected_valence is None:
            return np.zeros(self.batch_size, np.int32)
        # Lists of two lengths, whose mean is the expected one.
        ends = np.arange(self.batch_size + 1) * feature.expected_valence
        row_splits = np.ceil(ends).astype(np.int64)
        return RaggedIds(
            values=np.zeros(row_splits[-1], np.int32), row_splits=row_splits
        )

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yields no batch."""
        return iter(())


def _matching(directory: pathlib.Path, pattern: str) -> list[pathlib.Path]:
    """Returns the files of a pattern by name; a file matches any pattern."""
    if directory.is_file():
        return [directory]
    paths = sorted(path for path in directory.glob(pattern) if path.is_file())
    if not paths:
        raise DataError(f"{directory} must hold files {pattern!r}, got none.")
    return paths


def _limited(values: Sequence[int], limit: int | None) -> list[int]:
    return [value if limit is None else min(value, limit) for value in values]
