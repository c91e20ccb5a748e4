"""Finds the samples of a batch that lie on the devices of each process.

In a job of several processes, each process loads only these samples.
"""

import collections
import functools

from jax.sharding import NamedSharding


@functools.lru_cache(maxsize=64)
def process_shards(sharding: NamedSharding, num_shards: int) -> dict[int, range] | None:
    """Returns the shards of samples that each process holds, by its number.

    Args:
      sharding: sharding of batches along their first axis.
      num_shards: devices of the mesh, each of which looks up an equal share.

    Returns:
      Ranges of equal length, the same on every process. None if those of some process
      are not consecutive, or differ in number.
    """
    held: dict[int, set[tuple[int, int]]] = collections.defaultdict(set)
    for device, (index,) in sharding.devices_indices_map((num_shards,)).items():
        held[device.process_index].add(index.indices(num_shards)[:2])
    shards = {}
    for process, parts in held.items():
        joined = _join(sorted(parts))
        if joined is None:
            return None
        shards[process] = joined
    return shards if len({len(part) for part in shards.values()}) == 1 else None


def _join(parts: list[tuple[int, int]]) -> range | None:
    """Returns the range that sorted, disjoint parts cover; None if it has gaps."""
    for (_, end), (start, _) in zip(parts, parts[1:], strict=False):
        if end != start:
            return None
    return range(parts[0][0], parts[-1][1])
