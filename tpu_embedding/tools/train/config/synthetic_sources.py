"""Data sources of synthetic samples that read no file, for run configs."""

import abc
import dataclasses
import pathlib

from tpu_embedding.tools.data.batch import Dataset
from tpu_embedding.tools.data.interactions import Interactions
from tpu_embedding.tools.data.synthetic_clicks import SyntheticClicks
from tpu_embedding.tools.data.synthetic_stream import SyntheticStream, Vocabulary
from tpu_embedding.tools.train.config.data_source import refuse_data_dir


class _SyntheticSource(abc.ABC):
    """Base of the sources whose data set needs no file, and is its own outline."""

    def open(
        self, data_dir: pathlib.Path | None, *, batch_size: int, seed: int
    ) -> Dataset:
        """Returns the data set.

        Raises:
          DataError: if a directory is given, because the source reads no file.
        """
        refuse_data_dir(data_dir)
        return self.outline(batch_size=batch_size, seed=seed)

    @abc.abstractmethod
    def outline(self, *, batch_size: int, seed: int) -> Dataset:
        """Returns the data set."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticClicksSource(_SyntheticSource):
    """Source of `SyntheticClicks`; reads no file.

    Attributes:
      num_evaluation_samples: number of held-out samples.
      valence: maximum number of tags per sample.
      zipf_exponent: skew of the ids.
    """

    num_evaluation_samples: int
    valence: int = 8
    zipf_exponent: float = 1.0

    def outline(self, *, batch_size: int, seed: int) -> SyntheticClicks:
        """Returns the data set."""
        return SyntheticClicks(
            batch_size=batch_size, seed=seed, **dataclasses.asdict(self)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class InteractionsSource(_SyntheticSource):
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

    def outline(self, *, batch_size: int, seed: int) -> Interactions:
        """Returns the data set."""
        return Interactions(
            batch_size=batch_size, seed=seed, **dataclasses.asdict(self)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticStreamSource(_SyntheticSource):
    """Source of `SyntheticStream`; reads no file.

    Attributes:
      num_users: number of users that live at a time.
      num_items: number of items that live at a time.
      life_steps: number of training steps that an id lives.
      evaluation_step: training step whose living ids the held-out samples use, at
        least the number of steps.
      num_evaluation_samples: number of held-out samples.
      vocabulary: the tables: `"dynamic"`, `"hashed"` of the same memory, or
        `"unlimited"`, with a row for every id.
      capacity_ratio: capacity of a dynamic table over the number of living ids.
      row_bytes: bytes of a row and its slot variables, for the size of hashed tables.
      zipf_exponent: skew of the ids; 0 is uniform.
    """

    num_users: int
    num_items: int
    life_steps: int
    evaluation_step: int
    num_evaluation_samples: int
    vocabulary: Vocabulary = "dynamic"
    capacity_ratio: float = 1.3
    row_bytes: int = 128
    zipf_exponent: float = 1.0

    def outline(self, *, batch_size: int, seed: int) -> SyntheticStream:
        """Returns the data set."""
        fields = dataclasses.asdict(self)
        live_ids = {name: fields.pop(f"num_{name}s") for name in ("user", "item")}
        return SyntheticStream(
            batch_size=batch_size, seed=seed, live_ids=live_ids, **fields
        )
