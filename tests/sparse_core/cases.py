"""Random ids, the buffers that they make, and dense updates: plain NumPy."""

import collections
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tpu_embedding.sparse_core.limits import Limits, OperationSizes
from tpu_embedding.sparse_core.partitioned_ids import PartitionedIds, partition_ids

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
    if shuffled:  # The ids of a row must be in the order of samples, others not.
        order = np.lexsort((samples, random.permutation(num_rows + 1)[ids]))
        ids, samples = ids[order], samples[order]
    return Case(
        ids=ids,
        samples=samples,
        gains=random.normal(size=ids.size),
        num_samples=num_samples,
        cores=cores,
        devices=devices,
        rows_per_partition=rows_per_partition,
    )


def groups_of(case):
    """Returns `{(core, partition): {(row, sample): gain}}`, equal ids merged."""
    per_core = case.num_samples // case.cores
    groups = collections.defaultdict(dict)
    for row, sample, gain in zip(case.ids, case.samples, case.gains, strict=True):
        if row < 0:
            continue
        group = groups[sample // per_core, row % case.num_partitions]
        pair = row // case.num_partitions, sample % per_core
        group[pair] = group.get(pair, 0.0) + np.float32(gain)
    return groups


def minibatches_of(cases, limits):
    """Returns the rows where minibatches end: as many rows as all groups allow.

    None if a row has too many ids, or there are too many minibatches.
    """
    groups = [sorted(g) for case in cases for g in groups_of(case).values()]
    ends, num_rows = [], cases[0].rows_per_partition
    begin = 0
    while begin < num_rows:
        end = num_rows
        for pairs in groups:
            unique, count = set(), 0
            for row, _ in pairs:
                if row < begin:
                    continue
                unique.add(row)
                count += 1
                if count > limits.max_ids or len(unique) > limits.max_unique:
                    end = min(end, row)
                    break
        if end == begin or len(ends) == 64:
            return None
        ends.append(end)
        begin = end
    return ends


def expected_buffers(case, room, ends=None):
    """Returns pointers, rows, samples and gains.

    Args:
      case: ids of a device.
      room: number of positions.
      ends: rows where minibatches end. Defaults to one minibatch.
    """
    ends = ends or [case.rows_per_partition]
    groups = groups_of(case)
    rows = np.full(room, PAD, np.int32)
    samples, gains = rows.copy(), np.full(room, np.nan, np.float32)
    pointers, place = [], 0
    for core in range(case.cores):
        for begin, end in itertools.pairwise([0, *ends]):
            for partition in range(case.num_partitions):
                pairs = [
                    (pair, gain)
                    for pair, gain in sorted(groups[core, partition].items())
                    if begin <= pair[0] < end
                ]
                for i, ((row, sample), gain) in enumerate(pairs):
                    rows[place + i] = row
                    samples[place + i] = sample
                    gains[place + i] = gain
                pointers.append(place + len(pairs))
                place = -(-(place + len(pairs)) // 8) * 8
            pointers += [place] * max(0, 8 - case.num_partitions)
    size = case.cores * 64 * max(8, case.num_partitions)
    pointers += [place] * (size - len(pointers))
    return np.asarray(pointers, np.int32), rows, samples, gains


def limits_for(case, max_ids=4096, max_unique=4096):
    """Returns limits with places for any ids of the case, in some minibatches."""
    groups = case.cores * case.num_partitions
    room = -(-(case.ids.size + 64 * 7 * groups) // 8) * 8
    return Limits(max_ids=max_ids, max_unique=max_unique, room=room)


def partition(
    partitions, rows, samples, gains, *, num_samples, cores, limits, **options
):
    """Calls `partition_ids` on a shard of the axis "shard"."""

    def sample_at(positions):
        return samples[positions]

    sizes = OperationSizes(num_samples, limits, cores, ("shard",))
    return partition_ids(partitions, rows, sample_at, gains, sizes, **options)


def buffers(cases, limits, may_repeat=True):
    """Returns the buffers of each device, and whether they hold all ids."""
    options = dict(**cases[0].sizes(), limits=limits, may_repeat=may_repeat)

    def buffers_of_shard(*arguments):
        ids, fits = partition(*arguments, **options)
        return *jax.tree.leaves(ids), fits

    *leaves, fits = on_devices(buffers_of_shard, len(cases), 4, 6)(*stacked(cases))
    names = [x.name for x in dataclasses.fields(PartitionedIds)]
    return [
        PartitionedIds(
            **{k: np.asarray(x[i]) for k, x in zip(names, leaves, strict=True)}
        )
        for i in range(len(cases))
    ], [bool(x) for x in fits]


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
