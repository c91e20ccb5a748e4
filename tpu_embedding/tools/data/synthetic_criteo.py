"""Synthetic click log in the shape of Criteo's, one-hot or multi-hot.

The configs `dlrm` and `dlrm_dcnv2` train on it without files. Memory does not grow with
the vocabularies: a feature of 40 million rows costs no more than one of 40.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from tpu_embedding.tools.data.teacher import (
    TEACHER_STREAM,
    Inputs,
    TeacherDataset,
    ZipfIds,
    random_generator,
    splitmix64,
)

NUM_DENSE: Final = 13
CATEGORY_NAMES: Final = tuple(f"cat_{number:02d}" for number in range(26))
"""Names of the categorical features, in the order of Criteo's fields."""

EFFECT_SCALE: Final = 0.3
"""Standard deviation of one feature's or dense input's contribution to the logit."""

LOG_COUNT_MEAN: Final = 1.0
LOG_COUNT_DEVIATION: Final = 1.5
"""Parameters of the log-normal numbers whose floors are the synthetic counts.

A quarter of the counts is 0.
"""


class SyntheticCriteo(TeacherDataset):
    """Samples in the shape of Criteo's logs, with labels that a model can learn.

    The teacher's logit of a sample is

        b + 0.3 * sum over features f of sum_j e_f(id_fj) / sqrt(valence_f)
          + sum over dense inputs k of w_k x_k

    where `e_f(id)` is a hash of feature and id, uniform with mean 0 and standard
    deviation 1. The weights `w_k` are normal with standard deviation 0.3. Ids follow
    `ZipfIds`, independently of each other. Dense inputs are `log(1 + count)` of
    log-normal counts.

    Features: int32 `[batch]` for valence 1, otherwise int32 `[batch, valence]` without
    padding. Dense: float32 `[batch, 13]`.

    Args:
      batch_size: samples per batch.
      vocabulary_sizes: rows of each feature, `cat_00` and so on, at most 26.
      valences: ids per sample of each feature.
      seed: seed of the teacher and of all samples, at least 0.
      num_evaluation_samples: number of held-out samples.

    Example:
      >>> data = SyntheticCriteo(
      ...     batch_size=4, vocabulary_sizes=[2_000_000_000, 3], valences=[5, 1]
      ... )
      >>> batch = data.train_batch(0)
      >>> batch.dense.shape, [ids.shape for ids in batch.features.values()]
      ((4, 13), [(4, 5), (4,)])
    """

    click_rate = 0.25  # close to that of the Kaggle challenge
    num_dense = NUM_DENSE

    def __init__(
        self,
        *,
        batch_size: int,
        vocabulary_sizes: Sequence[int],
        valences: Sequence[int],
        seed: int = 0,
        num_evaluation_samples: int = 65_536,
    ):
        super().__init__(
            batch_size=batch_size,
            seed=seed,
            num_evaluation_samples=num_evaluation_samples,
        )
        self.vocabulary_sizes = dict(
            zip(CATEGORY_NAMES, vocabulary_sizes, strict=False)
        )
        self._valences = valences
        generator = random_generator(seed=seed, stream=TEACHER_STREAM)
        self._salt = generator.integers(2**64, dtype=np.uint64)
        self._dense_weights = generator.normal(0.0, EFFECT_SCALE, NUM_DENSE)

    def _draw_inputs(
        self, generator: np.random.Generator, num_samples: int, step: int | None = None
    ) -> Inputs:
        del step
        features, logits = {}, np.zeros(num_samples)
        for number, (name, size) in enumerate(self.vocabulary_sizes.items()):
            valence = self._valences[number]
            drawn = ZipfIds(vocabulary_size=size).draw(
                generator, (num_samples, valence)
            )
            # Hashes need no table of effects, so vocabularies may be large.
            keys = (np.uint64(number + 1) << np.uint64(32)) + drawn.astype(np.uint64)
            hashes = splitmix64(keys ^ self._salt)
            # A uniform number in [-1, 1) has the standard deviation 1 / sqrt(3).
            effects = np.sqrt(3.0 / valence) * (hashes * 2.0**-63 - 1.0)
            logits += EFFECT_SCALE * effects.sum(axis=1)
            features[name] = drawn if valence > 1 else drawn[:, 0]
        counts = generator.lognormal(
            LOG_COUNT_MEAN, LOG_COUNT_DEVIATION, (num_samples, NUM_DENSE)
        ).astype(np.int64)
        dense = np.log1p(counts).astype(np.float32)
        return Inputs(
            features=features, dense=dense, logits=logits + dense @ self._dense_weights
        )
