"""Synthetic click logs with a known best log loss: a small log, and one like Criteo's.

If you have no files, the configs for Criteo's log train on the second log.
"""

import dataclasses
from typing import Any, Final

import numpy as np

from tpu_embedding.tools.data.batch import SyntheticSource
from tpu_embedding.tools.data.teacher import (
    INTERACTION_RANK,
    INTERACTION_SCALE,
    TEACHER_STREAM,
    Inputs,
    TeacherDataset,
    ZipfIds,
    random_generator,
    splitmix64,
)
from tpu_embedding.types import PADDING_ROW_ID

VOCABULARY_SIZES: Final = dict(
    user=2_000, item=1_000, category=100, device=20, tags=500
)
"""Table rows per feature, 3,620 in total."""

EFFECT_SCALES: Final = dict(user=0.8, item=0.9, category=0.5, device=0.4, tags=1.5)
"""For each feature, the standard deviation of its ids' effects on the logit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticClicksSource(SyntheticSource):
    """A small synthetic click log with a known best log loss. It reads no files.

    Attributes:
      num_evaluation_samples: number of held-out samples.
      valence: maximum number of tags per sample.
      zipf_exponent: skew in the ids; 0 is uniform.

    Example:
      >>> source = SyntheticClicksSource(num_evaluation_samples=10)
      >>> batch = source.open(None, batch_size=4, seed=0).train_batch(0)
      >>> sorted(batch.features)
      ['category', 'device', 'item', 'tags', 'user']
    """

    num_evaluation_samples: int
    valence: int = 8
    zipf_exponent: float = 1.0

    def draw(self, *, batch_size: int, seed: int) -> "SyntheticClicks":
        """Builds the data set."""
        return SyntheticClicks(self, batch_size=batch_size, seed=seed)


class SyntheticClicks(TeacherDataset):
    """Clicks by users on items, drawn by a teacher that an embedding model can match.

    The teacher's logit for a sample is

        b + e_user + e_item + e_category + e_device + mean(e_tag) + <f_user, g_item>

    Effects `e` and the vectors `f` and `g` are normally distributed. Ids follow
    `ZipfIds`.

    Tags are int32 `[batch, valence]`, padded on the right; other features are int32
    `[batch]`. With the defaults, a constant prediction has a log loss of about 0.50,
    and the teacher has about 0.365.

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
        super().__init__(source, batch_size=batch_size, seed=seed)
        self.vocabulary_sizes = dict(VOCABULARY_SIZES)
        self.valence = source.valence
        self._ids = {
            name: ZipfIds(vocabulary_size=size, exponent=source.zipf_exponent)
            for name, size in VOCABULARY_SIZES.items()
        }
        # Reordering these draws would change the data, and thus the configs' results.
        generator = random_generator(seed=seed, stream=TEACHER_STREAM)
        self._effects = {
            name: generator.normal(0.0, scale, VOCABULARY_SIZES[name])
            for name, scale in EFFECT_SCALES.items()
        }
        # If two independent normals have mean 0, their product's standard deviation is
        # the product of their standard deviations.
        factor_scale = np.sqrt(INTERACTION_SCALE / np.sqrt(INTERACTION_RANK))
        self._factors = {
            name: generator.normal(0.0, factor_scale, (size, INTERACTION_RANK))
            for name, size in VOCABULARY_SIZES.items()
            if name in ("user", "item")
        }

    def _draw_inputs(
        self, generator: np.random.Generator, num_samples: int, step: int
    ) -> Inputs:
        del step
        features, logits = {}, np.zeros(num_samples)
        for name, ids in self._ids.items():
            if name != "tags":
                features[name] = ids.draw(generator, num_samples)
                logits += self._effects[name][features[name]]
        users, items = (self._factors[name][features[name]] for name in self._factors)
        logits += np.einsum("sr,sr->s", users, items)
        num_tags = generator.integers(0, self.valence + 1, num_samples)
        is_tag = np.arange(self.valence) < num_tags[:, None]
        tags = self._ids["tags"].draw(generator, is_tag.shape)
        effects = np.where(is_tag, self._effects["tags"][tags], 0.0)
        features["tags"] = np.where(is_tag, tags, np.int32(PADDING_ROW_ID))
        logits += effects.sum(axis=1) / np.maximum(num_tags, 1)
        return features, None, logits


