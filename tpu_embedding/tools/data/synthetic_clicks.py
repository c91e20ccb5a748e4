"""Small synthetic click log with a known best log loss.

`tpu-embedding train` uses it by default. It needs no file and has every kind of id
column: large and small vocabularies, skew, samples with several ids and with none. A
good training run comes close to `teacher_log_loss()`.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from tpu_embedding.tools.data.argument_checks import count_problems
from tpu_embedding.tools.data.random_streams import TEACHER_STREAM, random_generator
from tpu_embedding.tools.data.teacher import Inputs, TeacherDataset
from tpu_embedding.types import PADDING_ROW_ID

DEFAULT_VOCABULARY_SIZES: Final[Mapping[str, int]] = MappingProxyType(
    {"user": 2_000, "item": 1_000, "category": 100, "device": 20, "tags": 500}
)
"""Number of rows of each feature, 3,620 in total."""

MULTI_HOT_FEATURE: Final = "tags"

EFFECT_SCALES: Final[Mapping[str, float]] = MappingProxyType(
    {"user": 0.8, "item": 0.9, "category": 0.5, "device": 0.4, "tags": 1.5}
)
"""Standard deviation of the effect on the logit, over the ids of each feature."""

INTERACTION_RANK: Final = 2
INTERACTION_SCALE: Final = 0.6
"""Standard deviation of the user-item interaction's contribution to the logit."""


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
    the teacher. The target of a trained model is set in its run config.

    Args:
      batch_size: samples per batch.
      seed: seed of the teacher and of all samples, at least 0.
      vocabulary_sizes: number of rows of each of the five features.
      valence: maximum number of tags per sample.
      zipf_exponent: skew of the ids; 0 is uniform.
      click_rate: expected mean of the labels.
      num_evaluation_samples: number of held-out samples.

    Raises:
      ValueError: if arguments are out of range; the message names all of them.

    Example:
      >>> data = SyntheticClicks(batch_size=4, num_evaluation_samples=10)
      >>> data.train_batch(0).features["tags"].shape
      (4, 8)
      >>> [int(batch.weights.sum()) for batch in data.evaluation_batches()]
      [4, 4, 2]
    """

    def __init__(
        self,
        *,
        batch_size: int = 2048,
        seed: int = 0,
        vocabulary_sizes: Mapping[str, int] = DEFAULT_VOCABULARY_SIZES,
        valence: int = 8,
        zipf_exponent: float = 1.0,
        click_rate: float = 0.2,
        num_evaluation_samples: int = 102_400,
    ):
        self.valence = valence
        super().__init__(
            batch_size=batch_size,
            seed=seed,
            num_evaluation_samples=num_evaluation_samples,
            vocabulary_sizes=vocabulary_sizes,
            zipf_exponent=zipf_exponent,
            click_rate=click_rate,
        )
        self._draw_teacher()

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        yield from count_problems("SyntheticClicks", valence=self.valence)
        if self.vocabulary_sizes.keys() != EFFECT_SCALES.keys():
            yield (
                "SyntheticClicks.vocabulary_sizes must name the features "
                f"{sorted(EFFECT_SCALES)}, got {sorted(self.vocabulary_sizes)}"
            )
        for name, size in self.vocabulary_sizes.items():
            yield from count_problems(
                "SyntheticClicks", **{f"vocabulary_sizes[{name!r}]": size}
            )

    def _draw_teacher(self) -> None:
        generator = random_generator(seed=self.seed, stream=TEACHER_STREAM)
        self._effects = {
            name: generator.normal(0.0, scale, self.vocabulary_sizes[name])
            for name, scale in EFFECT_SCALES.items()
        }
        # The standard deviation of a product of independent centred normals is the
        # product of their standard deviations.
        factor_scale = np.sqrt(INTERACTION_SCALE / np.sqrt(INTERACTION_RANK))
        self._user_factors, self._item_factors = (
            generator.normal(
                0.0, factor_scale, (self.vocabulary_sizes[name], INTERACTION_RANK)
            )
            for name in ("user", "item")
        )

    def _draw_inputs(self, generator: np.random.Generator, num_samples: int) -> Inputs:
        features, logits = {}, np.zeros(num_samples)
        for name, ids in self._ids.items():
            if name != MULTI_HOT_FEATURE:
                features[name] = ids.draw(generator, num_samples)
                logits += self._effects[name][features[name]]
        logits += np.einsum(
            "sr,sr->s",
            self._user_factors[features["user"]],
            self._item_factors[features["item"]],
        )
        tags, tag_logits = self._draw_tags(generator, num_samples)
        features[MULTI_HOT_FEATURE] = tags
        return Inputs(features=features, dense=None, logits=logits + tag_logits)

    def _draw_tags(
        self, generator: np.random.Generator, num_samples: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draws padded ids `[samples, valence]` and their mean effects `[samples]`."""
        num_tags = generator.integers(0, self.valence + 1, num_samples)
        used_mask = np.arange(self.valence) < num_tags[:, None]
        ids = self._ids[MULTI_HOT_FEATURE].draw(generator, used_mask.shape)
        effects = np.where(used_mask, self._effects[MULTI_HOT_FEATURE][ids], 0.0)
        ids = np.where(used_mask, ids, np.int32(PADDING_ROW_ID))
        return ids, effects.sum(axis=1) / np.maximum(num_tags, 1)
