"""Click logs drawn from a known model, the teacher: the base of the synthetic data.

A teacher gives every sample a click probability `p`, and the label is drawn from it.
No model can have a lower expected log loss than the teacher itself, so the distance
to `teacher_log_loss()` says how well a student has learned, on a scale that a real
log does not have. `synthetic.py` and `criteo.py` say what the samples look like.
"""

import abc
import dataclasses
import functools
from collections.abc import Iterator
from typing import Final

import numpy as np

from tpu_embedding.data.batch import Batch
from tpu_embedding.types import FeatureIds

# The streams of random numbers of one seed; no two of them overlap.
TEACHER_STREAM: Final = 0
TRAIN_STREAM: Final = 1
EVALUATION_STREAM: Final = 2

CALIBRATION_SAMPLES: Final = 16_384
"""Standard error of the click rate that they give: below 0.5 / sqrt(16,384) = 0.004."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a student sees of some samples, and the teacher's verdict on them.

    Attributes:
      features: feature name to int32 ids.
      dense: float32 `[samples, num_dense]`, or None.
      logits: float64 `[samples]`, the teacher's, before the common bias.
    """

    features: dict[str, FeatureIds]
    dense: np.ndarray | None
    logits: np.ndarray


def random_generator(*, seed: int, stream: int, step: int = 0) -> np.random.Generator:
    """Returns a generator that depends on nothing but its three arguments."""
    return np.random.Generator(
        np.random.Philox(np.random.SeedSequence([seed, stream, step]))
    )


class TeacherDataset(abc.ABC):
    """A `Dataset` whose labels come from a teacher; subclasses draw the inputs.

    Attributes:
      batch_size: samples per batch.
      seed: of everything: the teacher, the training and the evaluation samples.
      num_evaluation_samples: held-out samples, drawn from a stream of their own and
        the same whatever the batch size.
      click_rate: expected mean of the labels; the teacher's bias is fitted to it.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        seed: int,
        num_evaluation_samples: int,
        click_rate: float,
    ):
        self.batch_size = batch_size
        self.seed = seed
        self.num_evaluation_samples = num_evaluation_samples
        self.click_rate = click_rate
        problems = list(self._problems())
        if problems:
            raise ValueError("; ".join(problems) + ".")

    def _problems(self) -> Iterator[str]:
        owner = type(self).__name__
        yield from count_problems(
            owner,
            batch_size=self.batch_size,
            num_evaluation_samples=self.num_evaluation_samples,
        )
        if not is_int(self.seed) or self.seed < 0:
            yield f"{owner}.seed must be an int of at least 0, got {self.seed!r}"
        if not 0.0 < self.click_rate < 1.0:
            yield (
                f"{owner}.click_rate must be between 0 and 1, got {self.click_rate!r}"
            )

    @abc.abstractmethod
    def _draw_inputs(self, generator: np.random.Generator, num_samples: int) -> Inputs:
        """Returns `num_samples` samples: ids, dense inputs and the teacher's logits."""

    def train_batch(self, step: int) -> Batch:
        """Returns the batch of training step `step`, counted from 0."""
        generator = random_generator(seed=self.seed, stream=TRAIN_STREAM, step=step)
        batch, _ = self._draw(generator, self.batch_size)
        return batch

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yields the held-out samples once.

        The last batch is filled up with copies of the last sample, at weight 0.
        """
        samples, _ = self._held_out
        for start in range(0, self.num_evaluation_samples, self.batch_size):
            places = np.arange(start, start + self.batch_size)
            rows = np.minimum(places, self.num_evaluation_samples - 1)
            yield Batch(
                features={
                    name: np.asarray(ids)[rows]
                    for name, ids in samples.features.items()
                },
                dense=None if samples.dense is None else samples.dense[rows],
                labels=samples.labels[rows],
                weights=(places < self.num_evaluation_samples).astype(np.float32),
            )

    def teacher_log_loss(self) -> float:
        """Returns the log loss of the true probabilities on the evaluation labels.

        Its expectation is `mean_entropy()`; it differs by the luck of the draw of
        the labels, which a student's log loss on the same labels shares.
        """
        samples, probabilities = self._held_out
        return float(np.mean(cross_entropy(samples.labels, probabilities)))

    def mean_entropy(self) -> float:
        """Returns the expected log loss of the teacher over draws of the labels.

        The mean entropy of the labels of the evaluation samples given their inputs,
        in nats: no model has a lower expected log loss on them.
        """
        _, probabilities = self._held_out
        return float(np.mean(cross_entropy(probabilities, probabilities)))

    def base_rate_log_loss(self) -> float:
        """Returns the log loss of the best constant on the evaluation labels.

        A student that learns nothing but the click rate has this log loss.
        """
        samples, _ = self._held_out
        rate = np.asarray(np.mean(samples.labels, dtype=np.float64))
        return float(cross_entropy(rate, rate))

    @functools.cached_property
    def _bias(self) -> float:
        """The common logit that makes the mean probability the click rate."""
        generator = random_generator(seed=self.seed, stream=TEACHER_STREAM, step=1)
        logits = self._draw_inputs(generator, CALIBRATION_SAMPLES).logits
        low, high = -50.0, 50.0
        while high - low > 1e-6:
            middle = (low + high) / 2
            if np.mean(sigmoid(logits + middle)) < self.click_rate:
                low = middle
            else:
                high = middle
        return low

    @functools.cached_property
    def _held_out(self) -> tuple[Batch, np.ndarray]:
        generator = random_generator(seed=self.seed, stream=EVALUATION_STREAM)
        return self._draw(generator, self.num_evaluation_samples)

    def _draw(
        self, generator: np.random.Generator, num_samples: int
    ) -> tuple[Batch, np.ndarray]:
        """Returns samples with drawn labels, and their true probabilities."""
        inputs = self._draw_inputs(generator, num_samples)
        probabilities = sigmoid(inputs.logits + self._bias)
        labels = generator.random(num_samples) < probabilities
        batch = Batch(
            features=inputs.features,
            dense=inputs.dense,
            labels=labels.astype(np.float32),
            weights=np.ones(num_samples, np.float32),
        )
        return batch, probabilities


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Returns `1 / (1 + exp(-logits))`, without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * logits))


def cross_entropy(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Returns `-labels log p - (1 - labels) log(1 - p)`, in nats, in float64."""
    p = np.clip(np.asarray(probabilities, np.float64), 1e-12, 1.0 - 1e-12)
    return -(labels * np.log(p) + (1.0 - labels) * np.log1p(-p))


def count_problems(owner: str, **counts: int) -> Iterator[str]:
    """Yields a sentence for each count that is no int of at least 1."""
    for name, count in counts.items():
        if not is_int(count) or count < 1:
            yield f"{owner}.{name} must be an int of at least 1, got {count!r}"


def is_int(value: object) -> bool:
    """Says whether the value is an int; a bool is none here."""
    return isinstance(value, int) and not isinstance(value, bool)
