"""MovieLens-100K, read from the files that GroupLens publishes (`ml-100k`).

It is a small real data set on which a working model reaches a known test error. Its
licence forbids redistribution, so the user downloads the files. This module reads the
unpacked folder and turns the ratings into batches for the training loop.
"""

import dataclasses
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from tpu_embedding.field_checks import raise_all
from tpu_embedding.paths import local_path
from tpu_embedding.tools.data.argument_checks import count_problems, seed_problems
from tpu_embedding.tools.data.batch import Batch, DataError
from tpu_embedding.types import PADDING_ROW_ID, RaggedIds

NUM_RATINGS: Final = 5
"""Ratings are the integers 1 to 5."""

AGE_BUCKET_STARTS: Final = (18, 25, 35, 45, 50, 56)
"""Age buckets of MovieLens-1M's README: under 18, 18-24, ..., 56 and over."""

GENDERS: Final = ("F", "M")

# Third words of the seed sequences, so no two uses share random numbers. No word is 0,
# because SeedSequence([a, b]) and SeedSequence([a, b, 0]) are equal.
_ORDER_STREAM: Final = 1
_WINDOW_STREAM: Final = 2


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
      batch_size: samples per batch.
      seed: seed of the sample order and of truncated histories.
      max_history: maximum number of ids in a sample's history; None means all.
      vocabulary_sizes: number of distinct ids by feature name.
      max_genres: maximum number of genres of a movie.
      mean_rating: mean rating of the training file.
      num_train_samples: number of ratings in the training file.
      num_test_samples: number of ratings in the held-out file.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        *,
        batch_size: int,
        seed: int = 0,
        train: str = "u1.base",
        test: str = "u1.test",
        max_history: int | None = None,
    ):
        """Reads the files into memory.

        Args:
          directory: the unpacked `ml-100k` folder. It must hold `u.user`, `u.item`,
            `u.genre`, `u.occupation` and the two rating files.
          batch_size: samples per batch, in training and evaluation.
          seed: seed of the sample order and of truncated histories.
          train: name of the file with the training ratings.
          test: name of the file with the held-out ratings.
          max_history: maximum number of ids in a sample's history. A longer history is
            replaced by a random subset of this size. None keeps all ids.

        Raises:
          ValueError: if arguments are out of range; the message names all of them.
          DataError: if a file is missing or damaged; the message names file and line.
        """
        problems = [
            *count_problems("MovieLens", batch_size=batch_size),
            *seed_problems("MovieLens", seed),
        ]
        if max_history is not None:
            problems += count_problems("MovieLens", max_history=max_history)
        raise_all(problems)
        self.batch_size, self.seed, self.max_history = batch_size, seed, max_history
        directory = local_path(directory)
        users = _read_users(directory, _read_occupations(directory))
        movies = _read_movies(directory, num_genres=_read_num_genres(directory))
        self._train = _read_ratings(directory, train, users, movies)
        self._test = _read_ratings(directory, test, users, movies)
        _check_disjoint(self._train, self._test, len(movies.rows))
        self.vocabulary_sizes = {
            "user": len(users.rows),
            "movie": len(movies.rows),
            "age": len(AGE_BUCKET_STARTS) + 1,
            "gender": len(GENDERS),
            "occupation": users.num_occupations,
            "genres": movies.num_genres,
            "history": NUM_RATINGS * len(movies.rows),
        }
        self.max_genres = movies.genres.shape[1]
        self.mean_rating = float(self._train.ratings.mean())
        self.num_train_samples = len(self._train.ratings)
        self.num_test_samples = len(self._test.ratings)
        self._users, self._movies = users, movies
        self.digest = _digest(users, movies, self._train, self._test)
        self._histories = _group_by_user(self._train, len(users.rows), seed)
        self._last_permutation = (0, self._permute(0))

    def train_batch(self, step: int) -> Batch:
        """Returns the batch of training step `step`, counted from 0."""
        positions = step * self.batch_size + np.arange(self.batch_size)
        epochs, offsets = np.divmod(positions, self.num_train_samples)
        samples = np.empty(self.batch_size, np.int64)
        for epoch in range(epochs[0], epochs[-1] + 1):
            samples[epochs == epoch] = self._permutation(epoch)[
                offsets[epochs == epoch]
            ]
        rng = _rng(self.seed, step, _WINDOW_STREAM)
        history = self._histories.select(
            self._train.users[samples],
            without=self._histories.places[samples],
            starts=rng.random(self.batch_size),
            max_length=self.max_history,
        )
        weights = np.ones(self.batch_size, np.float32)
        return self._batch(self._train, samples, history, weights)

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yields the held-out ratings in file order.

        Copies of the last sample, with weight 0, pad the last batch.
        """
        for start in range(0, self.num_test_samples, self.batch_size):
            positions = start + np.arange(self.batch_size)
            samples = np.minimum(positions, self.num_test_samples - 1)
            history = self._histories.select(
                self._test.users[samples],
                without=None,
                starts=np.zeros(self.batch_size),
                max_length=self.max_history,
            )
            weights = (positions < self.num_test_samples).astype(np.float32)
            yield self._batch(self._test, samples, history, weights)

    def _batch(self, ratings, samples, history, weights) -> Batch:
        users, movies = ratings.users[samples], ratings.movies[samples]
        return Batch(
            features={
                "user": users,
                "movie": movies,
                "age": self._users.ages[users],
                "gender": self._users.genders[users],
                "occupation": self._users.occupations[users],
                "genres": self._movies.genres[movies],
                "history": history,
            },
            labels=ratings.ratings[samples],
            weights=weights,
            # Each line of the file is one rating.
            origin=lambda sample: f"{ratings.path}, line {samples[sample] + 1}",
        )

    def _permutation(self, epoch: int) -> np.ndarray:
        last_epoch, permutation = self._last_permutation
        if epoch != last_epoch:
            permutation = self._permute(epoch)
            self._last_permutation = (epoch, permutation)
        return permutation

    def _permute(self, epoch: int) -> np.ndarray:
        return _rng(self.seed, epoch).permutation(self.num_train_samples)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Users:
    rows: dict[str, int]
    ages: np.ndarray
    genders: np.ndarray
    occupations: np.ndarray
    num_occupations: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Movies:
    rows: dict[str, int]
    genres: np.ndarray
    num_genres: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Ratings:
    path: pathlib.Path
    users: np.ndarray
    movies: np.ndarray
    ratings: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Histories:
    """Training ratings grouped by user, in random order within each user.

    Attributes:
      ids: int32 `[num_train_samples]`, movie and rating encoded as in `MovieLens`.
      row_splits: int64 `[num_users + 1]`; user `u` owns
        `ids[row_splits[u]:row_splits[u + 1]]`.
      places: int64 `[num_train_samples]`, position of each training sample within the
        ids of its user.
    """

    ids: np.ndarray
    row_splits: np.ndarray
    places: np.ndarray

    def select(
        self,
        users: np.ndarray,
        *,
        without: np.ndarray | None,
        starts: np.ndarray,
        max_length: int | None,
    ) -> RaggedIds:
        """Returns one history per sample.

        A history is a window of at most `max_length` ids of the user, which wraps
        around at the end. The ids are in random order, so a window is a random subset
        and needs no sort per batch.

        Args:
          users: `[batch]`, row ids of the users.
          without: `[batch]`, position of the id to exclude from each history, or None.
          starts: `[batch]`, in [0, 1): start of the window, as a fraction of the ids.
          max_length: maximum number of ids per history; None means all.
        """
        first = self.row_splits[users]
        available = self.row_splits[users + 1] - first
        if without is not None:
            available = available - 1
        lengths = available
        if max_length is not None:
            lengths = np.minimum(available, max_length)
        row_splits = np.concatenate([[0], np.cumsum(lengths)])

        def repeat_per_id(per_sample):
            return np.repeat(per_sample, lengths)

        places = np.arange(row_splits[-1]) - repeat_per_id(row_splits[:-1])
        places += repeat_per_id((starts * available).astype(np.int64))
        places -= np.where(
            places >= repeat_per_id(available), repeat_per_id(available), 0
        )
        if without is not None:
            places += places >= repeat_per_id(without)
        return RaggedIds(
            values=self.ids[repeat_per_id(first) + places],
            row_splits=row_splits.astype(np.int32),
        )


def _digest(*parts: Any) -> str:
    """Returns the digest of all numbers that were read."""
    digest = 0
    for part in parts:
        for value in vars(part).values():
            if isinstance(value, np.ndarray):
                digest = zlib.crc32(np.ascontiguousarray(value).tobytes(), digest)
    return f"{digest:08x}"


def _group_by_user(train: _Ratings, num_users: int, seed: int) -> _Histories:
    keys = _rng(seed, 0, _ORDER_STREAM).random(len(train.users))
    order = np.lexsort([keys, train.users])
    ids = NUM_RATINGS * train.movies + train.ratings.astype(np.int32) - 1
    counts = np.bincount(train.users, minlength=num_users)
    row_splits = np.concatenate([[0], np.cumsum(counts)])
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    return _Histories(
        ids=ids[order],
        row_splits=row_splits,
        places=places - row_splits[train.users],
    )


def _read_occupations(directory: pathlib.Path) -> dict[str, int]:
    rows: dict[str, int] = {}
    for where, (name,) in _read_lines(directory, "u.occupation", "|", 1):
        _add_row(rows, name, "occupation", where)
    return rows


def _read_num_genres(directory: pathlib.Path) -> int:
    rows: dict[str, int] = {}
    for where, (name, number) in _read_lines(directory, "u.genre", "|", 2):
        if _parse_int(number, "genre number", where) != len(rows):
            raise DataError(
                f"{where}: genre numbers must count up from 0, expected {len(rows)}, "
                f"got {number}."
            )
        _add_row(rows, name, "genre", where)
    return len(rows)


def _read_users(directory: pathlib.Path, occupation_rows: dict[str, int]) -> _Users:
    rows: dict[str, int] = {}
    ages, genders, occupations = [], [], []
    for where, fields in _read_lines(directory, "u.user", "|", 5):
        user, age, gender, occupation, _ = fields
        _add_row(rows, user, "user", where)
        ages.append(_parse_int(age, "age", where))
        if gender not in GENDERS:
            raise DataError(
                f"{where}: gender must be one of {list(GENDERS)}, got {gender!r}."
            )
        genders.append(GENDERS.index(gender))
        occupations.append(_row(occupation_rows, occupation, "occupation", where))
    return _Users(
        rows=rows,
        ages=np.searchsorted(AGE_BUCKET_STARTS, ages, side="right").astype(np.int32),
        genders=np.array(genders, np.int32),
        occupations=np.array(occupations, np.int32),
        num_occupations=len(occupation_rows),
    )


def _read_movies(directory: pathlib.Path, *, num_genres: int) -> _Movies:
    rows: dict[str, int] = {}
    flags = []
    for where, fields in _read_lines(directory, "u.item", "|", 5 + num_genres):
        _add_row(rows, fields[0], "movie", where)
        for number, flag in enumerate(fields[5:]):
            if flag not in ("0", "1"):
                raise DataError(
                    f"{where}: the flag of genre {number} must be 0 or 1, got {flag!r}."
                )
        flags.append([flag == "1" for flag in fields[5:]])
    return _Movies(
        rows=rows, genres=_pack_flags(np.array(flags)), num_genres=num_genres
    )


def _pack_flags(flags: np.ndarray) -> np.ndarray:
    """Returns the indices of the set flags of each row, padded on the right."""
    numbers = np.where(flags, np.arange(flags.shape[1]), PADDING_ROW_ID)
    max_set = max(1, int(flags.sum(axis=1).max()))
    return np.sort(numbers, axis=1)[:, :max_set].astype(np.int32)


def _read_ratings(
    directory: pathlib.Path, name: str, users: _Users, movies: _Movies
) -> _Ratings:
    rows: dict[tuple[int, int], int] = {}
    for where, fields in _read_lines(directory, name, "\t", 4):
        user, movie, rating, timestamp = fields
        sample = (
            _row(users.rows, user, "user", where),
            _row(movies.rows, movie, "movie", where),
        )
        if sample in rows:
            raise DataError(f"{where}: user {user} rates movie {movie} a second time.")
        rows[sample] = _parse_int(rating, "rating", where)
        if not 1 <= rows[sample] <= NUM_RATINGS:
            raise DataError(
                f"{where}: rating must be 1 to {NUM_RATINGS}, got {rating}."
            )
        _parse_int(timestamp, "timestamp", where)
    samples = np.array(list(rows), np.int32)
    return _Ratings(
        path=directory / name,
        users=samples[:, 0],
        movies=samples[:, 1],
        ratings=np.array(list(rows.values()), np.float32),
    )


def _check_disjoint(train: _Ratings, test: _Ratings, num_movies: int) -> None:
    """Raises if held-out ratings occur in the training file, and thus in histories."""
    train_keys = train.users.astype(np.int64) * num_movies + train.movies
    test_keys = test.users.astype(np.int64) * num_movies + test.movies
    (shared,) = np.nonzero(np.isin(test_keys, train_keys))
    if len(shared):
        raise DataError(
            f"{test.path}, line {shared[0] + 1}: this user and movie are also in "
            f"{train.path}, as are {len(shared)} held-out ratings in total; choose "
            "files that share no rating, such as u1.base and u1.test."
        )


def _read_lines(
    directory: pathlib.Path, name: str, separator: str, num_fields: int
) -> Iterator[tuple[str, list[str]]]:
    """Yields each line's place, as "file, line number", and its fields.

    Empty lines at the end of the file are ignored.
    """
    path = directory / name
    if not path.is_file():
        raise DataError(
            f"{path} is missing; get MovieLens-100K (GroupLens, ml-100k), unpack it "
            "and give the folder that holds u.user."
        )
    # Titles have latin-1 accents. Latin-1 decodes every byte, so damage is reported as
    # a wrong field of a numbered line.
    text = path.read_text(encoding="latin-1").rstrip("\n")
    if not text:
        raise DataError(f"{path} is empty; unpack MovieLens-100K (ml-100k) again.")
    for number, line in enumerate(text.split("\n"), start=1):
        fields = line.split(separator)
        where = f"{path}, line {number}"
        if len(fields) != num_fields:
            raise DataError(
                f"{where}: expected {num_fields} fields separated by {separator!r}, "
                f"got {len(fields)}: {line[:80]!r}."
            )
        yield where, fields


def _parse_int(text: str, what: str, where: str) -> int:
    # int() alone also accepts "1_0", " 1" and digits of other scripts.
    if not (text.isascii() and text.isdigit()):
        raise DataError(f"{where}: {what} must be an integer, got {text!r}.")
    return int(text)


def _add_row(rows: dict[str, int], key: str, what: str, where: str) -> None:
    if what in ("user", "movie"):
        _parse_int(key, what, where)
    if key in rows:
        raise DataError(
            f"{where}: {what} {key!r} is listed a second time, first on line "
            f"{rows[key] + 1}."
        )
    rows[key] = len(rows)


def _row(rows: dict[str, int], key: str, what: str, where: str) -> int:
    if what in ("user", "movie"):
        _parse_int(key, what, where)
    if key not in rows:
        raise DataError(
            f"{where}: unknown {what} {key!r}; it must be one of the {len(rows)} that "
            f"the {what} file lists."
        )
    return rows[key]


def _rng(*words: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))
