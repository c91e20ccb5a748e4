"""Random streams, skewed ids and the teacher for synthetic data sets.

The teacher's click probabilities have the lowest expected log loss, because the labels
are drawn from them. The gap to `teacher_log_loss()` shows how well a model has learned.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from tpu_embedding.tools.data.batch import Batch, join_samples, padded_batches

TEACHER_STREAM: Final = 0
TRAIN_STREAM: Final = 1
EVALUATION_STREAM: Final = 2

WORD: Final = np.uint64(0x9E3779B97F4A7C15)
"""Increment of SplitMix64: 2**64 over the golden ratio, rounded to an odd number."""


def random_generator(*, seed: int, stream: int, step: int = 0) -> np.random.Generator:
    """Makes a random generator that depends only on the arguments.

    Args:
      seed: data set seed, at least 0.
      stream: stream number, at least 0. Streams with the same seed are independent.
      step: step in the stream, at least 0. Steps don't depend on earlier steps.

    Example:
      >>> round(random_generator(seed=0, stream=1, step=5).random(), 3)
      0.601
    """
    return np.random.Generator(
        np.random.Philox(np.random.SeedSequence([seed, stream, step]))
    )


def mix64(words: np.ndarray) -> np.ndarray:
    """Hashes uint64 words; distinct words have distinct hashes.

    Source: the finalizer in Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators" (OOPSLA 2014), with the constants in Vigna's `splitmix64.c`.
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def splitmix64(keys: np.ndarray) -> np.ndarray:
    """Computes SplitMix64's first output for each uint64 seed."""
    return mix64(keys + WORD)


GOLDEN_RATIO: Final = (math.sqrt(5.0) - 1.0) / 2.0
"""Number whose multiples modulo 1 are spread most evenly.

Source: Knuth, The Art of Computer Programming, volume 3, section 6.4.
"""


# Ids in click logs are skewed, so uniform ids would not be a realistic test.
@dataclasses.dataclass(frozen=True, kw_only=True)
class ZipfIds:
    """A bounded Zipf law over feature ids.

    Rank `k` in `1 .. vocabulary_size` has the probability

        P(k) proportional to the integral of x**-exponent from k to k + 1.

    This is Zipf's law with an integral instead of the power. Its cumulative
    distribution has a closed-form inverse, so drawing needs no table. The permutation
    `id = (rank * multiplier) % vocabulary_size` maps ranks to ids. It spreads hot ids
    over the shards.

    Attributes:
      vocabulary_size: number of distinct ids, from 1 to 2**31 - 2.
      exponent: skew in the ids. 0 is uniform, and 1 is Zipf's original law. If it is
        far above 1, a few ids make up almost all draws.

    Example:
      >>> ids = ZipfIds(vocabulary_size=10, exponent=1.0)
      >>> [int(ids.ids_of_ranks(np.array(rank))) for rank in (0, 1, 2)]
      [0, 7, 4]
    """

    vocabulary_size: int
    exponent: float = 1.0

    def draw(
        self, generator: np.random.Generator, shape: int | tuple[int, ...]
    ) -> np.ndarray:
        """Draws an array of independent int32 ids."""
        return self.ids_of_ranks(self.draw_ranks(generator, shape))

    def draw_ranks(
        self, generator: np.random.Generator, shape: int | tuple[int, ...]
    ) -> np.ndarray:
        """Draws an array of independent popularity ranks, counted from 0."""
        # Inverts the cumulative distribution at uniform random numbers.
        mass = generator.random(shape) * self._mass(self.vocabulary_size + 1.0)
        if self.exponent == 1.0:
            ranks = np.exp(mass)
        else:
            power = 1.0 - self.exponent
            # `log1p` stays accurate for exponents near 1, where `power` is almost 0.
            ranks = np.exp(np.log1p(power * mass) / power)
        # Rounding may push the last rank to vocabulary_size + 1 or to infinity.
        return np.minimum(ranks, self.vocabulary_size).astype(np.int64) - 1

    def ids_of_ranks(self, ranks: np.ndarray) -> np.ndarray:
        """Maps popularity ranks to int32 ids. Rank 0 is the most popular."""
        # A multiplier coprime to the size makes this a permutation. Both factors are
        # below 2**31, so int64 holds their product.
        multiplier = max(1, round(GOLDEN_RATIO * self.vocabulary_size))
        while math.gcd(multiplier, self.vocabulary_size) != 1:
            multiplier += 1
        ids = ranks.astype(np.int64) * multiplier % self.vocabulary_size
        return ids.astype(np.int32)

    def probabilities(self, ranks: np.ndarray) -> np.ndarray:
        """Computes the float64 probability of each rank.

        Example:
          >>> ZipfIds(vocabulary_size=4, exponent=0.0).probabilities(np.arange(2))
          array([0.25, 0.25])
        """
        mass = self._mass(ranks + 2.0) - self._mass(ranks + 1.0)
        return mass / self._mass(self.vocabulary_size + 1.0)

    def _mass(self, end: np.ndarray | float) -> np.ndarray:
        """Integrates `x**-exponent` from 1 to `end`."""
        if self.exponent == 1.0:
            return np.log(end)
        power = 1.0 - self.exponent
        return np.expm1(power * np.log(end)) / power


