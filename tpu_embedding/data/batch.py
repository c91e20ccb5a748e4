"""What every data set of this package yields, and the training loop needs."""

import dataclasses
from collections.abc import Iterator
from typing import Protocol

import jax
import numpy as np

from tpu_embedding.types import FeatureIds


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples on the host, or, after the training loop has placed them, on devices.

    Attributes:
      features: feature name to ids; each an int array `[batch]` or
        `[batch, valence]` (padded with `PADDING_ROW_ID`), a `DenseIds` or a
        `RaggedIds`.
      dense: float32 `[batch, num_dense]` inputs that are no ids; None without any.
      labels: float32 `[batch]`.
      weights: float32 `[batch]`: 1 for a sample, 0 for one that only fills up the
        last batch of an evaluation.
    """

    features: dict[str, FeatureIds]
    dense: np.ndarray | None = None
    labels: np.ndarray
    weights: np.ndarray


class Dataset(Protocol):
    """A source of batches of one size.

    The training batch is a pure function of the step, so that a resumed run reads
    what the interrupted one would have read, with nothing to save.
    """

    batch_size: int

    def train_batch(self, step: int) -> Batch:
        """Returns the batch of training step `step`, counted from 0."""
        ...

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yields the held-out data once, the last batch filled up with weight 0."""
        ...


class DataError(ValueError):
    """A data file is missing or damaged; the message names it, and the line."""
