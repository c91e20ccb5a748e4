"""The data sets of the training loop: batches of a log, and an outline of them."""

import functools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from tpu_embedding.tools.data.batch import Batch, DataError
from tpu_embedding.tools.data.teacher import TeacherDataset, cross_entropy
from tpu_embedding.tools.data.yambda.event_batches import EventBatches
from tpu_embedding.tools.data.yambda.event_log import LISTENED
from tpu_embedding.tools.data.yambda.event_samples import (
    EventSamples,
    HistorySettings,
)
from tpu_embedding.tools.data.yambda.synthetic_yambda import SyntheticYambda
from tpu_embedding.types import RaggedIds

DENSE_INPUTS: Final = (
    "history_length",
    "action_weight",
    "action_timestamp",
    "query_time",
)
"""Dense inputs of a batch; see `EventSamples.read`."""


class EventDataset:
    """The samples of a log, in the order of `EventBatches`.

    The dense inputs are a dict of `DENSE_INPUTS`. Samples of weight 0 in the last batch
    of an evaluation are copies of its last sample, so they do not change the longest
    sequence of the batch.

    Attributes:
      batch_size: samples per batch.
      batches: batches of the samples.
      table_sizes: number of rows of each table.
      history_length: events of the longest history.
      num_train_samples: samples from the first window to the last but one.
      digest: digest of the files of the log; None if there are none.
    """

    def __init__(self, samples: EventSamples, batches: EventBatches):
        self.batch_size = batches.batch_size
        self.batches = batches
        self.table_sizes = samples.table_sizes
        self.history_length = samples.settings.width
        self.num_train_samples = batches.num_train_steps * batches.batch_size
        self.digest = batches.digest

    def __getstate__(self) -> dict[str, Any]:
        """Refuses a copy of the log for each loader process.

        Raises:
          DataError: always.
        """
        raise DataError(
            f"{type(self).__name__} must stay in one process, because its log lies in "
            "memory and each loader process would copy it; set loader_processes=0, "
            "which reads ahead in a thread."
        )

    def train_batch(self, step: int) -> Batch:
        """Returns the batch of training step `step`, counted from 0."""
        return _as_batch(self.batches.train_batch(step))

    def train_part(self, step: int, samples: range) -> Batch:
        """Returns some consecutive samples of the batch of a training step."""
        return _as_batch(self.batches.train_part(step, samples))

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yields the last window once."""
        return map(_as_batch, self.batches.evaluation_batches())


class SyntheticEventDataset(EventDataset):
    """The samples of `SyntheticYambda`, whose teacher is known."""

    def __init__(
        self, log: SyntheticYambda, samples: EventSamples, batches: EventBatches
    ):
        super().__init__(samples, batches)
        self._log = log

    def teacher_log_loss(self) -> float:
        """Returns the log loss of the true probabilities on the held-out samples."""
        anchors = self.batches.evaluation_anchors
        labels = self._log.log.actions[anchors] == LISTENED
        return float(np.mean(cross_entropy(labels, self._log.probabilities[anchors])))

    def teacher_auc(self) -> float:
        """Returns the AUC of the true probabilities on the held-out samples."""
        return self._log.teacher_auc(self.batches)


# A run compares its loss with the teacher's loss if its data is a TeacherDataset.
TeacherDataset.register(SyntheticEventDataset)


SAMPLES_PER_USER: Final = 16
"""Consecutive samples of one user in an outline, who all have one history."""

MEAN_LENGTH: Final = 0.65
"""Events of a history in an outline, as a share of the longest one."""

DIFFERENT_IDS: Final[Mapping[str, float]] = MappingProxyType(
    {"item_id": 0.024, "artist_id": 0.006, "album_id": 0.015}
)
"""Different ids of a feature in an outline, as a share of all its ids.

They were counted in the benchmark's batches of 1,024 samples per device."""


class EventOutline:
    """Batches with the shapes of those of a log, and with as many different ids.

    They serve to compile a step for the benchmark without its 227 GB of files. Their
    values mean nothing.

    Example:
      >>> outline = EventOutline(
      ...     batch_size=32, table_sizes={"item_id": 10_000}, settings=HistorySettings()
      ... )
      >>> ids = outline.train_batch(0).features["item_id"]
      >>> ids["history"].row_splits.shape, ids["candidate"].shape
      ((33,), (32,))
    """

    def __init__(
        self,
        *,
        batch_size: int,
        table_sizes: Mapping[str, int],
        settings: HistorySettings,
    ):
        self.batch_size = batch_size
        self.table_sizes = dict(table_sizes)
        self.history_length = settings.width

    def train_batch(self, step: int) -> Batch:
        """Returns the same batch for each step."""
        del step
        return self._batch

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yields one batch."""
        yield self._batch

    @functools.cached_property
    def _batch(self) -> Batch:
        num_samples, width = self.batch_size, self.history_length
        num_events = max(1, int(MEAN_LENGTH * width))
        row_splits = np.arange(num_samples + 1) * num_events
        # Items of a user follow each other, and repeat.
        item_share = DIFFERENT_IDS["item_id"]
        num_items = max(1, int(SAMPLES_PER_USER * num_events * item_share))
        users = np.arange(num_samples) // SAMPLES_PER_USER
        items = (users * num_items)[:, None] + np.arange(num_events) % num_items
        features: dict[str, Any] = {}
        for name, size in self.table_sizes.items():
            if name not in DIFFERENT_IDS:
                features[name] = (np.arange(num_samples) % size).astype(np.int32)
                continue
            # Rising with the items, so that an item has one artist and one album.
            ids = (items * (DIFFERENT_IDS[name] / item_share)).astype(np.int64) % size
            features[name] = {
                "history": RaggedIds(
                    values=ids.astype(np.int32).ravel(), row_splits=row_splits
                ),
                "candidate": ids[:, 0].astype(np.int32),
            }
        events = np.zeros((num_samples, width), np.int32)
        return Batch(
            features=features,
            dense={
                "history_length": np.full(num_samples, num_events, np.int32),
                "action_weight": events,
                "action_timestamp": events,
                "query_time": np.zeros(num_samples, np.int32),
            },
            labels=np.zeros(num_samples, np.float32),
            weights=np.ones(num_samples, np.float32),
        )


def _as_batch(tree: dict[str, Any]) -> Batch:
    return Batch(
        features=tree["features"],
        dense={name: tree[name] for name in DENSE_INPUTS},
        labels=tree["label"],
        weights=tree["weight"],
    )
