"""Finds the samples of a batch that lie on the devices of each process.

In a job of several processes, each process loads only these samples.
"""

import collections

from jax.sharding import NamedSharding


def samples_by_process(
    sharding: NamedSharding, num_shards: int, batch_size: int
) -> dict[int, range]:
    """Returns the samples of each process, by its number.

    Args:
      sharding: of batches along their first axis.
      num_shards: devices of the mesh. Ragged features are split into so many parts.
      batch_size: samples of the global batch.

    Returns:
      Ranges of equal length, the same on every process. All processes load all samples
      if the devices do not divide the batch, or if the samples of some process are not
      consecutive.
    """
    held: dict[int, set[tuple[int, int]]] = collections.defaultdict(set)
    indices = sharding.devices_indices_map((num_shards,))
    for device, (index,) in indices.items():
        held[device.process_index].add(index.indices(num_shards)[:2])
    shards = {process: _join(sorted(parts)) for process, parts in held.items()}
    sizes = {None if part is None else len(part) for part in shards.values()}
    if batch_size % num_shards or len(sizes) > 1 or None in sizes:
        return dict.fromkeys(held, range(batch_size))
    size = batch_size // num_shards
    return {
        process: range(part.start * size, part.stop * size)
        for process, part in shards.items()
        if part is not None
    }


def _join(parts: list[tuple[int, int]]) -> range | None:
    """Returns the range that sorted, disjoint parts cover; None if it has gaps."""
    for (_, end), (start, _) in zip(parts, parts[1:], strict=False):
        if end != start:
            return None
    return range(parts[0][0], parts[-1][1])
