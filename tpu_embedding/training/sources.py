"""Where the batches of a run come from: the data section of a run config.

A source holds what a config says of its data; `open` adds what the command line says,
the place of the files, and returns the data set.
"""

import dataclasses
import pathlib
from typing import Final, Protocol

from tpu_embedding.data.batch import DataError, Dataset
from tpu_embedding.data.criteo import Criteo, SyntheticCriteo
from tpu_embedding.data.movielens import MovieLens, MovieLensConfig
from tpu_embedding.data.synthetic import SyntheticClicks

CRITEO_FILE: Final = "train.txt"
"""Name of the training file in the archive of Criteo's Kaggle challenge."""


class DataSource(Protocol):
    """A data set that has not been opened yet."""

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> Dataset:
        """Returns the data set; raises `DataError` if it is not there or damaged."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticClicksSource:
    """`SyntheticClicks`; reads no file.

    Attributes:
      num_evaluation_samples: held-out samples.
      valence: most tags of a sample.
      zipf_exponent: skew of the ids.
    """

    num_evaluation_samples: int
    valence: int = 8
    zipf_exponent: float = 1.0

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> SyntheticClicks:
        """Returns the data set.

        Raises:
          DataError: if a directory is given.
        """
        if data_dir is not None:
            raise DataError(
                f"This config makes its data up and would not read {data_dir}; leave "
                "--data-dir out."
            )
        return SyntheticClicks(
            batch_size=batch_size, seed=seed, **dataclasses.asdict(self)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MovieLensSource:
    """`MovieLens`, from the unpacked `ml-100k`.

    Attributes:
      max_history: most ids in one sample's history.
      train: name of the file with the training ratings.
      test: name of the file with the held-out ratings.
    """

    max_history: int
    train: str = "u1.base"
    test: str = "u1.test"

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> MovieLens:
        """Reads the files.

        Raises:
          DataError: if no directory is given, or a file is missing or damaged.
        """
        if data_dir is None:
            raise DataError(
                "This config needs MovieLens-100K: get ml-100k.zip from "
                "https://grouplens.org/datasets/movielens/100k/, unpack it, and give "
                "the folder with --data-dir ml-100k."
            )
        config = MovieLensConfig(
            batch_size=batch_size, seed=seed, **dataclasses.asdict(self)
        )
        return MovieLens(data_dir, config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriteoSource:
    """`Criteo` if a file is given, else `SyntheticCriteo`.

    Attributes:
      vocabulary_size: rows of each of the 26 features.
      num_evaluation_samples: held-out samples; the last ones of a file.
    """

    vocabulary_size: int
    num_evaluation_samples: int

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> Criteo | SyntheticCriteo:
        """Maps the file, or draws the teacher.

        Args:
          data_dir: a log, or a directory with `train.txt`.
          batch_size: samples per batch.
          seed: of the order, or of the teacher.

        Raises:
          DataError: if the file is missing or damaged.
        """
        if data_dir is None:
            return SyntheticCriteo(
                batch_size=batch_size,
                seed=seed,
                vocabulary_sizes=self.vocabulary_size,
                num_evaluation_samples=self.num_evaluation_samples,
            )
        path = data_dir / CRITEO_FILE if data_dir.is_dir() else data_dir
        return Criteo(
            path,
            batch_size=batch_size,
            seed=seed,
            vocabulary_sizes=self.vocabulary_size,
            num_evaluation_samples=self.num_evaluation_samples,
        )
