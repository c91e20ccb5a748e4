"""Where the batches of a run come from: the data section of a run config.

A source holds what a config says of its data; `open` adds what the command line says,
the place of the files, and returns the data set.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Final, Protocol

import numpy as np

from tpu_embedding.data.batch import Batch, DataError, Dataset
from tpu_embedding.data.criteo import Criteo, SyntheticCriteo
from tpu_embedding.data.movielens import (
    AGE_BUCKET_STARTS,
    GENDERS,
    NUM_RATINGS,
    MovieLens,
    MovieLensConfig,
)
from tpu_embedding.data.synthetic import SyntheticClicks
from tpu_embedding.types import RaggedIds

CRITEO_FILE: Final = "train.txt"
"""Name of the training file in the archive of Criteo's Kaggle challenge."""

# MovieLens-100K, as its README and files have it.
_NUM_USERS: Final = 943
_NUM_MOVIES: Final = 1682
_NUM_OCCUPATIONS: Final = 21
_NUM_GENRES: Final = 19
_MAX_GENRES: Final = 6
_MEAN_RATING: Final = 3.53


class DataSource(Protocol):
    """A data set that has not been opened yet."""

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> Dataset:
        """Returns the data set; raises `DataError` if it is not there or damaged."""
        ...

    def outline(self, *, batch_size: int, seed: int) -> Dataset:
        """Returns a data set of the same sizes without reading any file.

        Its batches have the shapes of the real ones, whatever their values; a step is
        compiled for them.
        """
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

    def outline(self, *, batch_size: int, seed: int) -> SyntheticClicks:
        """Returns the data set."""
        return self.open(None, batch_size=batch_size, seed=seed)


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
        return MovieLens(data_dir, self._config(batch_size, seed))

    def outline(self, *, batch_size: int, seed: int) -> "MovieLensOutline":
        """Returns a data set of the published sizes."""
        return MovieLensOutline(self._config(batch_size, seed))

    def _config(self, batch_size: int, seed: int) -> MovieLensConfig:
        return MovieLensConfig(
            batch_size=batch_size, seed=seed, **dataclasses.asdict(self)
        )


class MovieLensOutline:
    """MovieLens-100K as far as it is known without its files: sizes, and no ratings.

    Attributes:
      config: as given.
      batch_size: of the config.
      vocabulary_sizes: as those of `MovieLens`.
      mean_rating: about that of the training files.
    """

    def __init__(self, config: MovieLensConfig):
        self.config = config
        self.batch_size = config.batch_size
        self.mean_rating = _MEAN_RATING
        self.vocabulary_sizes = {
            "user": _NUM_USERS,
            "movie": _NUM_MOVIES,
            "age": len(AGE_BUCKET_STARTS) + 1,
            "gender": len(GENDERS),
            "occupation": _NUM_OCCUPATIONS,
            "genres": _NUM_GENRES,
            "history": NUM_RATINGS * _NUM_MOVIES,
        }

    def train_batch(self, step: int) -> Batch:
        """Returns a batch of row 0 throughout; histories have the greatest length."""
        del step
        length = self.config.max_history or _NUM_MOVIES
        ones = np.ones(self.batch_size, np.float32)
        zeros = np.zeros(self.batch_size, np.int32)
        return Batch(
            features={name: zeros for name in self.vocabulary_sizes}
            | {
                "genres": np.zeros((self.batch_size, _MAX_GENRES), np.int32),
                "history": RaggedIds(
                    values=np.zeros(self.batch_size * length, np.int32),
                    row_splits=np.arange(self.batch_size + 1, dtype=np.int32) * length,
                ),
            },
            labels=ones,
            weights=ones,
        )

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yields nothing."""
        return iter(())


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

    def outline(self, *, batch_size: int, seed: int) -> Criteo | SyntheticCriteo:
        """Returns the made-up rows, which have the shapes of the log's."""
        return self.open(None, batch_size=batch_size, seed=seed)
