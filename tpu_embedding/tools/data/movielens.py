"""MovieLens-100K, read from the files that GroupLens publishes (`ml-100k`).

It is a small real data set on which a working model reaches a known test error. Its
licence forbids redistribution, so the user downloads the files.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from tpu_embedding.tools.data.batch import Batch, DataError
from tpu_embedding.tools.data.source import Outline, check_counts, required_files
from tpu_embedding.types import PADDING_ROW_ID, RaggedIds

NUM_RATINGS: Final = 5
"""Ratings are the integers 1 to 5."""

AGE_BUCKET_STARTS: Final = (18, 25, 35, 45, 50, 56)
"""Age buckets of MovieLens-1M's README: under 18, 18-24, ..., 56 and over."""

VOCABULARY_SIZES: Final = {
    "user": 943,
    "movie": 1682,
    "age": len(AGE_BUCKET_STARTS) + 1,
    "gender": 2,
    "occupation": 21,
    "genres": 19,
    "history": NUM_RATINGS * 1682,
}
MAX_GENRES: Final = 6
MEAN_RATING: Final = 3.53
"""Sizes of the published files, and their mean rating."""

# Third words of the seed sequences, so no two uses share random numbers. No word is 0,
# because SeedSequence([a, b]) and SeedSequence([a, b, 0]) are equal.
_ORDER_STREAM: Final = 1
_WINDOW_STREAM: Final = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class MovieLensSource:
    """Source of `MovieLens`, read from the unpacked `ml-100k`.

    Attributes:
      max_history: maximum ids in one sample's history. A longer history is replaced by
        a random subset of this size.
      train: name of the file with the training ratings.
      test: name of the file with the held-out ratings.
    """

    max_history: int
    train: str = "u1.base"
    test: str = "u1.test"

    def __post_init__(self):
        check_counts(self)

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> "MovieLens":
        """Reads the files and returns the data set.

        Raises:
          DataError: if no directory is given, or a file is missing or damaged.
        """
        directory = required_files(
            data_dir,
            "MovieLens-100K, the unpacked folder ml-100k of "
            "https://grouplens.org/datasets/movielens/100k/",
        )
        return MovieLens(self, directory, batch_size=batch_size, seed=seed)

    def outline(self, *, batch_size: int, seed: int) -> Outline:
        """Returns a data set of the published sizes, without ratings."""
        del seed
        zeros = np.zeros(batch_size, np.int32)
        features: dict[str, Any] = dict.fromkeys(VOCABULARY_SIZES, zeros)
        features["genres"] = np.zeros((batch_size, MAX_GENRES), np.int32)
        features["history"] = RaggedIds(
            values=np.zeros(batch_size * self.max_history, np.int32),
            row_splits=np.arange(batch_size + 1, dtype=np.int32) * self.max_history,
        )
        return Outline(
            VOCABULARY_SIZES,
            features,
            batch_size=batch_size,
            max_history=self.max_history,
            mean_rating=MEAN_RATING,
        )


