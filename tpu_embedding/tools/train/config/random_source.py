"""Data sources of synthetic samples, for run configs.

They need no file, and their memory does not grow with the vocabulary.
"""

import dataclasses
import pathlib
from typing import Any

from tpu_embedding.paths import is_local_path, local_path
from tpu_embedding.tools.data.batch import DataError, Dataset
from tpu_embedding.tools.data.criteo_format import CATEGORY_NAMES
from tpu_embedding.tools.data.interactions import Interactions
from tpu_embedding.tools.data.random_clicks import RandomClicks


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomClicksSource:
    """Source of `RandomClicks` with the feature names of Criteo's log; reads no file.

    Attributes:
      vocabulary_sizes: table rows of the features `cat_00`, `cat_01`, ...; at most 26
        features.
      valences: ids per sample of each feature.
      num_dense: number of dense inputs per sample.
      num_evaluation_samples: number of held-out samples.
      zipf_exponent: skew of the ids; 0 is uniform.
      max_vocabulary_size: upper limit for all `vocabulary_sizes`, so that a small
        machine can hold the tables; None is no limit.
      max_valence: upper limit for all `valences`; None is no limit.
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
    ) -> Dataset:
        """Returns the data set.

        Raises:
          DataError: if a directory is given, because the source reads no file.
        """
        refuse_data_dir(data_dir)
        return self.outline(batch_size=batch_size, seed=seed)

    def outline(self, *, batch_size: int, seed: int) -> RandomClicks:
        """Returns the data set itself, which reads no file."""
        return RandomClicks(
            batch_size=batch_size,
            seed=seed,
            vocabulary_sizes=by_feature(
                self.vocabulary_sizes, self.max_vocabulary_size
            ),
            valences=by_feature(self.valences, self.max_valence),
            num_dense=self.num_dense,
            num_evaluation_samples=self.num_evaluation_samples,
            zipf_exponent=self.zipf_exponent,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class InteractionsSource:
    """Source of `Interactions`; reads no file.

    Attributes:
      num_users: rows of the user table.
      num_items: rows of the item table.
      history_length: maximum items in a sample's history.
      num_evaluation_samples: number of held-out samples.
      num_groups: number of hidden groups of users and items.
      noise: share of choices that are independent of the user, in [0, 1].
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
          DataError: if a directory is given, because the source reads no file.
        """
        refuse_data_dir(data_dir)
        return Interactions(
            batch_size=batch_size, seed=seed, **dataclasses.asdict(self)
        )

    def outline(self, *, batch_size: int, seed: int) -> Interactions:
        """Returns the data set itself, which reads no file."""
        return self.open(None, batch_size=batch_size, seed=seed)


def refuse_data_dir(data_dir: pathlib.Path | None) -> None:
    """Raises an error if a data directory is given to a source that reads no file.

    Raises:
      DataError: if a directory is given.
    """
    if data_dir is not None:
        raise DataError(
            f"This config generates its data and reads no file, got {data_dir}; leave "
            "--data-dir out."
        )


def by_feature(values: tuple[int, ...], max_value: int | None = None) -> dict[str, int]:
    """Returns feature name to value, each limited to `max_value`."""
    names = CATEGORY_NAMES[: len(values)]
    limited = (v if max_value is None else min(v, max_value) for v in values)
    return dict(zip(names, limited, strict=True))


def local_data_dir(data_dir: Any) -> pathlib.Path:
    """Returns the path of a source that reads files of this machine.

    Raises:
      DataError: if it is something else.
    """
    if not is_local_path(data_dir):
        raise DataError(
            f"data_dir must be a path of this machine for this config, got "
            f"{data_dir!r}; mount or copy the files, and give their directory."
        )
    return local_path(data_dir)
