"""Random ids, the buffers that they make, and dense updates: plain NumPy."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tpu_embedding.sparse_core.partitioned_ids import partition_ids

PAD = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Case:
    """Ids of one device: rows of a table whose row r is in partition r % partitions."""

    ids: np.ndarray
    samples: np.ndarray
    gains: np.ndarray
    num_samples: int
    cores: int
    devices: int
    rows_per_partition: int

    @property
    def num_partitions(self):
        return self.cores * self.devices

    def arguments(self):
        """Returns the arrays that `partition_ids` takes; ids below 0 are padding."""
        is_used = self.ids >= 0
        partitions = np.where(is_used, self.ids % self.num_partitions, PAD)
        rows = np.where(is_used, self.ids // self.num_partitions, PAD)
        samples = np.where(is_used, self.samples, PAD)
        arrays = (x.astype(np.int32) for x in (partitions, rows, samples))
        return (*arrays, self.gains.astype(np.float32))

    def sizes(self):
        return dict(
            num_samples=self.num_samples,
            rows_per_partition=self.rows_per_partition,
            cores=self.cores,
            devices=self.devices,
        )


def random_case(seed, cores, devices, num_samples=None, valence=3, shuffled=True):
    """Draws ids with repeats, padding, and samples in any order."""
    random = np.random.default_rng(seed)
    num_samples = num_samples or 8 * cores
    rows_per_partition = int(random.integers(1, 20))
    num_rows = rows_per_partition * cores * devices
    ids = random.integers(-1, num_rows, num_samples * valence)
    samples = np.repeat(np.arange(num_samples), valence)
    if shuffled:
        samples = random.permutation(samples)
    return Case(
        ids=ids,
        samples=samples,
        gains=random.normal(size=ids.size),
        num_samples=num_samples,
        cores=cores,
        devices=devices,
        rows_per_partition=rows_per_partition,
    )


def expected_buffers(case, room):
    """Returns pointers, rows, samples, gains and the three largest counts."""
    per_core = case.num_samples // case.cores
    groups = collections.defaultdict(dict)
    for row, sample, gain in zip(case.ids, case.samples, case.gains, strict=True):
        if row < 0:
            continue
        group = groups[sample // per_core, row % case.num_partitions]
        pair = row // case.num_partitions, sample % per_core
        group[pair] = group.get(pair, 0.0) + np.float32(gain)
    rows = np.full((case.cores, room), PAD, np.int32)
    samples, gains = rows.copy(), np.full(rows.shape, np.nan, np.float32)
    pointers = np.zeros((case.cores, max(8, case.num_partitions)), np.int32)
    largest = [0, 0, 0]
    for core in range(case.cores):
        place = 0
        for partition in range(case.num_partitions):
            pairs = sorted(groups[core, partition].items())
            for i, ((row, sample), gain) in enumerate(pairs):
                rows[core, place + i] = row
                samples[core, place + i] = sample
                gains[core, place + i] = gain
            pointers[core, partition] = place + len(pairs)
            place = -(-(place + len(pairs)) // 8) * 8
            largest[0] = max(largest[0], len(pairs))
            largest[1] = max(largest[1], len({row for (row, _), _ in pairs}))
        pointers[core, case.num_partitions :] = place
        largest[2] = max(largest[2], place)
    flat = (x.reshape(-1) for x in (pointers, rows, samples, gains))
    return (*flat, tuple(largest))


def room_for(case):
    """Returns places that hold any ids of the case."""
    return -(-(case.ids.size + 7 * case.num_partitions) // 8) * 8


def buffers(case, room):
    ids, largest = jax.jit(
        lambda *arrays: partition_ids(*arrays, **case.sizes(), room=room)
    )(*case.arguments())
    counts = int(largest.ids), int(largest.unique), int(largest.positions)
    return ids, counts


def on_devices(function, devices, num_inputs, num_outputs):
    """Returns a function of arrays `[devices, ...]` whose entries each device has."""
    mesh = Mesh(np.asarray(jax.devices()[:devices]), ("shard",))

    def on_shard(*arrays):
        results = function(*(x[0] for x in arrays))
        return jax.tree.map(lambda x: x[None], results)

    return jax.jit(
        jax.shard_map(
            on_shard,
            mesh=mesh,
            in_specs=(P("shard"),) * num_inputs,
            out_specs=(P("shard"),) * num_outputs if num_outputs > 1 else P("shard"),
            check_vma=False,
        )
    )


def dealt(table, cores, devices):
    """Deals the rows of a table: `[devices, rows of a device, width]`."""
    by_partition = table.reshape(-1, cores * devices, table.shape[1]).swapaxes(0, 1)
    return by_partition.reshape(devices, -1, table.shape[1])


def gathered(shards, cores):
    """Returns the table whose rows were dealt."""
    devices, _, width = shards.shape
    by_partition = np.asarray(shards).reshape(devices * cores, -1, width)
    return by_partition.swapaxes(0, 1).reshape(-1, width)


def stacked(cases):
    """Returns the arguments of all devices, `[devices, ...]`."""
    return [jnp.stack(x) for x in zip(*(c.arguments() for c in cases), strict=True)]
