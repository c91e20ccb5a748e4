"""Batches of MLPerf's `dlrm_v4` in the order of the benchmark: by windows of time.

A batch is a pure function of its window and its position in the window. So a run
resumes from these two numbers, or from the step, and no state of a reader is saved.
"""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from tpu_embedding.field_checks import raise_all
from tpu_embedding.tools.data.argument_checks import count_problems
from tpu_embedding.tools.data.batch import DataError
from tpu_embedding.tools.data.yambda.event_log import SECONDS_PER_DAY
from tpu_embedding.tools.data.yambda.event_samples import EventSamples


class EventBatches:
    """Batches of the samples of a log, as trees of NumPy arrays.

    Windows of `window_seconds` split the anchors by time. The last window is held out
    for evaluation. Training visits the others in the order of time, and the anchors of
    a window by user, then by time. Anchors at the end of a window that do not fill a
    batch are left out, as in the benchmark. Behind the last window, training starts
    again with the first.

    A batch is that of `EventSamples.read`, and has `"weight"`, float32 `[samples]`: 1
    for a sample, 0 for padding samples in the last batch of the evaluation.

    The benchmark deals the anchors of a window to ranks, one each in turn. A batch with
    `num_ranks` holds the share of each rank one after the other. Which anchors are in
    the batch does not depend on `num_ranks`, only their order does. Runs of this
    package leave it at 1; it serves comparisons with the reference, rank by rank.

    Beside the samples, the batches hold 8 bytes per anchor, and 4 for logs of fewer
    than 2**32 events.

    Attributes:
      batch_size: samples per batch, over all ranks.
      num_ranks: number of ranks.
      num_windows: number of windows, that of the evaluation included.
      num_train_steps: number of batches from the first window to the last but one.
      num_evaluation_samples: number of anchors in the last window.
      digest: digest of the files of the log; None if there are none.
    """

    def __init__(
        self,
        samples: EventSamples,
        *,
        batch_size: int,
        num_ranks: int = 1,
        window_seconds: int = SECONDS_PER_DAY,
        whole_window: Literal["first", "last"] = "first",
    ):
        """Sorts the anchors by window.

        Args:
          samples: samples of a log.
          batch_size: samples per batch, over all ranks.
          num_ranks: number of ranks, which must divide `batch_size`.
          window_seconds: length of a window.
          whole_window: window whose length is full. `"first"` starts the windows with
            the earliest anchor, as in the benchmark. The last one can then be short,
            and few samples are evaluated. `"last"` ends the windows with the last
            anchor.

        Raises:
          ValueError: if arguments are out of range.
          DataError: if no window but the last one fills a batch.
        """
        problems = list(
            count_problems(
                "EventBatches",
                batch_size=batch_size,
                num_ranks=num_ranks,
                window_seconds=window_seconds,
            )
        )
        if not problems and batch_size % num_ranks:
            problems.append(
                f"EventBatches.num_ranks must divide batch_size {batch_size}, got "
                f"{num_ranks}"
            )
        if whole_window not in ("first", "last"):
            problems.append(
                "EventBatches.whole_window must be 'first' or 'last', got "
                f"{whole_window!r}"
            )
        raise_all(problems)
        self.batch_size = batch_size
        self.num_ranks = num_ranks
        self.digest = samples.log.digest
        self._samples = samples
        times = samples.log.times[samples.anchors]
        windows = (times - times.min()) // window_seconds
        if whole_window == "last":
            back = (times.max() - times) // window_seconds
            windows = back.max() - back
        # Equal windows keep their order, which is that of the log: by user, then time.
        self._anchors = samples.anchors[np.argsort(windows, kind="stable")]
        sizes = np.bincount(windows)
        self.num_windows = len(sizes)
        self._window_bounds = np.concatenate([[0], np.cumsum(sizes)])
        self._first_steps = np.concatenate([[0], np.cumsum(sizes[:-1] // batch_size)])
        self.num_train_steps = int(self._first_steps[-1])
        self.num_evaluation_samples = int(sizes[-1])
        if not self.num_train_steps:
            raise DataError(
                f"{samples.log.name}: a window before the last must have {batch_size} "
                f"anchors to fill a batch, got {self.num_windows} window(s) of at most "
                f"{sizes.max()} anchors; lower batch_size or window_seconds, or pass "
                "more events."
            )

    def window_anchors(self, window: int) -> np.ndarray:
        """Returns the places in the log of all anchors of a window."""
        first, stop = self._window_bounds[window : window + 2]
        return self._anchors[first:stop]

    def num_batches(self, window: int) -> int:
        """Returns the number of full batches of a window."""
        return len(self.window_anchors(window)) // self.batch_size

    def place_of_step(self, step: int) -> tuple[int, int]:
        """Returns the window of a training step, and its position in the window."""
        step %= self.num_train_steps
        window = int(np.searchsorted(self._first_steps, step, side="right")) - 1
        return window, step - int(self._first_steps[window])

    def step_of_place(self, window: int, position: int) -> int:
        """Returns the first training step that reads a batch of a window.

        A training loop of your own that saved the benchmark's two numbers, window and
        position, resumes by it.

        Raises:
          ValueError: if training has no such batch.
        """
        num_train_windows = self.num_windows - 1
        if not 0 <= window < num_train_windows:
            raise ValueError(
                f"window must be from 0 to {num_train_windows - 1}, got {window}; the "
                "last window is held out for evaluation."
            )
        if not 0 <= position < self.num_batches(window):
            raise ValueError(
                f"position must be less than {self.num_batches(window)}, the number of "
                f"batches of window {window}, and at least 0, got {position}."
            )
        return int(self._first_steps[window]) + position

    def train_batch(self, step: int) -> dict[str, Any]:
        """Returns the batch of training step `step`, counted from 0."""
        return self.train_part(step, range(self.batch_size))

    def train_part(self, step: int, samples: range) -> dict[str, Any]:
        """Returns some consecutive samples of the batch of a training step.

        Rank `r` of `num_ranks` has the samples from `r * n` to `(r + 1) * n - 1`, for
        `n = batch_size // num_ranks`.

        Args:
          step: training step, counted from 0.
          samples: positions within the batch, with a step of 1.
        """
        window, position = self.place_of_step(step)
        rank, turn = np.divmod(np.array(samples), self.batch_size // self.num_ranks)
        numbers = position * self.batch_size + turn * self.num_ranks + rank
        return self._read(self.window_anchors(window)[numbers])

    def evaluation_batches(self) -> Iterator[dict[str, Any]]:
        """Yields the last window once, by user and time.

        Copies of the last sample, with weight 0, pad the last batch, so that each
        anchor counts.
        """
        anchors = self.evaluation_anchors
        for start in range(0, len(anchors), self.batch_size):
            number = np.arange(start, start + self.batch_size)
            batch = self._read(anchors[np.minimum(number, len(anchors) - 1)])
            batch["weight"] = (number < len(anchors)).astype(np.float32)
            yield batch

    @property
    def evaluation_anchors(self) -> np.ndarray:
        """Places in the log of the samples of the evaluation, in their order."""
        return self.window_anchors(self.num_windows - 1)

    def _read(self, anchors: np.ndarray) -> dict[str, Any]:
        batch = self._samples.read(anchors)
        return batch | {"weight": np.ones(len(anchors), np.float32)}
