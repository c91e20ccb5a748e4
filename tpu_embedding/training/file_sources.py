"""Data sources of files that may be larger than memory, for run configs.

Without files, the sources of click logs draw synthetic samples of the same shape.
"""

import dataclasses
import pathlib

from tpu_embedding.data.batch import Dataset
from tpu_embedding.data.criteo import Criteo, SyntheticCriteo
from tpu_embedding.data.criteo_lines import find_logs
from tpu_embedding.data.multi_hot_clicks import MultiHotClicks
from tpu_embedding.training.random_source import RandomClicksSource, by_feature


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
            `day_1` and so on, with or without the suffix `.gz`; or None.
          batch_size: samples per batch, over all devices.
          seed: seed of the order of a log's samples, or of synthetic samples.

        Raises:
          DataError: if a file is missing or damaged.
        """
        if data_dir is None:
            return self.outline(batch_size=batch_size, seed=seed)
        return Criteo(
            find_logs(data_dir),
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
class MultiHotClicksSource(RandomClicksSource):
    """Source of `MultiHotClicks` if files are given, and of `RandomClicks` otherwise.

    The attributes are those of `RandomClicksSource`. `valences` are the columns of the
    files' arrays. With `max_vocabulary_size`, ids are taken modulo the smaller size;
    with `max_valence`, the first ids of each sample are read.
    """

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> Dataset:
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
            data_dir,
            batch_size=batch_size,
            seed=seed,
            vocabulary_sizes=by_feature(
                self.vocabulary_sizes, self.max_vocabulary_size
            ),
            valences=by_feature(self.valences),
            max_valence=self.max_valence,
            num_evaluation_samples=self.num_evaluation_samples,
        )