class MovieLens:
    """Ratings of MovieLens-100K, with features of the user and the movie.

    Feature values are int32 row ids, counted from 0 in file order:

    * `user`, `movie`, `age` (bucket), `gender`, `occupation`: `[batch]`.
    * `genres`: `[batch, max_genres]`, padded with `PADDING_ROW_ID`.
    * `history`: `RaggedIds`, the user's ratings in the training file, each encoded as
      `NUM_RATINGS * movie + rating - 1`. It excludes the sample's own rating, which
      would leak the label, and all held-out ratings.

    Labels are the ratings, 1 to 5. Each epoch visits the samples in a new random order.
    A batch may span two epochs, so every batch is full and every sample is used once
    per epoch.

    Attributes:
      vocabulary_sizes: number of distinct ids by feature name.
      max_history: maximum number of ids in a sample's history.
      mean_rating: mean rating of the training file.
      num_train_samples: number of ratings in the training file.
      num_evaluation_samples: number of ratings in the held-out file.
    """

    vocabulary_sizes = VOCABULARY_SIZES

    def __init__(
        self,
        source: MovieLensSource,
        directory: pathlib.Path,
        *,
        batch_size: int,
        seed: int,
    ):
        self.batch_size, self.seed = batch_size, seed
        self.max_history = source.max_history
        self._train = _read_ratings(directory / source.train)
        self._test = _read_ratings(directory / source.test)
        self._of_user = _read_users(directory)
        self._genres = _read_genres(directory / "u.item")
        self.mean_rating = float(self._train[2].astype(np.float32).mean())
        self.num_train_samples = len(self._train[0])
        self.num_evaluation_samples = len(self._test[0])
        self._group_by_user()

    def _group_by_user(self) -> None:
        """Groups the training ratings by user, in random order within each user.

        `_history_ids[_first_ids[u] : _first_ids[u + 1]]` are those of user `u`, and
        `_places` has the place of each training sample among them.
        """
        users, movies, ratings = self._train
        keys = _rng(self.seed, 0, _ORDER_STREAM).random(len(users))
        order = np.lexsort([keys, users])
        self._history_ids = (NUM_RATINGS * movies + ratings - 1)[order]
        counts = np.bincount(users, minlength=VOCABULARY_SIZES["user"])
        self._first_ids = np.concatenate([[0], np.cumsum(counts)])
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order))
        self._places = places - self._first_ids[users]

    def train_batch(self, step: int) -> Batch:
        """Returns the batch of training step `step`, counted from 0."""
        positions = step * self.batch_size + np.arange(self.batch_size)
        epochs, offsets = np.divmod(positions, self.num_train_samples)
        samples = np.concatenate(
            [
                _permutation(self.seed, epoch, self.num_train_samples)[
                    offsets[epochs == epoch]
                ]
                for epoch in np.unique(epochs).tolist()
            ]
        )
        starts = _rng(self.seed, step, _WINDOW_STREAM).random(self.batch_size)
        history = self._histories(self._train[0][samples], starts, samples)
        weights = np.ones(self.batch_size, np.float32)
        return self._batch(self._train, samples, history, weights)

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yields the held-out ratings in file order.

        Copies of the last sample, with weight 0, pad the last batch.
        """
        for start in range(0, self.num_evaluation_samples, self.batch_size):
            positions = start + np.arange(self.batch_size)
            samples = np.minimum(positions, self.num_evaluation_samples - 1)
            starts = np.zeros(self.batch_size)
            history = self._histories(self._test[0][samples], starts, None)
            weights = (positions < self.num_evaluation_samples).astype(np.float32)
            yield self._batch(self._test, samples, history, weights)

    def _histories(
        self, users: np.ndarray, starts: np.ndarray, samples: np.ndarray | None
    ) -> RaggedIds:
        """Returns one history per sample, a window of the ids of its user.

        The window wraps around at the end. The ids are in random order, so a window is
        a random subset and needs no sort per batch.

        Args:
          users: `[batch]`, row ids of the users.
          starts: `[batch]`, in [0, 1): start of the window, as a fraction of the ids.
          samples: `[batch]`, training samples whose ratings are left out, or None.
        """
        first = self._first_ids[users]
        available = self._first_ids[users + 1] - first - (samples is not None)
        lengths = np.minimum(available, self.max_history)
        row_splits = np.concatenate([[0], np.cumsum(lengths)])
        sample = np.repeat(np.arange(len(users)), lengths)
        places = np.arange(row_splits[-1]) - row_splits[sample]
        places += (starts * available).astype(np.int64)[sample]
        places -= np.where(places >= available[sample], available[sample], 0)
        if samples is not None:
            places += places >= self._places[samples][sample]
        return RaggedIds(
            values=self._history_ids[first[sample] + places],
            row_splits=row_splits.astype(np.int32),
        )

    def _batch(self, rows, samples, history, weights) -> Batch:
        users, movies, ratings = (column[samples] for column in rows)
        of_user = {name: rows[users] for name, rows in self._of_user.items()}
        return Batch(
            features={"user": users, "movie": movies, "history": history}
            | {"genres": self._genres[movies]}
            | of_user,
            labels=ratings.astype(np.float32),
            weights=weights,
        )


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    return _rng(seed, epoch).permutation(num_samples)


def _read_ratings(path: pathlib.Path) -> np.ndarray:
    """Returns int32 rows of users and of movies, and ratings from 1 to 5, `[3, n]`."""
    ratings = _read_fields(path, "\t", np.int32)[:, :3].T - [[1], [1], [0]]
    limits = VOCABULARY_SIZES["user"], VOCABULARY_SIZES["movie"], NUM_RATINGS + 1
    is_wrong = (ratings < [[0], [0], [1]]) | (ratings >= np.array(limits)[:, None])
    if is_wrong.any():
        raise DataError(
            f"{path}, line {np.argmax(is_wrong.any(axis=0)) + 1}: a user must be 1 to "
            "943, a movie 1 to 1682 and a rating 1 to 5."
        )
    return ratings.astype(np.int32)


def _read_users(directory: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns int32 rows of age, gender and occupation, each `[users]`."""
    names = _read_fields(directory / "u.occupation", "|", str)[:, 0].tolist()
    fields = _read_fields(directory / "u.user", "|", str)
    ages = np.searchsorted(AGE_BUCKET_STARTS, fields[:, 1].astype(int), side="right")
    return {
        "age": ages.astype(np.int32),
        "gender": (fields[:, 2] == "M").astype(np.int32),
        "occupation": np.array([names.index(name) for name in fields[:, 3]], np.int32),
    }


def _read_genres(path: pathlib.Path) -> np.ndarray:
    """Returns the genres of each movie, int32 `[movies, max_genres]`."""
    is_genre = _read_fields(path, "|", str)[:, 5:] == "1"
    numbers = np.where(is_genre, np.arange(is_genre.shape[1]), PADDING_ROW_ID)
    return np.sort(numbers, axis=1)[:, : is_genre.sum(axis=1).max()].astype(np.int32)


def _read_fields(path: pathlib.Path, separator: str, dtype: type) -> np.ndarray:
    """Returns the fields of all lines, `[lines, fields]`."""
    try:
        return np.loadtxt(path, dtype, None, separator, encoding="latin-1", ndmin=2)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: {error}; unpack ml-100k.zip of GroupLens again."
        ) from error


def _rng(*words: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))
