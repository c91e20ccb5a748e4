"""Order in which training visits the samples of files, shuffled by blocks.

A block is a group of consecutive samples that is cheap to read at once: a few lines, a
slice of arrays, or a row group. The order is a pure function of a position, the number
of a sample counted over all epochs. So a run resumes at any position, on any number of
processes, without a saved state of the readers.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from tpu_embedding.tools.data.random_streams import TRAIN_STREAM, random_generator

MAX_BLOCKS: Final = 2**20
"""Blocks of large files at most, so that their order never takes more than 51 MB."""


class BlockOrder:
    """A new random order of the blocks in each epoch.

    With several streams, an epoch is cut into `num_streams` parts of equal length. A
    batch takes `stride` consecutive samples of each part in turn. The parts mix distant
    blocks in one batch. They also let several readers share the work: each reads the
    blocks of its own streams, and no block is read twice. The samples that are left
    over come last.

    The order keeps 24 bytes per block in memory, and 48 while it draws a new epoch.

    Args:
      bounds: int64 `[blocks + 1]`, rising: the first sample of each block, and the
        number of samples.
      seed: seed of the order.
      num_streams: parts of an epoch that a batch mixes.
      stride: consecutive samples of a stream; 1 or more.

    Example:
      >>> order = BlockOrder(np.array([0, 3, 6, 7]), seed=0)
      >>> sorted(order.samples(range(7, 14)).tolist())  # the second epoch
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
        self._last_order = (0, self._draw(0))

    def samples(self, positions: range) -> np.ndarray:
        """Returns the int64 numbers of the samples at the given positions."""
        places = np.arange(positions.start, positions.stop)
        epochs, offsets = np.divmod(places, self.num_samples)
        samples = np.empty(len(places), np.int64)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            samples[of_epoch] = self._of_epoch(int(epoch), offsets[of_epoch])
        return samples

    def _of_epoch(self, epoch: int, offsets: np.ndarray) -> np.ndarray:
        last_epoch, (blocks, ends) = self._last_order
        if epoch != last_epoch:
            blocks, ends = self._draw(epoch)
            self._last_order = (epoch, (blocks, ends))
        offsets = self._deal(offsets)
        places = np.searchsorted(ends, offsets, side="right")
        starts = np.where(places > 0, ends[places - 1], 0)
        return self._bounds[blocks[places]] + offsets - starts

    def _deal(self, offsets: np.ndarray) -> np.ndarray:
        """Returns the offset in the order of blocks for each offset in the epoch."""
        turn_size = self._num_streams * self._stride
        num_turns = self.num_samples // turn_size
        turns, within = np.divmod(offsets, turn_size)
        streams, within = np.divmod(within, self._stride)
        dealt = (streams * num_turns + turns) * self._stride + within
        return np.where(turns < num_turns, dealt, offsets)

    def _draw(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the block order of an epoch, and the end offset of each block."""
        generator = random_generator(seed=self._seed, stream=TRAIN_STREAM, step=epoch)
        blocks = generator.permutation(len(self._bounds) - 1)
        return blocks, np.cumsum(np.diff(self._bounds)[blocks])


def block_bounds(num_samples: Sequence[int], block_size: int) -> np.ndarray:
    """Returns the bounds of blocks of equal size, none of which spans two files.

    Args:
      num_samples: samples of each file.
      block_size: samples of a block; the last one of a file may have fewer.

    Example:
      >>> block_bounds([5, 3], 2).tolist()
      [0, 2, 4, 5, 7, 8]
    """
    ends = np.cumsum(num_samples)
    starts = [
        np.arange(end - count, end, block_size)
        for end, count in zip(ends, num_samples, strict=True)
    ]
    return np.append(np.concatenate(starts), ends[-1]).astype(np.int64)


def bounded_block_size(num_samples: int, block_size: int) -> int:
    """Returns a block size that gives `MAX_BLOCKS` blocks at most.

    Args:
      num_samples: samples of all files.
      block_size: smallest size, doubled as often as needed.

    Example:
      >>> bounded_block_size(67_000_000, 64), bounded_block_size(68_000_000, 64)
      (64, 128)
    """
    while num_samples > block_size * MAX_BLOCKS:
        block_size *= 2
    return block_size


def by_part(
    samples: np.ndarray, starts: np.ndarray
) -> Iterator[tuple[int, slice, np.ndarray]]:
    """Splits samples into runs that lie in one part, such as a file or a row group.

    Args:
      samples: numbers of samples, in any order.
      starts: first sample of each part, rising from 0.

    Yields:
      The number of the part, the slice of `samples`, and the numbers within the part.

    Example:
      >>> for part, places, rows in by_part(np.array([4, 5, 0]), np.array([0, 5])):
      ...     print(part, places, rows.tolist())
      0 slice(0, 1, None) [4]
      1 slice(1, 2, None) [0]
      0 slice(2, 3, None) [0]
    """
    parts = np.searchsorted(starts, samples, side="right") - 1
    breaks = np.flatnonzero(np.diff(parts)) + 1
    edges = [0, *breaks.tolist(), len(samples)]
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        part = int(parts[begin])
        yield part, slice(begin, end), samples[begin:end] - starts[part]


def runs_of(samples: np.ndarray) -> list[slice]:
    """Returns the runs of consecutive numbers, as slices of the numbers themselves.

    Example:
      >>> runs_of(np.array([4, 5, 6, 0, 9, 10]))
      [slice(4, 7, None), slice(0, 1, None), slice(9, 11, None)]
    """
    breaks = np.flatnonzero(np.diff(samples) != 1)
    firsts = samples[np.append(0, breaks + 1)]
    lasts = samples[np.append(breaks, len(samples) - 1)]
    return [
        slice(first, last + 1)
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True)
    ]


def take_runs(array: np.ndarray, runs: Sequence[slice]) -> np.ndarray:
    """Returns a copy of runs of rows, in native byte order."""
    return np.concatenate([array[run] for run in runs])
