"""Batches of MLPerf's `dlrm_v4` in the order of the benchmark: by windows of time."""

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np

from tpu_embedding.tools.data.batch import Batch, DataError
from tpu_embedding.tools.data.yambda.event_log import SECONDS_PER_DAY
from tpu_embedding.tools.data.yambda.event_samples import (
    EventSamples,
    HistorySettings,
)
from tpu_embedding.types import RaggedIds


class EventDataset:
    """The samples of a log, day by day.

    Windows of a day split the anchors by time. The last window is held out for
    evaluation. Training visits the others in the order of time, and the anchors of a
    window by user, then by time. Anchors at the end of a window that do not fill a
    batch are left out, as in the benchmark. Behind the last window, training starts
    again with the first. A batch is a function of the step, so no state is saved.

    Attributes:
      batch_size: samples per batch.
      samples: samples of the log.
      table_sizes: number of rows of each table.
      history_length: events of the longest history.
      num_train_samples: samples from the first window to the last but one.
      num_evaluation_samples: number of anchors in the last window.
      evaluation_anchors: places in the log of the held-out samples, in their order.
    """

    def __init__(
        self,
        samples: EventSamples,
        *,
        batch_size: int,
        whole_window: Literal["first", "last"],
    ):
        """Sorts the anchors by window.

        Args:
          samples: samples of a log.
          batch_size: samples per batch.
          whole_window: window whose length is full. `"first"` starts the windows with
            the earliest anchor, as in the benchmark. The last one can then be short,
            and few samples are evaluated. `"last"` ends the windows with the last
            anchor.

        Raises:
          DataError: if no window but the last one fills a batch.
        """
        self.batch_size = batch_size
        self.samples = samples
        self.table_sizes = samples.table_sizes
        self.history_length = samples.settings.width
        times = samples.log.times[samples.anchors]
        windows = (times - times.min()) // SECONDS_PER_DAY
        if whole_window == "last":
            back = (times.max() - times) // SECONDS_PER_DAY
            windows = back.max() - back
        # Equal windows keep their order, which is that of the log: by user, then time.
        self._anchors = samples.anchors[np.argsort(windows, kind="stable")]
        sizes = np.bincount(windows)
        self._window_starts = np.cumsum([0, *sizes[:-1]])
        self._first_steps = np.cumsum([0, *(sizes[:-1] // batch_size)])
        self.num_train_samples = int(self._first_steps[-1]) * batch_size
        self.num_evaluation_samples = int(sizes[-1])
        self.evaluation_anchors = self._anchors[self._window_starts[-1] :]
        if not self.num_train_samples:
            raise DataError(
                f"{samples.log.name}: a day before the last must have {batch_size} "
                f"anchors to fill a batch, got {len(sizes)} day(s) of at most "
                f"{sizes.max()} anchors; lower batch_size, or pass more events."
            )

    def train_batch(self, step: int) -> Batch:
        """Returns the batch of training step `step`, counted from 0."""
        return self.train_part(step, range(self.batch_size))

    def train_part(self, step: int, samples: range) -> Batch:
        """Returns some consecutive samples of the batch of a training step."""
        step %= self._first_steps[-1]
        window = np.searchsorted(self._first_steps, step, side="right") - 1
        first = self._window_starts[window]
        first += (step - self._first_steps[window]) * self.batch_size
        anchors = self._anchors[first + samples.start : first + samples.stop]
        return self.samples.read(anchors)

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yields the last window once, by user and time.

        Copies of the last sample, with weight 0, pad the last batch.
        """
        last = self.num_evaluation_samples - 1
        for start in range(0, self.num_evaluation_samples, self.batch_size):
            number = start + np.arange(self.batch_size)
            batch = self.samples.read(self.evaluation_anchors[np.minimum(number, last)])
            weights = (number <= last).astype(np.float32)
            yield dataclasses.replace(batch, weights=weights)


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
      >>> outline = EventOutline({"item_id": 10_000}, HistorySettings(), batch_size=32)
      >>> ids = outline.train_batch(0).features["item_id"]
      >>> ids["history"].row_splits.shape, ids["candidate"].shape
      ((33,), (32,))
    """

    def __init__(
        self,
        table_sizes: Mapping[str, int],
        settings: HistorySettings,
        *,
        batch_size: int,
    ):
        self.batch_size = batch_size
        self.table_sizes = dict(table_sizes)
        self.history_length = settings.width

    def train_batch(self, step: int) -> Batch:
        """Returns the same batch for each step."""
        del step
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
            ids = ids.astype(np.int32)
            history = RaggedIds(values=ids.ravel(), row_splits=row_splits)
            features[name] = {"history": history, "candidate": ids[:, 0]}
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

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yields one batch."""
        yield self.train_batch(0)
