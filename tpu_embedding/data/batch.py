"""The batch, the data set interface and the data error of the training loop."""

import dataclasses
from collections.abc import Iterator
from typing import Protocol

import jax
import numpy as np

from tpu_embedding.types import FeatureIds


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """One batch of samples, on the host until the training loop moves it to devices.

    Attributes:
      features: ids by feature name. Each value is an int array `[batch]` or
        `[batch, valence]` (padded with `PADDING_ROW_ID`), a `DenseIds` or a
        `RaggedIds`.
      dense: float32 `[batch, num_dense]`, the dense inputs; None if there are none.
      labels: float32 `[batch]`.
      weights: float32 `[batch]`: 1 for a sample, 0 for padding samples in the last
        batch of an evaluation.
    """

    features: dict[str, FeatureIds]
    dense: np.ndarray | None = None
    labels: np.ndarray
    weights: np.ndarray


class Dataset(Protocol):
    """A source of batches of one fixed size.

    The training batch is a pure function of the step. A resumed run therefore reads the
    same batches as the interrupted run, and no reader state needs saving.
    """

    batch_size: int

    def train_batch(self, step: int) -> Batch:
        """Returns the batch of training step `step`, counted from 0."""
        ...

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yields the held-out data once; samples of weight 0 pad the last batch."""
        ...


class DataError(ValueError):
    """Raised for a missing or damaged data file; the message names file and line."""
