"""Data that need no file and no memory of a vocabulary's size, for run configs."""

import dataclasses
import pathlib

from tpu_embedding.data.batch import DataError
from tpu_embedding.data.criteo_format import CATEGORY_NAMES
from tpu_embedding.data.interactions import Interactions
from tpu_embedding.data.random_clicks import RandomClicks


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomClicksSource:
    """`RandomClicks` with features named as those of Criteo's log; reads no file.

    Attributes:
      vocabulary_sizes: rows of each feature, `cat_00`, `cat_01`, ...; at most 26.
      valences: ids of a sample in each feature.
      num_dense: dense inputs.
      num_evaluation_samples: held-out samples.
      zipf_exponent: skew of the ids; 0 is uniform.
      max_vocabulary_size: larger tables are cut to it, or None; for a small machine.
      max_valence: likewise of the ids of a sample.
    """

    vocabulary_sizes: tuple[int, ...]
    valences: tuple[int, ...]
    num_dense: int
    num_evaluation_samples: int
    zipf_exponent: float = 1.0
    max_vocabulary_size: int | None = None
    max_valence: int | None = None

    def __post_init__(self):
        problems = []
        num_features = len(self.vocabulary_sizes)
        if num_features != len(self.valences) or num_features > len(CATEGORY_NAMES):
            problems.append(
                "RandomClicksSource.vocabulary_sizes and valences must be of one "
                f"length, at most {len(CATEGORY_NAMES)}, got {num_features} and "
                f"{len(self.valences)}"
            )
        problems += [
            f"RandomClicksSource.{name} must be at least 1 or None, got {value!r}"
            for name, value in (
                ("max_vocabulary_size", self.max_vocabulary_size),
                ("max_valence", self.max_valence),
            )
            if value is not None and value < 1
        ]
        if problems:
            raise ValueError("; ".join(problems) + ".")

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> RandomClicks:
        """Returns the data set.

        Raises:
          DataError: if a directory is given.
        """
        _refuse_files(data_dir)
        return RandomClicks(
            batch_size=batch_size,
            seed=seed,
            vocabulary_sizes=_by_feature(
                self.vocabulary_sizes, self.max_vocabulary_size
            ),
            valences=_by_feature(self.valences, self.max_valence),
            num_dense=self.num_dense,
            num_evaluation_samples=self.num_evaluation_samples,
            zipf_exponent=self.zipf_exponent,
        )

    def outline(self, *, batch_size: int, seed: int) -> RandomClicks:
        """Returns the data set."""
        return self.open(None, batch_size=batch_size, seed=seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InteractionsSource:
    """`Interactions`; reads no file.

    Attributes:
      num_users: rows of the users' table.
      num_items: rows of the items' table.
      history_length: most items of a sample's history.
      num_evaluation_samples: held-out samples.
      num_groups: hidden groups of users and items.
      noise: share of choices that are independent of the user.
      zipf_exponent: skew of the ids; 0 is uniform.
    """

    num_users: int
    num_items: int
    history_length: int
    num_evaluation_samples: int
    num_groups: int = 32
    noise: float = 0.2
    zipf_exponent: float = 1.0

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> Interactions:
        """Returns the data set.

        Raises:
          DataError: if a directory is given.
        """
        _refuse_files(data_dir)
        return Interactions(
            batch_size=batch_size, seed=seed, **dataclasses.asdict(self)
        )

    def outline(self, *, batch_size: int, seed: int) -> Interactions:
        """Returns the data set."""
        return self.open(None, batch_size=batch_size, seed=seed)


def _refuse_files(data_dir: pathlib.Path | None) -> None:
    if data_dir is not None:
        raise DataError(
            f"This config makes its data up and would not read {data_dir}; leave "
            "--data-dir out."
        )


def _by_feature(values: tuple[int, ...], largest: int | None) -> dict[str, int]:
    names = CATEGORY_NAMES[: len(values)]
    cut = (value if largest is None else min(value, largest) for value in values)
    return dict(zip(names, cut, strict=True))