NUM_DENSE: Final = 13
CATEGORY_NAMES: Final = tuple(f"cat_{number:02d}" for number in range(26))
"""Names of the categorical features, in the order of Criteo's fields."""

EFFECT_SCALE: Final = 0.3
"""Standard deviation of one feature's or dense input's contribution to the logit."""

LOG_COUNT_MEAN: Final = 1.0
LOG_COUNT_DEVIATION: Final = 1.5
"""Parameters of a log-normal distribution. Its samples are rounded down to counts.

A quarter of the counts are 0.
"""


class SyntheticCriteo(TeacherDataset):
    """Samples shaped like Criteo's logs, with labels that a model can learn.

    The teacher's logit for a sample is

        b + 0.3 * sum over features f of sum_j e_f(id_fj) / sqrt(valence_f)
          + sum over dense inputs k of w_k x_k

    `e_f(id)` is a hash of feature and id, uniform with mean 0 and standard deviation 1.
    The weights `w_k` are normal with standard deviation 0.3. Ids follow `ZipfIds`. They
    are int32, `[batch]` for valence 1 and otherwise `[batch, valence]`.

    Example:
      >>> from tpu_embedding.tools.train import CriteoSource
      >>> source = CriteoSource(
      ...     vocabulary_size=2_000_000_000,
      ...     vocabulary_sizes=(2_000_000_000, 3),
      ...     valences=(5, 1),
      ...     num_evaluation_samples=10,
      ... )
      >>> batch = source.open(None, batch_size=4, seed=0).train_batch(0)
      >>> batch.dense.shape, [ids.shape for ids in batch.features.values()]
      ((4, 13), [(4, 5), (4,)])
    """

    click_rate = 0.25  # close to the rate in Kaggle's log
    num_dense = NUM_DENSE

    def __init__(self, source: Any, *, batch_size: int, seed: int):
        super().__init__(source, batch_size=batch_size, seed=seed)
        self.vocabulary_sizes = dict(zip(CATEGORY_NAMES, source.sizes, strict=False))
        limit = source.max_valence or max(source.valences)
        self._valences = [min(valence, limit) for valence in source.valences]
        generator = random_generator(seed=seed, stream=TEACHER_STREAM)
        self._salt = generator.integers(2**64, dtype=np.uint64)
        self._dense_weights = generator.normal(0.0, EFFECT_SCALE, NUM_DENSE)

    def _draw_inputs(
        self, generator: np.random.Generator, num_samples: int, step: int
    ) -> Inputs:
        del step
        features, logits = {}, np.zeros(num_samples)
        for number, (name, size) in enumerate(self.vocabulary_sizes.items()):
            valence = self._valences[number]
            shape = (num_samples, valence)
            drawn = ZipfIds(vocabulary_size=size).draw(generator, shape)
            # Hashed effects need no table, so vocabularies can be large. The upper half
            # of a key has the feature's number, so that equal ids in different features
            # have different effects.
            keys = (np.uint64(number + 1) << np.uint64(32)) + drawn.astype(np.uint64)
            hashes = splitmix64(keys ^ self._salt)
            # A uniform number in [-1, 1) has the standard deviation 1 / sqrt(3).
            effects = np.sqrt(3.0 / valence) * (hashes * 2.0**-63 - 1.0)
            logits += EFFECT_SCALE * effects.sum(axis=1)
            features[name] = drawn if valence > 1 else drawn[:, 0]
        law = (LOG_COUNT_MEAN, LOG_COUNT_DEVIATION)
        counts = generator.lognormal(*law, (num_samples, NUM_DENSE)).astype(np.int64)
        dense = np.log1p(counts).astype(np.float32)
        logits += dense @ self._dense_weights
        return features, dense, logits
