"""A data set over files that need not fit in memory, given a reader of samples.

The reader only handles the file format. `BlockDataset` adds batches, epochs, seeds and
processes. This package's reader of Parquet files uses it, and so can your own.
"""

import functools
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from tpu_embedding.argument_checks import invalid
from tpu_embedding.tools.data.batch import Batch, DataError, padded_batches
from tpu_embedding.tools.data.teacher import TRAIN_STREAM, random_generator


class SampleReader(Protocol):
    """Reads samples by number.

    Attributes:
      block_bounds: int64 `[blocks + 1]`, the first sample of each block, then the
        number of samples. Reading samples of the same block together is cheap.
    """

    block_bounds: np.ndarray

    def read(self, samples: np.ndarray) -> Batch:
        """Returns the given samples, in the given order.

        Args:
          samples: int64 `[num_samples]`, mostly runs of consecutive numbers.

        Raises:
          DataError: if the data are damaged; the message names file and place.
        """
        ...


class BlockDataset:
    """A `Dataset` that visits a reader's samples in an order shuffled by blocks.

    Every training sample is used once per epoch. A batch may span two epochs, so every
    batch is full. The last samples are held out for evaluation.

    Attributes:
      batch_size: samples per batch.
      num_train_samples: number of training samples.
      num_evaluation_samples: number of held-out samples.

    Example:
      >>> class Squares:
      ...     block_bounds = np.array([0, 4, 8, 12])
      ...
      ...     def read(self, samples):
      ...         return Batch(
      ...             features={"number": samples},
      ...             labels=samples**2,
      ...             weights=np.ones(len(samples)),
      ...         )
      >>> data = BlockDataset(Squares(), batch_size=4, num_evaluation_samples=4)
      >>> data.train_batch(0).labels.tolist()  # the second block
      [16, 25, 36, 49]
      >>> data.train_part(0, range(1, 3)).labels.tolist()
      [25, 36]
    """

    def __init__(
        self,
        reader: SampleReader,
        *,
        batch_size: int,
        num_evaluation_samples: int | None = None,
        evaluation_reader: SampleReader | None = None,
        seed: int = 0,
        num_streams: int = 1,
    ):
        """Splits the samples into training samples and held-out samples.

        Args:
          reader: reader of the training samples.
          batch_size: samples per batch.
          num_evaluation_samples: number of held-out samples. They are the last samples
            of the evaluation reader, or of the training reader if there is no
            evaluation reader. Defaults to all samples of the evaluation reader.
          evaluation_reader: reader of the held-out samples, or None.
          seed: seed of the training order, at least 0.
          num_streams: number of pieces of an epoch that a batch mixes; see
            `BlockOrder`.

        Raises:
          DataError: if there are not enough samples to hold out.
        """
        self.batch_size = batch_size
        self._reader = reader
        self._evaluation_reader = evaluation_reader or reader
        available = int(self._evaluation_reader.block_bounds[-1])
        self.num_evaluation_samples = num_evaluation_samples or available
        self.num_train_samples = int(reader.block_bounds[-1])
        if evaluation_reader is None:
            self.num_train_samples -= self.num_evaluation_samples
        if self.num_evaluation_samples > available or self.num_train_samples < 1:
            limit = "less than" if evaluation_reader is None else "at most"
            rule = f"be {limit} the {available} samples of {self._evaluation_reader}"
            field, fix = "num_evaluation_samples", "Lower it, or set evaluation files."
            raise invalid(field, rule, num_evaluation_samples, fix, DataError)
        bounds = reader.block_bounds
        bounds = bounds[bounds < self.num_train_samples]
        self._order = BlockOrder(
            np.append(bounds, self.num_train_samples),
            seed=seed,
            num_streams=num_streams,
            stride=max(1, batch_size // num_streams),
        )

    def train_batch(self, step: int) -> Batch:
        """Returns the batch of training step `step`, counted from 0."""
        return self.train_part(step, range(self.batch_size))

    def train_part(self, step: int, samples: range) -> Batch:
        """Returns a part of the batch of `step`, and reads only this part.

        Args:
          step: number of the step, from 0.
          samples: consecutive positions in the batch.
        """
        first = step * self.batch_size
        positions = np.arange(first + samples.start, first + samples.stop)
        return self._reader.read(self._order.samples(positions))

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yields the held-out samples in file order.

        Copies of the last sample, with weight 0, pad the last batch.
        """
        end = int(self._evaluation_reader.block_bounds[-1])
        samples = np.arange(end - self.num_evaluation_samples, end)
        yield from padded_batches(
            self._evaluation_reader.read, samples, self.batch_size
        )


class BlockOrder:
    """An order of samples, with the blocks in a new random order in each epoch.

    Positions are counted over all epochs. The sample at a position is a pure function
    of the position, so a run can resume anywhere, on any number of processes, without
    saved reader state.

    With several streams, an epoch is cut into `num_streams` equal pieces. A batch mixes
    the pieces: it takes `stride` consecutive samples from each piece in turn. Samples
    that don't fill a turn come last.

    Args:
      bounds: int64 `[blocks + 1]`, ascending: the first sample of each block, then the
        number of samples.
      seed: seed of the order.
      num_streams: number of pieces.
      stride: number of consecutive samples from a piece, at least 1.

    Example:
      >>> order = BlockOrder(np.array([0, 3, 6, 7]), seed=0)
      >>> sorted(order.samples(np.arange(7, 14)).tolist())  # the second epoch
      [0, 1, 2, 3, 4, 5, 6]
    """

    def __init__(
        self, bounds: np.ndarray, *, seed: int, num_streams: int = 1, stride: int = 1
    ):
        self.num_samples = int(bounds[-1])
        self._bounds = bounds
        self._seed = seed
        self._num_streams = num_streams
        self._stride = stride
        self._shuffled = functools.lru_cache(maxsize=1)(self._shuffle)

    def samples(self, positions: np.ndarray) -> np.ndarray:
        """Returns the int64 numbers of the samples at ascending positions."""
        epochs, offsets = np.divmod(positions, self.num_samples)
        # Each turn takes `stride` samples from every stream.
        turns, turn_offsets = np.divmod(offsets, self._num_streams * self._stride)
        streams, stream_offsets = np.divmod(turn_offsets, self._stride)
        num_turns = self.num_samples // (self._num_streams * self._stride)
        dealt = (streams * num_turns + turns) * self._stride + stream_offsets
        offsets = np.where(turns < num_turns, dealt, offsets)

        samples = np.empty(len(positions), np.int64)
        for epoch in np.unique(epochs).tolist():
            blocks, ends = self._shuffled(epoch)
            is_in_epoch = epochs == epoch
            epoch_offsets = offsets[is_in_epoch]
            places = np.searchsorted(ends, epoch_offsets, side="right")
            starts = np.where(places > 0, ends[places - 1], 0)
            first_samples = self._bounds[blocks[places]]
            samples[is_in_epoch] = first_samples + epoch_offsets - starts
        return samples

    def _shuffle(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the block order of an epoch, and the end offset of each block."""
        generator = random_generator(seed=self._seed, stream=TRAIN_STREAM, step=epoch)
        blocks = generator.permutation(len(self._bounds) - 1)
        return blocks, np.cumsum(np.diff(self._bounds)[blocks])
