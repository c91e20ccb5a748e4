"""Source of MovieLens-100K, for run configs."""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Final

import numpy as np

from tpu_embedding.tools.data.batch import Batch, DataError
from tpu_embedding.tools.data.movielens import (
    AGE_BUCKET_STARTS,
    GENDERS,
    NUM_RATINGS,
    MovieLens,
)
from tpu_embedding.tools.train.config.data_source import local_data_dir
from tpu_embedding.types import RaggedIds

# Sizes of MovieLens-100K, from its README and files.
_NUM_USERS: Final = 943
_NUM_MOVIES: Final = 1682
_NUM_OCCUPATIONS: Final = 21
_NUM_GENRES: Final = 19
_MAX_GENRES: Final = 6
_MEAN_RATING: Final = 3.53


@dataclasses.dataclass(frozen=True, kw_only=True)
class MovieLensSource:
    """Source of `MovieLens`, read from the unpacked `ml-100k`.

    Attributes:
      max_history: maximum ids in one sample's history.
      train: name of the file with the training ratings.
      test: name of the file with the held-out ratings.
    """

    max_history: int
    train: str = "u1.base"
    test: str = "u1.test"

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> MovieLens:
        """Reads the files and returns the data set.

        Raises:
          DataError: if no directory is given, or a file is missing or damaged.
        """
        if data_dir is None:
            raise DataError(
                "This config needs MovieLens-100K: download ml-100k.zip from "
                "https://grouplens.org/datasets/movielens/100k/, unpack it, and pass "
                "its folder with --data-dir ml-100k."
            )
        return MovieLens(
            local_data_dir(data_dir),
            batch_size=batch_size,
            seed=seed,
            **dataclasses.asdict(self),
        )

    def outline(self, *, batch_size: int, seed: int) -> "MovieLensOutline":
        """Returns a data set of the published sizes, without ratings."""
        del seed
        return MovieLensOutline(batch_size, self.max_history)


class MovieLensOutline:
    """Stands in for MovieLens-100K when its files are absent: sizes, but no ratings.

    Attributes:
      batch_size: samples per batch.
      max_history: maximum number of ids in a sample's history.
      vocabulary_sizes: feature name to table rows, equal to those of `MovieLens`.
      mean_rating: approximate mean rating of the training files.
    """

    def __init__(self, batch_size: int, max_history: int):
        self.batch_size, self.max_history = batch_size, max_history
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
        """Returns a batch whose ids are all 0; histories have their maximum length."""
        del step
        length = self.max_history
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
        """Yields no batch."""
        return iter(())
