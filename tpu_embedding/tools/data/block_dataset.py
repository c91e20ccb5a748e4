"""A data set for files that may be larger than memory, read by a `SampleReader`.

The reader handles the file format. `BlockDataset` chooses the order of the samples,
holds samples out, and lets each process read only its part of a batch.
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
      block_bounds: int64 `[blocks + 1]`, the number of each block's first sample,
        followed by the sample count. Samples from one block are cheap to read together.

    Example:
      >>> class Squares:
      ...     block_bounds = np.array([0, 4, 8])
      ...
      ...     def read(self, samples):
      ...         weights = np.ones(len(samples))
      ...         return Batch(features={}, labels=samples**2, weights=weights)
      >>> reader: SampleReader = Squares()
      >>> reader.read(np.array([3, 4])).labels.tolist()
      [9, 16]
    """

    block_bounds: np.ndarray

    def read(self, samples: np.ndarray) -> Batch:
        """Reads the given samples, in the given order.

        Args:
          samples: int64 `[num_samples]`, mostly runs of consecutive numbers.

        Raises:
          DataError: if the data are damaged. The message names the file and the place.
        """
        ...


class BlockDataset:
    """A `Dataset` that visits a reader's blocks of samples in shuffled order.

    Each epoch uses every training sample once. Note that a batch may span two epochs,
    so every batch is full. The last samples are held out for evaluation.

    Attributes:
      batch_size: samples per batch.
      num_train_samples: number of training samples in an epoch.
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
          reader: reads the training samples.
          batch_size: samples per batch.
          num_evaluation_samples: how many samples to hold out. They are the last
            samples in `evaluation_reader`, or in `reader` if `evaluation_reader` is
            None. Defaults to all samples in `evaluation_reader`.
          evaluation_reader: reads the held-out samples. If None, `reader` reads them.
          seed: seed for the training order, at least 0.
          num_streams: number of epoch pieces that a batch mixes; see `BlockOrder`.

        Raises:
          DataError: if there are too few samples to hold out and to train with.
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
        # If the held-out samples start within a block, training cuts the block there.
        bounds = bounds[bounds < self.num_train_samples]
        self._order = BlockOrder(
            np.append(bounds, self.num_train_samples),
            seed=seed,
            num_streams=num_streams,
            # A batch takes one run of samples from each stream, because consecutive
            # samples are cheap to read.
            stride=max(1, batch_size // num_streams),
        )

    def train_batch(self, step: int) -> Batch:
        """Reads the batch for training step `step`, counted from 0."""
        return self.train_part(step, range(self.batch_size))

    def train_part(self, step: int, samples: range) -> Batch:
        """Reads only part of a step's batch.

        Args:
          step: training step, counted from 0.
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
    """A sample order that shuffles the blocks again in each epoch.

    A position, counted over all epochs, determines the sample. A run can thus resume at
    any position, on any number of processes.

    An epoch is cut into `num_streams` equal pieces. Each turn takes `stride`
    consecutive samples from every piece. `bounds` has the form of
    `SampleReader.block_bounds`.

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
        # Caching one epoch is enough, because steps are read in order. Decorating the
        # method itself would keep every instance alive.
        self._shuffled = functools.lru_cache(maxsize=1)(self._shuffle)

    def samples(self, positions: np.ndarray) -> np.ndarray:
        """Maps positions to int64 sample numbers."""
        epochs, offsets = np.divmod(positions, self.num_samples)
        turns, turn_offsets = np.divmod(offsets, self._num_streams * self._stride)
        streams, stream_offsets = np.divmod(turn_offsets, self._stride)
        num_turns = self.num_samples // (self._num_streams * self._stride)
        dealt = (streams * num_turns + turns) * self._stride + stream_offsets
        # Samples after the last full turn keep their offsets, so that every sample
        # still occurs once per epoch.
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
        """Shuffles the blocks for an epoch, and finds where each block ends."""
        generator = random_generator(seed=self._seed, stream=TRAIN_STREAM, step=epoch)
        blocks = generator.permutation(len(self._bounds) - 1)
        return blocks, np.cumsum(np.diff(self._bounds)[blocks])
