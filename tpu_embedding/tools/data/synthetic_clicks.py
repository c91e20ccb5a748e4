"""Small synthetic click log with a known best log loss.

`tpu-embedding train` uses it by default. It needs no file and has every kind of id
column: large and small vocabularies, skew, samples with several ids and with none. A
good training run comes close to `teacher_log_loss()`.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from tpu_embedding.tools.data.batch import SyntheticSource
from tpu_embedding.tools.data.teacher import (
    TEACHER_STREAM,
    Inputs,
    TeacherDataset,
    ZipfIds,
    random_generator,
)
from tpu_embedding.types import PADDING_ROW_ID

VOCABULARY_SIZES: Final[Mapping[str, int]] = MappingProxyType(
    {"user": 2_000, "item": 1_000, "category": 100, "device": 20, "tags": 500}
)
"""Number of rows of each feature, 3,620 in total."""

EFFECT_SCALES: Final[Mapping[str, float]] = MappingProxyType(
    {"user": 0.8, "item": 0.9, "category": 0.5, "device": 0.4, "tags": 1.5}
)
"""Standard deviation of the effect on the logit, over the ids of each feature."""

INTERACTION_RANK: Final = 2
INTERACTION_SCALE: Final = 0.6
"""Standard deviation of the user-item interaction's contribution to the logit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticClicksSource(SyntheticSource):
    """Source of `SyntheticClicks`; reads no file.

    Attributes:
      num_evaluation_samples: number of held-out samples.
      valence: maximum number of tags per sample.
      zipf_exponent: skew of the ids; 0 is uniform.
    """

    num_evaluation_samples: int
    valence: int = 8
    zipf_exponent: float = 1.0

    def draw(self, *, batch_size: int, seed: int) -> "SyntheticClicks":
        """Returns the data set."""
        return SyntheticClicks(self, batch_size=batch_size, seed=seed)


class SyntheticClicks(TeacherDataset):
    """Clicks of users on items, from a teacher that an embedding model can match.

    The teacher's logit of a sample is

        b + e_user + e_item + e_category + e_device + mean(e_tag) + <f_user, g_item>

    Each id has an effect `e`; each user has a vector `f` and each item a vector `g`, of
    `INTERACTION_RANK` elements. All are drawn once from normal distributions. The mean
    is over the tags of the sample, and 0 without tags. Ids follow `ZipfIds`,
    independently of each other.

    Features: int32 `[batch]` for "user", "item", "category" and "device"; int32
    `[batch, valence]` for "tags", filled from the left and padded with
    `PADDING_ROW_ID`. The number of tags is uniform in `0 .. valence`. An id that occurs
    twice in a sample counts twice. There are no dense inputs.

    With the defaults, the log loss is about 0.50 for a constant and about 0.365 for
    the teacher.

    Example:
      >>> source = SyntheticClicksSource(num_evaluation_samples=10)
      >>> data = source.open(None, batch_size=4, seed=0)
      >>> data.train_batch(0).features["tags"].shape
      (4, 8)
      >>> [int(batch.weights.sum()) for batch in data.evaluation_batches()]
      [4, 4, 2]
    """

    click_rate = 0.2

    def __init__(self, source: SyntheticClicksSource, *, batch_size: int, seed: int):
        super().__init__(
            batch_size=batch_size,
            seed=seed,
            num_evaluation_samples=source.num_evaluation_samples,
        )
        self.vocabulary_sizes = dict(VOCABULARY_SIZES)
        self.valence = source.valence
        self._ids = {
            name: ZipfIds(vocabulary_size=size, exponent=source.zipf_exponent)
            for name, size in VOCABULARY_SIZES.items()
        }
        generator = random_generator(seed=seed, stream=TEACHER_STREAM)
        self._effects = {
            name: generator.normal(0.0, scale, VOCABULARY_SIZES[name])
            for name, scale in EFFECT_SCALES.items()
        }
        # The standard deviation of a product of independent centred normals is the
        # product of their standard deviations.
        factor_scale = np.sqrt(INTERACTION_SCALE / np.sqrt(INTERACTION_RANK))
        self._user_factors, self._item_factors = (
            generator.normal(
                0.0, factor_scale, (VOCABULARY_SIZES[name], INTERACTION_RANK)
            )
            for name in ("user", "item")
        )

    def _draw_inputs(
        self, generator: np.random.Generator, num_samples: int, step: int | None = None
    ) -> Inputs:
        del step
        features, logits = {}, np.zeros(num_samples)
        for name, ids in self._ids.items():
            if name != "tags":
                features[name] = ids.draw(generator, num_samples)
                logits += self._effects[name][features[name]]
        logits += np.einsum(
            "sr,sr->s",
            self._user_factors[features["user"]],
            self._item_factors[features["item"]],
        )
        num_tags = generator.integers(0, self.valence + 1, num_samples)
        is_tag = np.arange(self.valence) < num_tags[:, None]
        tags = self._ids["tags"].draw(generator, is_tag.shape)
        effects = np.where(is_tag, self._effects["tags"][tags], 0.0)
        features["tags"] = np.where(is_tag, tags, np.int32(PADDING_ROW_ID))
        return Inputs(
            features=features,
            logits=logits + effects.sum(axis=1) / np.maximum(num_tags, 1),
        )
