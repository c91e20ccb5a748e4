"""Synthetic click log with vocabularies of any size.

Memory does not grow with the vocabulary: a feature of 40 million rows costs no more
than one of 40. `training/random_source.py` opens the data set for run configs.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from tpu_embedding.tools.data.criteo_format import splitmix64
from tpu_embedding.tools.data.teacher import (
    TEACHER_STREAM,
    Inputs,
    TeacherDataset,
    count_problems,
    random_generator,
)
from tpu_embedding.tools.data.zipf import ZipfIds


class RandomClicks(TeacherDataset):
    """Click log with one-hot and multi-hot features and dense inputs.

    The teacher's logit of a sample is

        b + effect_scale * (sum over features f of sum_j e_f(id_fj) / sqrt(valence_f)
                            + sum over dense inputs k of w_k x_k)

    where `e_f(id)` is a hash of feature and id, uniform with mean 0 and standard
    deviation 1. The weights `w_k` and the dense inputs `x_k` are standard normal. Every
    feature and every dense input thus has the same influence. Ids follow `ZipfIds`,
    independently of each other.

    Features: int32 `[batch]` for valence 1, otherwise int32 `[batch, valence]` without
    padding. Dense: float32 `[batch, num_dense]`; None if `num_dense` is 0.

    Args:
      batch_size: samples per batch.
      seed: seed of the teacher and of all samples, at least 0.
      vocabulary_sizes: number of rows by feature name.
      valences: ids per sample by feature name, for the same features.
      num_dense: dense inputs per sample; may be 0.
      effect_scale: standard deviation of one feature's contribution to the logit.
      zipf_exponent: skew of the ids; 0 is uniform.
      click_rate: expected mean of the labels.
      num_evaluation_samples: number of held-out samples.

    Raises:
      ValueError: if arguments are out of range; the message names all of them.

    Example:
      >>> data = RandomClicks(
      ...     batch_size=4,
      ...     vocabulary_sizes={"a": 2_000_000_000, "b": 3},
      ...     valences={"a": 5, "b": 1},
      ...     num_dense=2,
      ...     num_evaluation_samples=10,
      ... )
      >>> batch = data.train_batch(0)
      >>> batch.features["a"].shape, batch.features["b"].shape, batch.dense.shape
      ((4, 5), (4,), (4, 2))
    """

    def __init__(
        self,
        *,
        batch_size: int,
        vocabulary_sizes: Mapping[str, int],
        valences: Mapping[str, int],
        num_dense: int,
        num_evaluation_samples: int,
        seed: int = 0,
        effect_scale: float = 0.3,
        zipf_exponent: float = 1.0,
        click_rate: float = 0.25,
    ):
        self.vocabulary_sizes = dict(vocabulary_sizes)
        self.valences = dict(valences)
        self.num_dense = num_dense
        self.effect_scale = effect_scale
        super().__init__(
            batch_size=batch_size,
            seed=seed,
            num_evaluation_samples=num_evaluation_samples,
            click_rate=click_rate,
        )
        self._ids = {
            name: ZipfIds(vocabulary_size=size, exponent=zipf_exponent)
            for name, size in self.vocabulary_sizes.items()
        }
        generator = random_generator(seed=seed, stream=TEACHER_STREAM)
        self._salts = {
            name: generator.integers(2**64, dtype=np.uint64) for name in self._ids
        }
        self._dense_weights = generator.normal(0.0, effect_scale, num_dense)

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        for field in ("vocabulary_sizes", "valences"):
            for name, value in getattr(self, field).items():
                yield from count_problems(
                    "RandomClicks", **{f"{field}[{name!r}]": value}
                )
        if self.vocabulary_sizes.keys() != self.valences.keys():
            yield (
                "RandomClicks.valences must name the features of vocabulary_sizes, "
                f"{sorted(self.vocabulary_sizes)}, got {sorted(self.valences)}"
            )
        if not isinstance(self.num_dense, int) or self.num_dense < 0:
            yield (
                "RandomClicks.num_dense must be an int of at least 0, got "
                f"{self.num_dense!r}"
            )
        if not (np.isfinite(self.effect_scale) and self.effect_scale >= 0):
            yield (
                "RandomClicks.effect_scale must be a finite number of at least 0, got "
                f"{self.effect_scale!r}"
            )

    def _draw_inputs(self, generator: np.random.Generator, num_samples: int) -> Inputs:
        features, logits = {}, np.zeros(num_samples)
        for name, ids in self._ids.items():
            valence = self.valences[name]
            drawn = ids.draw(generator, (num_samples, valence))
            effects = _effects(drawn, self._salts[name]).sum(axis=1)
            logits += self.effect_scale / np.sqrt(valence) * effects
            features[name] = drawn if valence > 1 else drawn[:, 0]
        dense = None
        if self.num_dense:
            dense = generator.standard_normal(
                (num_samples, self.num_dense), dtype=np.float32
            )
            logits += dense @ self._dense_weights
        return Inputs(features=features, dense=dense, logits=logits)


def _effects(ids: np.ndarray, salt: np.uint64) -> np.ndarray:
    """Returns hashes of ids as uniform numbers of mean 0 and standard deviation 1."""
    # The uniform distribution on [-1, 1) has standard deviation 1 / sqrt(3).
    return np.sqrt(3.0) * (splitmix64(ids.astype(np.uint64) ^ salt) * 2.0**-63 - 1.0)
