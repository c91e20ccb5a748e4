"""Base of the synthetic click logs, whose labels come from a known teacher model.

The teacher gives every sample a click probability and draws the label from it. No
model has a lower expected log loss than the teacher. The gap to `teacher_log_loss()`
therefore measures how well a model has learned, which a real log cannot offer.
`synthetic_clicks.py`, `synthetic_criteo.py` and `synthetic_stream.py` define the
samples.
"""

import abc
import dataclasses
import functools
from collections.abc import Iterator
from typing import Final

import numpy as np

from tpu_embedding.tools.data.batch import Batch, padded_batches, rows_of_batches
from tpu_embedding.tools.data.random_streams import (
    EVALUATION_STREAM,
    TEACHER_STREAM,
    TRAIN_STREAM,
    random_generator,
)

CALIBRATION_SAMPLES: Final = 16_384
"""Samples that fit the bias; the click rate's standard error is below 0.004."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Model inputs of a group of samples, and the teacher's logits for them.

    Attributes:
      features: int32 or uint64 ids by feature name.
      dense: float32 `[samples, num_dense]`, or None.
      logits: float64 `[samples]`, the teacher's logits without the common bias.
    """

    features: dict[str, np.ndarray]
    dense: np.ndarray | None = None
    logits: np.ndarray


class TeacherDataset(abc.ABC):
    """A `Dataset` whose labels come from a teacher; subclasses draw the inputs.

    Attributes:
      batch_size: samples per batch.
      seed: seed of the teacher and of all samples.
      num_evaluation_samples: number of held-out samples. They have their own random
        stream and are the same for every batch size.
      click_rate: expected mean of the labels; the teacher's bias is fitted to it.
    """

    click_rate: float

    def __init__(self, *, batch_size: int, seed: int, num_evaluation_samples: int):
        self.batch_size = batch_size
        self.seed = seed
        self.num_evaluation_samples = num_evaluation_samples

    @abc.abstractmethod
    def _draw_inputs(
        self, generator: np.random.Generator, num_samples: int, step: int | None = None
    ) -> Inputs:
        """Draws samples of a training step, or of the evaluation if it is None."""

    def train_batch(self, step: int) -> Batch:
        """Returns the batch of training step `step`, counted from 0."""
        generator = random_generator(seed=self.seed, stream=TRAIN_STREAM, step=step)
        batch, _ = self._draw(generator, self.batch_size, step)
        return batch

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yields the held-out samples once.

        Copies of the last sample, with weight 0, pad the last batch.
        """
        held_out, _ = self._held_out
        yield from padded_batches(
            lambda samples: rows_of_batches([(held_out, samples)]),
            np.arange(self.num_evaluation_samples),
            self.batch_size,
        )

    def teacher_log_loss(self) -> float:
        """Returns the log loss of the true probabilities on the evaluation labels.

        Its expectation is the mean entropy of the labels given the inputs. The
        difference is sampling noise, which a model's loss on the same labels shares.
        """
        samples, probabilities = self._held_out
        return float(np.mean(cross_entropy(samples.labels, probabilities)))

    @functools.cached_property
    def _bias(self) -> float:
        """Common logit with which the mean probability equals the click rate."""
        generator = random_generator(seed=self.seed, stream=TEACHER_STREAM, step=1)
        logits = self._draw_inputs(generator, CALIBRATION_SAMPLES).logits
        return bias_of_rate(logits, self.click_rate)

    @functools.cached_property
    def _held_out(self) -> tuple[Batch, np.ndarray]:
        generator = random_generator(seed=self.seed, stream=EVALUATION_STREAM)
        return self._draw(generator, self.num_evaluation_samples)

    def _draw(
        self, generator: np.random.Generator, num_samples: int, step: int | None = None
    ) -> tuple[Batch, np.ndarray]:
        """Returns samples with drawn labels and their true click probabilities."""
        inputs = self._draw_inputs(generator, num_samples, step)
        probabilities = sigmoid(inputs.logits + self._bias)
        labels = generator.random(num_samples) < probabilities
        batch = Batch(
            features=inputs.features,
            dense=inputs.dense,
            labels=labels.astype(np.float32),
            weights=np.ones(num_samples, np.float32),
        )
        return batch, probabilities


def bias_of_rate(logits: np.ndarray, rate: float) -> float:
    """Returns the number to add to all logits for which the mean probability is `rate`.

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


def cross_entropy(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Returns `-labels log p - (1 - labels) log(1 - p)`, in nats, in float64."""
    p = np.clip(np.asarray(probabilities, np.float64), 1e-12, 1.0 - 1e-12)
    return -(labels * np.log(p) + (1.0 - labels) * np.log1p(-p))
