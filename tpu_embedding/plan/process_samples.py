"""Finds the samples of a batch that lie on the devices of each process.

In a job of several processes, each process loads only these samples.
"""

from collections.abc import Sequence


def process_shards(processes: Sequence[int]) -> dict[int, range] | None:
    """Returns the shards of samples that each process holds, by its number.

    Args:
      processes: process of each device, in the order of the mesh. Each device looks up
        one shard.

    Returns:
      Ranges of equal length. None if the devices of some process are not consecutive,
      or differ in number.

    Example:
      >>> process_shards([0, 0, 1, 1])
      {0: range(0, 2), 1: range(2, 4)}
    """
    size = len(processes) // len(set(processes))
    shards = {
        processes[start]: range(start, start + size)
        for start in range(0, len(processes), size)
    }
    expected = [process for process, shard in shards.items() for _ in shard]
    return shards if expected == list(processes) else None