INTERACTION_RANK: Final = 2
INTERACTION_SCALE: Final = 0.6
"""Standard deviation of the user-item interaction's contribution to the logit."""

CALIBRATION_SAMPLES: Final = 16_384
"""Number of samples that the bias is fitted to.

The click rate's standard error is then below 0.004.
"""


Inputs = tuple[dict[str, np.ndarray], np.ndarray | None, np.ndarray]
"""Ids by feature name, dense inputs and the teacher's logits.

Dense inputs are float32 `[samples, num_dense]`, or None. Logits are float64 `[samples]`
and don't include the common bias.
"""


class TeacherDataset(abc.ABC):
    """A `Dataset` with labels from a teacher. Subclasses draw the inputs.

    Attributes:
      click_rate: expected mean label.
      evaluation_step: training step whose ids the held-out samples use, if ids change
        during training.
    """

    click_rate: float
    evaluation_step: int = 0

    def __init__(self, source: Any, *, batch_size: int, seed: int):
        self.batch_size, self.seed, self._source = batch_size, seed, source
        self.num_evaluation_samples: int = source.num_evaluation_samples

    @abc.abstractmethod
    def _draw_inputs(
        self, generator: np.random.Generator, num_samples: int, step: int
    ) -> Inputs:
        """Draws samples from the ids that are in use at a training step."""

    def train_batch(self, step: int) -> Batch:
        generator = random_generator(seed=self.seed, stream=TRAIN_STREAM, step=step)
        batch, _ = self._draw_samples(generator, self.batch_size, step)
        return batch

    def evaluation_batches(self) -> Iterator[Batch]:
        held_out, _ = self._held_out
        yield from padded_batches(
            lambda samples: join_samples([held_out], [samples]),
            np.arange(self.num_evaluation_samples),
            self.batch_size,
        )

    def teacher_log_loss(self) -> float:
        """Computes the log loss of the true probabilities on the held-out labels.

        A model's loss on the same labels has the same sampling noise.
        """
        samples, probabilities = self._held_out
        labels = samples.labels
        p = np.clip(probabilities, 1e-12, 1.0 - 1e-12)
        return float(-np.mean(labels * np.log(p) + (1.0 - labels) * np.log1p(-p)))

    @functools.cached_property
    def _bias(self) -> float:
        # Fitted on first use, because subclasses set up their teacher after
        # `super().__init__`. Step 0 of this stream is for the teacher itself.
        generator = random_generator(seed=self.seed, stream=TEACHER_STREAM, step=1)
        *_, logits = self._draw_inputs(
            generator, CALIBRATION_SAMPLES, self.evaluation_step
        )
        return bias_of_rate(logits, self.click_rate)

    @functools.cached_property
    def _held_out(self) -> tuple[Batch, np.ndarray]:
        # All samples are drawn at once, so they don't depend on the batch size.
        generator = random_generator(seed=self.seed, stream=EVALUATION_STREAM)
        return self._draw_samples(
            generator, self.num_evaluation_samples, self.evaluation_step
        )

    def _draw_samples(
        self, generator: np.random.Generator, num_samples: int, step: int
    ) -> tuple[Batch, np.ndarray]:
        """Draws samples, their labels and their true click probabilities."""
        features, dense, logits = self._draw_inputs(generator, num_samples, step)
        probabilities = sigmoid(logits + self._bias)
        labels = generator.random(num_samples) < probabilities
        batch = Batch(
            features=features,
            dense=dense,
            labels=labels.astype(np.float32),
            weights=np.ones(num_samples, np.float32),
        )
        return batch, probabilities


def bias_of_rate(logits: np.ndarray, rate: float) -> float:
    """Finds the number that, added to all logits, makes `rate` the mean probability.

    Example:
      >>> round(bias_of_rate(np.array([1.0, 1.0]), 0.5), 3)
      -1.0
    """
    low, high = -50.0, 50.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        if np.mean(sigmoid(logits + middle)) < rate:
            low = middle
        else:
            high = middle
    return low


def sigmoid(logits: np.ndarray) -> np.ndarray:
    # Unlike `1 / (1 + exp(-logits))`, this can't overflow.
    return 0.5 * (1.0 + np.tanh(0.5 * logits))
