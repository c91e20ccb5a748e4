"""A data set over files that need not fit in memory, given a reader of samples.

The reader knows the file format, and nothing of batches, epochs, seeds or processes.
`BlockDataset` adds those. The readers of this package, for logs, arrays and Parquet
files, are used through it, and so can be a reader of your own.
"""

import dataclasses
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from tpu_embedding.field_checks import raise_all
from tpu_embedding.tools.data.argument_checks import count_problems, seed_problems
from tpu_embedding.tools.data.batch import Batch, DataError
from tpu_embedding.tools.data.block_order import BlockOrder
from tpu_embedding.tools.data.digests import join_digests


class SampleReader(Protocol):
    """Reads samples by their numbers.

    Loader processes get a copy, so it must be possible to pickle it. A reader of mapped
    or open files opens them anew in the copy.

    A reader may have a text `digest` of its samples, or of what it read of its files to
    index them. A run that resumes compares it with that of the checkpoint.

    Attributes:
      block_bounds: int64 `[blocks + 1]`, the first sample of each block, and the number
        of samples. The samples of a block are cheap to read together.
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
    """A `Dataset` that visits the samples of a reader in an order shuffled by blocks.

    A batch may span two epochs, so every batch is full, and every sample is used once
    per epoch. The held-out samples are the last ones.

    Attributes:
      batch_size: samples per batch.
      num_train_samples: number of training samples.
      num_evaluation_samples: number of held-out samples.
      digest: digest of all samples; None if a reader has none.

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
        """Splits the samples into training and held-out ones.

        Args:
          reader: reader of the training samples.
          batch_size: samples per batch.
          num_evaluation_samples: number of samples held out at the end of the
            evaluation reader, or of the training reader without one. None means all
            samples of the evaluation reader.
          evaluation_reader: reader of the held-out samples, or None.
          seed: seed of the training order, at least 0.
          num_streams: places of an epoch that a batch mixes; see `BlockOrder`.

        Raises:
          ValueError: if arguments are out of range; the message names all of them.
          DataError: if there are too few samples to hold out so many.
        """
        owner = type(self).__name__
        problems = [
            *count_problems(owner, batch_size=batch_size, num_streams=num_streams),
            *held_out_problems(
                owner, num_evaluation_samples, evaluation_reader is not None
            ),
            *seed_problems(owner, seed),
        ]
        raise_all(problems)
        self.batch_size = batch_size
        self.seed = seed
        self._reader = reader
        self._evaluation_reader = evaluation_reader or reader
        readers = [reader] + ([evaluation_reader] if evaluation_reader else [])
        digests = [getattr(each, "digest", None) for each in readers]
        known = [each for each in digests if each is not None]
        self.digest = join_digests(known) if known == digests else None
        self._split(num_evaluation_samples)
        bounds = reader.block_bounds
        bounds = bounds[bounds < self.num_train_samples]
        self._order = BlockOrder(
            np.append(bounds, self.num_train_samples),
            seed=seed,
            num_streams=num_streams,
            stride=max(1, batch_size // num_streams),
        )

    def _split(self, num_evaluation_samples: int | None) -> None:
        available = int(self._evaluation_reader.block_bounds[-1])
        if num_evaluation_samples is None:
            num_evaluation_samples = available
        self.num_evaluation_samples = num_evaluation_samples
        self.num_train_samples = int(self._reader.block_bounds[-1])
        if self._evaluation_reader is self._reader:
            self.num_train_samples -= num_evaluation_samples
        if num_evaluation_samples > available or self.num_train_samples < 1:
            raise DataError(
                f"{self._evaluation_reader} has {available} samples, too few to hold "
                f"out {num_evaluation_samples}; lower num_evaluation_samples."
            )

    def train_batch(self, step: int) -> Batch:
        """Returns the batch of training step `step`, counted from 0."""
        return self.train_part(step, range(self.batch_size))

    def train_part(self, step: int, samples: range) -> Batch:
        """Returns some samples of the batch of `step`, and reads no others.

        Args:
          step: number of the step, from 0.
          samples: positions in the batch, consecutive.
        """
        first = step * self.batch_size
        positions = range(first + samples.start, first + samples.stop)
        return self._reader.read(self._order.samples(positions))

    def evaluation_batches(self) -> Iterator[Batch]:
        """Yields the held-out samples in file order.

        Copies of the last sample, with weight 0, pad the last batch.
        """
        reader = self._evaluation_reader
        end = int(reader.block_bounds[-1])
        for start in range(end - self.num_evaluation_samples, end, self.batch_size):
            places = start + np.arange(self.batch_size)
            batch = reader.read(np.minimum(places, end - 1))
            weights = np.where(places < end, batch.weights, 0)
            yield dataclasses.replace(batch, weights=weights.astype(np.float32))


def held_out_problems(
    owner: str, num_evaluation_samples: int | None, has_evaluation_files: bool
) -> Iterator[str]:
    """Yields an error message if `num_evaluation_samples` is wrong."""
    if num_evaluation_samples is not None:
        yield from count_problems(owner, num_evaluation_samples=num_evaluation_samples)
    elif not has_evaluation_files:
        yield (
            f"{owner}.num_evaluation_samples must be an int of at least 1 without "
            "files for the evaluation, got None; give the number of samples to hold "
            "out at the end of the training files"
        )
