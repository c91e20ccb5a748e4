"""Sorts raw ids into the buffers that the SparseCore operations read, inside `jit`.

Each SparseCore owns the rows in one *partition*, and looks up rows for its share of the
samples on the device. A *group* holds the ids that one core requests from one
partition. If a group exceeds the limits, all groups are cut into *minibatches* at the
same rows. Each row is then in only one minibatch, and its gradients are always summed
in the same order.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compute_on import compute_on
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from tpu_embedding.sparse_core.limits import (
    ALIGNMENT,
    MAX_MINIBATCHES,
    OperationSizes,
)
from tpu_embedding.types import PADDING_ROW_ID
from tpu_embedding.xla import computed_apart, running_sum

MIN_POINTERS: Final = 8
"""Minimum number of pointers per core and minibatch, even with fewer partitions."""

_WORD: Final = 2**32
"""Number of values that a sort key can have."""

_LAST_WORD: Final = np.uint32(_WORD - 1)

_MIN_IDS_ON_SPARSE_CORES: Final = 2**14
"""Minimum number of ids to sort on SparseCores. Smaller sorts compile fast on the
TensorCore, and libtpu aborts when it compiles a sort of 512 ids for tpu7x's
SparseCores."""

_SORTED_TILE: Final = 4096
"""Sorts on SparseCores are padded to a multiple of this many ids."""

_BLOCK: Final = 128
"""Number of sorted ids per block, one for each lane of a TPU vector register."""

SampleAt = Callable[[Int[Array, " n"]], Int[Array, " n"]]
"""Maps positions of ids in the batch to their samples."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionedIds:
    """The ids on one device, as the SparseCore operations read them.

    Positions are ordered by core, minibatch, partition, row and sample. Each group
    starts at a multiple of 8. Unused positions hold `PADDING_ROW_ID`, or NaN in
    `gains`.

    Attributes:
      pointers: `[cores * 64 * max(8, partitions)]`, the position after each group's
        last id, ordered by core, minibatch and partition. Each core has pointers for
        `num_minibatches` minibatches, without gaps between cores. Spare pointers hold
        the position after all earlier groups, rounded up to a multiple of 8.
      rows: row of each id in its partition.
      samples: sample of each id on its core.
      num_minibatches: `[1]`, from 1 to 64, the same on all devices.
    """

    pointers: Int[Array, " pointers"]
    rows: Int[Array, " positions"]
    samples: Int[Array, " positions"]
    gains: Float[Array, " positions"]
    num_minibatches: Int[Array, "_"]

    def where(self, is_kept: Bool[Array, ""]) -> "PartitionedIds":
        """Empties the buffers unless a condition holds."""
        keep = functools.partial(jnp.where, is_kept)
        return PartitionedIds(
            pointers=keep(self.pointers, 0),
            rows=keep(self.rows, PADDING_ROW_ID),
            samples=keep(self.samples, PADDING_ROW_ID),
            gains=keep(self.gains, jnp.nan),
            num_minibatches=keep(self.num_minibatches, 1),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseCoreIds:
    """One device's ids in SparseCore buffers, for lookup and update.

    Attributes:
      fits: `[1]`, whether the ids on all devices fit in the buffers.
      are_joined: whether several lookups share one summed gradient.
    """

    ids: PartitionedIds
    fits: Bool[Array, "_"]
    sizes: OperationSizes = dataclasses.field(metadata={"static": True})
    are_joined: bool = dataclasses.field(metadata={"static": True})


@jax.named_scope("partition_ids")
def partition_ids(
    partitions: Int[Array, " ids"],
    rows: Int[Array, " ids"],
    sample_at: SampleAt,
    gains: Float[Array, " ids"] | None,
    sizes: OperationSizes,
    *,
    rows_per_partition: int,
    devices: int,
    may_repeat: bool = True,
) -> tuple[PartitionedIds, Bool[Array, ""]]:
    """Sorts one device's ids into the buffers that the operations read.

    A reduction over all devices makes them cut the same minibatches.

    Args:
      partitions: `device * cores + core` of each id's owner. Numbers out of range mark
        padding.
      rows: row of each id in its partition.
      sample_at: maps positions to samples on this device. Sample `s` belongs to core
        `s // (num_samples // cores)`. Ids with equal core and row must be in sample
        order.
      gains: gain of each id. None means 1 for all ids.
      may_repeat: whether a sample may have the same row twice.

    Returns:
      Two values: the buffers, and whether the ids on all devices fit in them. If they
      don't fit, the buffers are empty. Ids don't fit if a row has more than `max_ids`
      ids in a group, or if a gain isn't finite. They also don't fit if they need more
      than 64 minibatches, or more positions than `room`.
    """
    num_ids, cores, limits = partitions.shape[0], sizes.cores, sizes.limits
    num_partitions = cores * devices
    num_groups, samples_per_core = cores * num_partitions, sizes.num_samples // cores
    is_used = (partitions >= 0) & (partitions < num_partitions)
    core = sample_at(jnp.arange(num_ids, dtype=jnp.int32)) // samples_per_core
    # Padding becomes a separate last group.
    group = jnp.where(is_used, core * num_partitions + partitions, num_groups)
    row = jnp.where(is_used, rows, 0)
    group, row, order = _sort_by_row(group, row, num_groups, rows_per_partition)
    sample = sample_at(order) % samples_per_core

    gain = None if gains is None else gains[order]
    is_new_row = _differs(group) | _differs(row)
    ids_before = jnp.arange(num_ids + 1, dtype=jnp.int32)
    is_counted = group < num_groups
    if may_repeat:
        # As in TensorFlow and jax-tpu-embedding, ids with equal row and sample become
        # one id with the sum of their gains.
        is_new_id = is_new_row | _differs(sample) | ~is_counted
        ids_before = _count_before(is_new_id)
        is_counted &= is_new_id
        gain = _sum_repeats(is_new_id, gain)
    is_finite = True
    if gain is not None:
        # The operations can't take NaN as a gain, because NaN marks unused positions.
        is_finite = jnp.all(jnp.isfinite(gain) | ~is_counted)
    ids = _SortedIds(
        bounds=_bounds_of_groups(group, num_groups),
        row=row,
        rows_before=_count_before(is_new_row),
        ids_before=ids_before,
    )
    options = {"num_rows": rows_per_partition, "sizes": sizes}
    cut = jax.lax.platform_dependent(
        *(ids, jnp.asarray(is_finite)),
        cpu=functools.partial(_cut_for_all_devices, **options),
        default=functools.partial(_cut_into_minibatches, **options),
    )

    arrays = [row, sample] if gain is None else [row, sample, gain]
    if may_repeat:
        positions = jnp.arange(num_ids, dtype=jnp.uint32)
        # Moves repeats past the end, with one sort per array, because SparseCores sort
        # two operands at a time.
        keys = jnp.where(is_new_id, positions, _LAST_WORD)
        arrays = [sort_words(keys, values)[1] for values in arrays]
    taken = -(-cut.counts // ALIGNMENT) * ALIGNMENT
    aligned_end = running_sum(taken.reshape(-1)).reshape(taken.shape)
    start, end = aligned_end - taken, aligned_end - taken + cut.counts
    source, used_until = _sources(start, end, cut, limits.room)
    rows, samples, *copied = _copy_lines(arrays, source, used_until)
    if not copied:
        copied = [jnp.where(rows == PADDING_ROW_ID, jnp.nan, jnp.float32(1))]
    ids = PartitionedIds(
        pointers=_pointers(end, aligned_end, cut.num_minibatches),
        rows=rows,
        samples=samples,
        gains=copied[0],
        num_minibatches=cut.num_minibatches[None],
    )
    return ids, cut.is_complete


class _SortedIds(NamedTuple):
    """Ids sorted by group, row and sample, followed by padding.

    Attributes:
      bounds: start of each group, then start of the padding.
      rows_before: number of distinct rows before each position, then their total.
      ids_before: number of ids before each position, without repeats, then their total.
    """

    bounds: Int[Array, " groups_and_1"]
    row: Int[Array, " ids"]
    rows_before: Int[Array, " ids_and_1"]
    ids_before: Int[Array, " ids_and_1"]


class _CutState(NamedTuple):
    """The minibatches cut so far.

    Attributes:
      next_row: first row of the next minibatch.
      begin: position of the next minibatch's first sorted id, by group.
      positions: number of buffer positions in use.
    """

    count: Int[Array, ""]
    next_row: Int[Array, ""]
    begin: Int[Array, " groups"]
    positions: Int[Array, ""]
    first: Int[Array, "cores 64 partitions"]
    counts: Int[Array, "cores 64 partitions"]
    is_stuck: Bool[Array, ""]


class _Cut(NamedTuple):
    """The parts into which minibatches cut each group.

    Attributes:
      first: number of sorted ids, without repeats, before each part.
      counts: number of ids in each part.
      is_complete: whether all ids on all devices are in minibatches.
    """

    first: Int[Array, "cores 64 partitions"]
    counts: Int[Array, "cores 64 partitions"]
    num_minibatches: Int[Array, ""]
    is_complete: Bool[Array, ""]


def _sort_by_row(
    group: Int[Array, " ids"], row: Int[Array, " ids"], num_groups: int, num_rows: int
) -> tuple[Int[Array, " ids"], Int[Array, " ids"], Int[Array, " ids"]]:
    """Sorts ids stably by group and row, and finds their positions before sorting."""
    row = row.astype(jnp.uint32)
    # One sort is enough if group and row fit in one word. XLA:TPU takes half a minute
    # to compile a sort with four operands, so wider keys take two sorts.
    if (num_groups + 1) * num_rows <= _WORD:
        word, order = sort_words(group.astype(jnp.uint32) * np.uint32(num_rows) + row)
        group = word // np.uint32(num_rows)
        row = word - group * np.uint32(num_rows)
        return group.astype(jnp.int32), row.astype(jnp.int32), order
    _, order = sort_words(row)
    group, then = sort_words(group[order].astype(jnp.uint32))
    order = order[then]
    return group.astype(jnp.int32), row[order].astype(jnp.int32), order


def sort_words(
    words: UInt32[Array, " ids"], values: Shaped[Array, " ids"] | None = None
) -> tuple[UInt32[Array, " ids"], Shaped[Array, " ids"]]:
    """Sorts words together with values, or by default with their positions.

    The default sort is stable. With values, equal words may come in any order.
    """

    def sort(words: Array, values: Array | None = None) -> tuple[Array, Array]:
        # SparseCores sort stably only if one operand holds the positions.
        positions = jnp.arange(words.shape[0], dtype=jnp.int32)
        operands = (words, positions if values is None else values)
        words, values = jax.lax.sort(operands, num_keys=1, is_stable=values is None)
        return words, values

    operands = [words] if values is None else [words, values]
    num_ids = words.shape[0]
    if num_ids < _MIN_IDS_ON_SPARSE_CORES:
        return sort(*operands)
    padding = (0, -num_ids % _SORTED_TILE)
    operands[0] = jnp.pad(words, padding, constant_values=_LAST_WORD)
    operands[1:] = [jnp.pad(x, padding) for x in operands[1:]]
    on_tpu: Any = sort
    if jax.__version_info__ >= (0, 12):
        # A sort of 82,000 ids compiles in 1.5 s for SparseCores, and in 12 s for the
        # TensorCore.
        where = {"out_memory_spaces": jax.memory.Space.Device}
        on_tpu = compute_on(sort, compute_type="tpu_sparsecore", **where)
    words, values = jax.lax.platform_dependent(
        *computed_apart(operands), tpu=on_tpu, default=sort
    )
    return words[:num_ids], values[:num_ids]


def _sum_repeats(
    is_new_id: Bool[Array, " ids"], gain: Float[Array, " ids"] | None
) -> Float[Array, " ids"]:
    """Adds the gains of an id's repeats to its first occurrence.

    `is_new_id` is False for an id that repeats the previous one.
    """
    num_ids, number = is_new_id.shape[0], running_sum(is_new_id)

    def shifted(values: Array, distance: Array) -> Array:
        doubled = jnp.concatenate([values, jnp.zeros_like(values)])
        return jax.lax.dynamic_slice(doubled, (distance,), (num_ids,))

    # Each iteration doubles how many repeats a sum covers, until it covers all repeats
    # of the most frequent id. Batches without repeats skip the loop.
    def has_more(state: tuple[Array, Array]) -> Array:
        return jnp.any(shifted(number, state[0]) == number)

    def add(state: tuple[Array, Array]) -> tuple[Array, Array]:
        distance, sums = state
        is_repeat = shifted(number, distance) == number
        sums = jnp.where(is_repeat, sums + shifted(sums, distance), sums)
        return 2 * distance, sums

    gain = jnp.ones((num_ids,), jnp.float32) if gain is None else gain
    return jax.lax.while_loop(has_more, add, (jnp.int32(1), gain))[1]


def _bounds_of_groups(
    group: Int[Array, " ids"], num_groups: int
) -> Int[Array, " groups_and_1"]:
    # Compares group numbers with the last id in each block, then with all ids in one
    # block. A binary search would gather numbers one by one, which is slow on TPUs.
    numbers = jnp.arange(num_groups + 1, dtype=jnp.int32)[:, None]
    padding = (0, _BLOCK - group.size % _BLOCK)
    blocks = jnp.pad(group, padding, constant_values=num_groups + 1)
    blocks = blocks.reshape(-1, _BLOCK)
    num_full = jnp.sum(blocks[None, :, -1] < numbers, axis=1, dtype=jnp.int32)
    within = blocks.at[num_full].get(mode="promise_in_bounds") < numbers
    return _BLOCK * num_full + jnp.sum(within, axis=1, dtype=jnp.int32)


def _cut_for_all_devices(
    ids: _SortedIds, is_finite: Bool[Array, ""], *, num_rows: int, sizes: OperationSizes
) -> _Cut:
    """Cuts like `_cut_into_minibatches`, but without collectives in the loop."""
    # XLA:CPU may deadlock if a collective in a loop runs at the same time as a
    # collective elsewhere, such as in another stack. So each device cuts the ids of all
    # devices.
    gathered = jax.lax.all_gather((ids, is_finite), sizes.axes)
    of_all = {"num_rows": num_rows, "sizes": sizes._replace(axes=("devices",))}
    cut_all = functools.partial(_cut_into_minibatches, **of_all)
    cuts = jax.vmap(cut_all, axis_name="devices")(*gathered)
    return jax.tree.map(lambda x: x[jax.lax.axis_index(sizes.axes)], cuts)


def _cut_into_minibatches(
    ids: _SortedIds, is_finite: Bool[Array, ""], *, num_rows: int, sizes: OperationSizes
) -> _Cut:
    """Cuts all groups into minibatches, at the same rows on all devices.

    `is_finite` tells whether all gains on this device are finite.
    """
    # Each minibatch takes rows until any group on any device is full. One minibatch is
    # usually enough.
    ends, num_groups = ids.bounds[1:], ids.bounds.shape[0] - 1
    cores, limits = sizes.cores, sizes.limits

    def is_unfinished(state: _CutState) -> Array:
        is_within = (state.count < MAX_MINIBATCHES) & (state.next_row < num_rows)
        return is_within & ~state.is_stuck

    def cut(state: _CutState) -> _CutState:
        begin = state.begin
        rows_before, ids_before = ids.rows_before[begin], ids.ids_before[begin]

        def is_beyond(end: Array) -> Array:
            num_unique = ids.rows_before[end] - rows_before
            num_ids = ids.ids_before[end] - ids_before
            return (num_unique > limits.max_unique) | (num_ids > limits.max_ids)

        low = jnp.where(is_beyond(ends), begin, ends)
        full = _first_index(lambda i: is_beyond(i + 1), low, ends)
        next_rows = jnp.where(full < ends, ids.row[full], num_rows)
        # Each group may end with up to 7 unused positions.
        remaining = jnp.sum(ends - begin, dtype=jnp.int32)
        remaining += num_groups * (ALIGNMENT - 1)
        has_room = state.positions + remaining <= limits.room
        # -1 makes every device stop.
        next_row = jnp.where(has_room & is_finite, jnp.min(next_rows), -1)
        next_row = jax.lax.pmin(next_row, sizes.axes)
        # The last minibatch takes all remaining ids, without a search.
        low = jnp.where(next_row < num_rows, begin, ends)
        end = _first_index(lambda i: ids.row[i] >= next_row, low, ends)
        counts = ids.ids_before[end] - ids_before
        # True if not even one more row fits, or if a device asked to stop.
        is_stuck = next_row <= state.next_row
        taken = -(-counts // ALIGNMENT) * ALIGNMENT

        def put(values: Array, of_groups: Array) -> Array:
            of_groups = of_groups.reshape(cores, -1)
            return values.at[:, state.count].set(of_groups, mode="promise_in_bounds")

        return _CutState(
            count=state.count + ~is_stuck,
            next_row=next_row,
            begin=end,
            positions=state.positions + jnp.sum(taken, dtype=jnp.int32),
            first=put(state.first, ids_before),
            counts=put(state.counts, counts),
            is_stuck=is_stuck,
        )

    zero = jnp.int32(0)
    none = jnp.zeros((cores, MAX_MINIBATCHES, num_groups // cores), jnp.int32)
    state = _CutState(zero, zero, ids.bounds[:-1], zero, none, none, jnp.bool_(False))
    state = jax.lax.while_loop(is_unfinished, cut, state)
    is_complete = state.next_row >= num_rows
    return _Cut(
        first=state.first,
        # An incomplete cut leaves the buffers empty, but well formed.
        counts=jnp.where(is_complete, state.counts, 0),
        num_minibatches=jnp.where(is_complete, state.count, 1),
        is_complete=is_complete,
    )


def _first_index(
    is_reached: Callable[[Int[Array, " n"]], Bool[Array, " n"]],
    low: Int[Array, " n"],
    high: Int[Array, " n"],
) -> Int[Array, " n"]:
    """Finds the first index from `low` on that meets a monotonic condition.

    If no index does, this finds `high`.
    """

    def halve(state: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = state
        middle = (low + high) // 2
        is_before = is_reached(middle) | (low >= high)
        return jnp.where(is_before, low, middle + 1), jnp.where(is_before, middle, high)

    return jax.lax.while_loop(lambda x: jnp.any(x[0] < x[1]), halve, (low, high))[0]


def _sources(
    start: Int[Array, "cores 64 partitions"],
    end: Int[Array, "cores 64 partitions"],
    cut: _Cut,
    room: int,
) -> tuple[Int[Array, " lines"], Int[Array, " lines"]]:
    """Finds the first id in each line of 8 positions, and where its group ends."""
    # Each line belongs to one group, in which an id's number minus its position is
    # constant. Each group's first line adds the change in this constant, so a running
    # sum over lines replaces a gather. The ends are found in the same way.
    num_minibatches, num_lines = cut.num_minibatches, room // ALIGNMENT
    values = jnp.stack([cut.first - start, end])
    last = jax.lax.dynamic_index_in_dim(values, num_minibatches - 1, axis=2)
    is_used = jnp.arange(MAX_MINIBATCHES)[:, None] < num_minibatches
    values = jnp.where(is_used, values, last[..., -1:])
    # The ends are the second half, which continues the first half's running sum.
    steps = jnp.diff(values.reshape(-1), prepend=0).reshape(values.shape)
    lines = jnp.stack([start, start + room]) // ALIGNMENT

    def add_steps(minibatch: Array, total: Array) -> Array:
        line, step = (
            jax.lax.dynamic_index_in_dim(x, minibatch, axis=2).reshape(-1)
            for x in (lines, steps)
        )
        return total.at[line].add(step, indices_are_sorted=True, mode="drop")

    # Most batches have few minibatches, so a loop over them is faster than one scatter
    # for all 64.
    total = jnp.zeros((2 * num_lines,), jnp.int32)
    total = jax.lax.fori_loop(0, num_minibatches, add_steps, total)
    difference, until = running_sum(total).reshape(2, num_lines)
    return ALIGNMENT * jnp.arange(num_lines, dtype=jnp.int32) + difference, until


def _copy_lines(
    arrays: Sequence[Shaped[Array, " ids"]],
    source: Int[Array, " lines"],
    used_until: Int[Array, " lines"],
) -> list[Shaped[Array, " positions"]]:
    """Copies unaligned lines of 8 four-byte numbers, and concatenates them.

    Each line starts at its `source`. From its `used_until` on, positions get
    `PADDING_ROW_ID`, or NaN in float32 arrays.
    """
    # TPUs gather single numbers slowly. One gather for all arrays fetches the two
    # aligned lines that contain each line. Shifts then move the line to the front.
    padding = ALIGNMENT - arrays[0].size % ALIGNMENT + ALIGNMENT
    lines = jnp.concatenate(
        [
            jnp.pad(
                jax.lax.bitcast_convert_type(values, jnp.int32), (0, padding)
            ).reshape(-1, ALIGNMENT)
            for values in arrays
        ],
        axis=1,
    )
    # Keeps XLA from fusing the padding into the gather. On tpu7x, libtpu aborts when it
    # compiles this fusion.
    table = computed_apart(jnp.concatenate([lines[:-1], lines[1:]], axis=1))
    found = computed_apart(table.at[source // ALIGNMENT].get(mode="clip").T)
    windows = found.reshape(2, len(arrays), ALIGNMENT, -1)
    shift, results = source % ALIGNMENT, []
    positions = jnp.arange(source.size * ALIGNMENT).reshape(-1, ALIGNMENT).T
    for i, values in enumerate(arrays):
        window = windows[:, i].reshape(2 * ALIGNMENT, -1)
        for bit in (4, 2, 1):
            window = jnp.where(shift & bit, window[bit:], window[:-bit])
        line = jax.lax.bitcast_convert_type(window[:ALIGNMENT], values.dtype)
        unused = jnp.nan if values.dtype == jnp.float32 else PADDING_ROW_ID
        is_used = positions < used_until[None, :]
        line = jnp.where(is_used, line, jnp.asarray(unused, line.dtype))
        results.append(line.T.reshape(-1))
    return results


def _pointers(
    ends: Int[Array, "cores 64 partitions"],
    aligned_ends: Int[Array, "cores 64 partitions"],
    num_minibatches: Int[Array, ""],
) -> Int[Array, " pointers"]:
    cores, _, num_partitions = ends.shape
    spare = max(0, MIN_POINTERS - num_partitions)
    spare = jnp.repeat(aligned_ends[:, :, -1:], spare, axis=2)
    by_core = jnp.concatenate([ends, spare], axis=2)
    size = by_core.shape[2]
    pointers = jnp.full((by_core.size,), aligned_ends[-1, -1, -1])
    for core in range(cores):
        # Pointers after this core's last minibatch are unused. The next core overwrites
        # them.
        at = core * num_minibatches * size
        pointers = jax.lax.dynamic_update_slice(
            pointers, by_core[core].reshape(-1), (at,)
        )
    return pointers


def _count_before(is_counted: Bool[Array, " n"]) -> Int[Array, " n_and_1"]:
    """Counts True values before each position, and in total."""
    is_counted = jnp.pad(is_counted, (0, 1))
    return running_sum(is_counted) - is_counted


def _differs(values: Int[Array, " ids"]) -> Bool[Array, " ids"]:
    """Marks values that differ from their predecessor, and the first value."""
    return jnp.concatenate([jnp.ones(1, bool), values[1:] != values[:-1]])
