"""Parts of the synthetic data sets: random streams, popular ids and a teacher model.

Click logs are skewed: a few ids make up most of the traffic. The synthetic ids have a
Zipf-like popularity, because data without skew would not exercise an embedding layer.
Each random stream depends on a seed and the stream's number.

The teacher assigns every sample a click probability and draws the label from it. No
model has a lower expected log loss, so the gap to `teacher_log_loss()` measures how
well a model has learned. This gap is unknown for a real log.
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
    """Returns a random generator that depends only on the arguments.

    Args:
      seed: seed of the data set, at least 0.
      stream: number of the stream, at least 0. Streams of one seed are independent.
      step: step of the stream, at least 0. Any step can be drawn on its own.

    Example:
      >>> round(random_generator(seed=0, stream=1, step=5).random(), 3)
      0.601
    """
    return np.random.Generator(
        np.random.Philox(np.random.SeedSequence([seed, stream, step]))
    )


def mix64(words: np.ndarray) -> np.ndarray:
    """Hashes uint64 words; distinct words have distinct hashes.

    This is the finaliser of SplitMix64: Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators" (OOPSLA 2014), with the constants of Vigna's
    `splitmix64.c`.
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def splitmix64(keys: np.ndarray) -> np.ndarray:
    """Returns the first output of SplitMix64 for each uint64 seed."""
    return mix64(keys + WORD)


GOLDEN_RATIO: Final = (math.sqrt(5.0) - 1.0) / 2.0
"""Number whose multiples modulo 1 are spread most evenly.

Source: Knuth, The Art of Computer Programming, volume 3, section 6.4.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZipfIds:
    """A bounded Zipf law over the ids of one feature.

    Rank `k` in `1 .. vocabulary_size` has the probability

        P(k) proportional to the integral of x**-exponent from k to k + 1.

    This is Zipf's law with an integral instead of the power. Its cumulative
    distribution has a closed-form inverse, so drawing needs no table. The permutation
    `id = (rank * multiplier) % vocabulary_size` maps ranks to ids. It spreads hot ids
    over the shards.

    Attributes:
      vocabulary_size: number of distinct ids, from 1 to 2**31 - 2.
      exponent: skew of the ids. 0 is uniform, and 1 is Zipf's original law. If it is
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
        """Draws independent int32 ids of the given shape."""
        return self.ids_of_ranks(self.draw_ranks(generator, shape))

    def draw_ranks(
        self, generator: np.random.Generator, shape: int | tuple[int, ...]
    ) -> np.ndarray:
        """Draws independent popularity ranks of the given shape, counted from 0."""
        # Inverts the cumulative distribution at uniform random numbers.
        mass = generator.random(shape) * self._mass(self.vocabulary_size + 1.0)
        if self.exponent == 1.0:
            ranks = np.exp(mass)
        else:
            power = 1.0 - self.exponent
            ranks = np.exp(np.log1p(power * mass) / power)
        # Rounding may push the last rank to vocabulary_size + 1 or to infinity.
        return np.minimum(ranks, self.vocabulary_size).astype(np.int64) - 1

    def ids_of_ranks(self, ranks: np.ndarray) -> np.ndarray:
        """Returns the int32 ids of popularity ranks. Rank 0 is the most popular."""
        multiplier = max(1, round(GOLDEN_RATIO * self.vocabulary_size))
        while math.gcd(multiplier, self.vocabulary_size) != 1:
            multiplier += 1
        return (ranks.astype(np.int64) * multiplier % self.vocabulary_size).astype(
            np.int32
        )

    def probabilities(self, ranks: np.ndarray) -> np.ndarray:
        """Returns the float64 probability of each rank.

        Example:
          >>> ZipfIds(vocabulary_size=4, exponent=0.0).probabilities(np.arange(2))
          array([0.25, 0.25])
        """
        mass = self._mass(ranks + 2.0) - self._mass(ranks + 1.0)
        return mass / self._mass(self.vocabulary_size + 1.0)

    def _mass(self, end: np.ndarray | float) -> np.ndarray:
        """Returns the integral of `x**-exponent` from 1 to `end`."""
        if self.exponent == 1.0:
            return np.log(end)
        power = 1.0 - self.exponent
        return np.expm1(power * np.log(end)) / power


INTERACTION_RANK: Final = 2
INTERACTION_SCALE: Final = 0.6
"""Standard deviation of the user-item interaction's contribution to the logit."""

CALIBRATION_SAMPLES: Final = 16_384
"""Number of samples to fit the bias. The click rate's standard error is below 0.004."""


Inputs = tuple[dict[str, np.ndarray], np.ndarray | None, np.ndarray]
"""Ids by feature name; dense inputs, float32 `[samples, num_dense]`, or None without
any; and the teacher's logits without the common bias, float64 `[samples]`."""


class TeacherDataset(abc.ABC):
    """A `Dataset` whose labels come from a teacher. Subclasses draw the inputs.

    Attributes:
      batch_size: samples per batch.
      seed: seed of the teacher and of all samples.
      num_evaluation_samples: number of held-out samples. They have their own random
        stream, so they do not depend on the batch size.
      click_rate: expected mean of the labels, which the teacher's bias is fitted to.
      evaluation_step: training step whose id distribution the held-out samples have. It
        only matters if ids change during training.
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
        """Draws samples with the ids that are in use at a training step."""

    def train_batch(self, step: int) -> Batch:
        """Returns the batch of training step `step`, counted from 0."""
        generator = random_generator(seed=self.seed, stream=TRAIN_STREAM, step=step)
        batch, _ = self._draw_samples(generator, self.batch_size, step)
        return batch

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yields the held-out samples once.

        Copies of the last sample, with weight 0, pad the last batch.
        """
        held_out, _ = self._held_out
        yield from padded_batches(
            lambda samples: join_samples([held_out], [samples]),
            np.arange(self.num_evaluation_samples),
            self.batch_size,
        )

    def teacher_log_loss(self) -> float:
        """Returns the log loss of the true probabilities on the evaluation labels.

        Its expectation is the mean entropy of the labels given the inputs. A model's
        loss on the same labels has the same sampling noise.
        """
        samples, probabilities = self._held_out
        labels = samples.labels
        p = np.clip(probabilities, 1e-12, 1.0 - 1e-12)
        return float(-np.mean(labels * np.log(p) + (1.0 - labels) * np.log1p(-p)))

    @functools.cached_property
    def _bias(self) -> float:
        """Number added to all logits so that the mean probability is `click_rate`."""
        generator = random_generator(seed=self.seed, stream=TEACHER_STREAM, step=1)
        *_, logits = self._draw_inputs(
            generator, CALIBRATION_SAMPLES, self.evaluation_step
        )
        return bias_of_rate(logits, self.click_rate)

    @functools.cached_property
    def _held_out(self) -> tuple[Batch, np.ndarray]:
        generator = random_generator(seed=self.seed, stream=EVALUATION_STREAM)
        return self._draw_samples(
            generator, self.num_evaluation_samples, self.evaluation_step
        )

    def _draw_samples(
        self, generator: np.random.Generator, num_samples: int, step: int
    ) -> tuple[Batch, np.ndarray]:
        """Returns samples with drawn labels and their true click probabilities."""
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
    """Returns the number to add to all logits to make the mean probability `rate`.

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
    """Returns `1 / (1 + exp(-logits))`, without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * logits))
