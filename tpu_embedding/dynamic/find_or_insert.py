"""Finds 64-bit ids in a shard's directory, and inserts new ones.

All arithmetic is on integers and on sets of ids, so results don't depend on the order
of ids, on repeats or on devices. docs/guides/dynamic_tables.md explains the policies.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from tpu_embedding.dynamic.directory import LINE_LANES, DynamicTablePlan, IdDirectory
from tpu_embedding.dynamic.ids_64 import NO_ID
from tpu_embedding.dynamic.vocabulary import (
    SLOTS_PER_BUCKET,
    AdmitAfter,
    Dynamic,
    LeastFrequentlyUsed,
    TimeToLive,
)
from tpu_embedding.lookup._rounds import rank_unique, unsort
from tpu_embedding.types import PADDING_ROW_ID
from tpu_embedding.xla import read_before_write, running_sum, value_of_range

_BUCKETS_PER_TURN: Final = 128
"""Number of buckets that `_fill_buckets` fills per iteration."""

_IDS_PER_BLOCK: Final = 8192
"""Number of ids whose lines are read at once. The lines take 4 MiB."""

_NO_LANE: Final = -1
_EMPTY, _EVICTABLE, _TAKEN = range(3)

_COUNT_BITS: Final = 8
_MAX_COUNT: Final = 2**_COUNT_BITS - 1
_TOTAL_LANE: Final = LINE_LANES - 1
"""In a sketch line, the lane that counts all unknown ids in the bucket. Each lane
before it is a counter that several ids share."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixedIds:
    """Mixed ids on one shard, in any order.

    Attributes:
      buckets: bucket numbers. On the owner, they are positions in its own directory. On
        the source device, they are positions in all shards' directories, concatenated.
        `PADDING_ROW_ID` marks padding.
    """

    buckets: Int[Array, " ids"]
    first: UInt32[Array, " ids"]
    second: UInt32[Array, " ids"]
    may_insert: Bool[Array, " ids"]

    @property
    def is_id(self) -> Bool[Array, " ids"]:
        """False for padding."""
        return self.buckets != PADDING_ROW_ID


class Pass(NamedTuple):
    """The work that an `insert` call does. Both bools may be traced.

    Attributes:
      notes: whether to count unknown ids for admission.
      fills: whether to assign lanes to new ids. If so, all ids in a bucket must be
        noted in an earlier pass or in this one.
    """

    notes: Any
    fills: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class NewRows:
    """Rows for new ids on one shard, in bucket order.

    Attributes:
      rows: `count` local rows, followed by `PADDING_ROW_ID`.
      tables: each row's table, as a position in the stack.
    """

    rows: Int[Array, " ids"]
    first: UInt32[Array, " ids"]
    second: UInt32[Array, " ids"]
    tables: Int[Array, " ids"]
    count: Int[Array, ""]


class Counts(NamedTuple):
    """Counts of unique ids in a call, int32 `[tables]`; see `DynamicStats`."""

    inserts: Any
    evictions: Any
    not_admitted: Any
    no_place: Any


def no_counts(num_tables: int) -> Counts:
    return Counts(*[jnp.zeros((num_tables,), jnp.int32)] * len(Counts._fields))


@jax.named_scope("find_ids")
def find_lanes(directory: IdDirectory, ids: MixedIds) -> Int[Array, " ids"]:
    """Finds each id's lane in its bucket. Unknown ids and padding get -1."""
    words = (ids.buckets, ids.first, ids.second)
    find = functools.partial(find_lane, directory.keys)
    # In blocks, because reading all lines at once takes 512 bytes per id. XLA:CPU
    # requested this memory from the system in each step, which tripled the step time.
    lanes = jax.lax.map(lambda x: find(*x), words, batch_size=_IDS_PER_BLOCK)
    return jnp.where(ids.is_id, lanes, _NO_LANE)


def find_lane(
    keys: UInt32[Array, "buckets _"],
    bucket: Int[Array, ""],
    first: UInt32[Array, ""],
    second: UInt32[Array, ""],
) -> Int[Array, ""]:
    """Finds one id's lane in its bucket, or -1. Undefined for padding."""
    # Padding reads an arbitrary bucket. `find_lanes` overwrites the result with -1.
    line = keys.at[bucket].get(mode="clip", wrap_negative_indices=False)
    is_found = (line[:SLOTS_PER_BUCKET] == first) & (line[SLOTS_PER_BUCKET:] == second)
    # At most one lane matches, so the sum is its number. XLA:CPU vectorizes a sum, but
    # not an argmax.
    lanes = jnp.arange(1, SLOTS_PER_BUCKET + 1, dtype=jnp.int32)
    return jnp.sum(jnp.where(is_found, lanes, 0), dtype=jnp.int32) - 1


@jax.named_scope("insert_ids")
def insert(
    directory: IdDirectory,
    ids: MixedIds,
    tables: Sequence[DynamicTablePlan],
    now: UInt32[Array, ""],
    current_pass: Pass,
) -> tuple[IdDirectory, Int[Array, " ids"], Bool[Array, " ids"], NewRows, Counts]:
    """Finds ids and assigns lanes to new ones, in place if the directory is donated.

    Returns:
      Five values: the new directory, each id's lane or -1, whether each id had a lane
      before, the new rows, and counts.
    """
    (num_ids,) = ids.buckets.shape
    lanes = find_lanes(directory, ids)
    is_known = lanes != _NO_LANE
    # Uses by `find_only` features are also noted, because a row used in this step must
    # not be evicted. Noting the same uses again in a second pass changes nothing.
    directory = _note_use(directory, ids, lanes, is_known, tables[0].dynamic, now)
    unknown, order, ranks = _sort_unique(ids, ids.is_id & ~is_known)
    is_admitted = unknown.is_id & unknown.may_insert
    if (rule := tables[0].dynamic.admit) is not None:
        sketch, is_admitted = _count_and_admit(
            directory.sketch, unknown, is_admitted, rule, now, current_pass
        )
        directory = dataclasses.replace(directory, sketch=sketch)
    is_admitted &= current_pass.fills
    directory, new_lanes, num_evicted = _fill_buckets(
        directory, unknown, is_admitted, tables, now
    )
    is_new = new_lanes != _NO_LANE
    table_of = table_of_buckets(unknown.buckets, tables)
    add_up = functools.partial(_sum_by_table, table_of=table_of, tables=tables)
    counts = Counts(
        inserts=add_up(is_new),
        evictions=num_evicted,
        not_admitted=add_up(unknown.is_id & ~is_admitted & current_pass.fills),
        no_place=add_up(is_admitted & ~is_new),
    )
    used = directory.used_rows + counts.inserts - counts.evictions
    directory = dataclasses.replace(directory, used_rows=used)
    # Repeats of an id have -1 here, so the maximum is the lane of the first occurrence.
    lane_by_rank = jnp.full(new_lanes.shape, _NO_LANE, jnp.int32)
    lane_by_rank = lane_by_rank.at[ranks].max(new_lanes)
    lanes = jnp.maximum(lanes, unsort(lane_by_rank[ranks], order))
    rows = local_rows(unknown.buckets, new_lanes, tables, first_row=True)
    # New rows move to the front, because `init_new_rows` stops after the last new row.
    rank = running_sum(is_new)
    positions = jnp.where(is_new, rank - 1, is_new.shape[0])
    new_rows = NewRows(
        rows=_scatter(rows, positions, fill=PADDING_ROW_ID),
        first=_scatter(unknown.first, positions),
        second=_scatter(unknown.second, positions),
        tables=_scatter(table_of, positions),
        count=rank[-1],
    )
    return directory, lanes, is_known, new_rows, counts


def _sort_unique(
    ids: MixedIds, is_sorted: Bool[Array, " ids"]
) -> tuple[MixedIds, Array, Array]:
    """Ranks the ids that `is_sorted` marks, and sorts them by bucket and id.

    Repeats and unmarked ids become padding.
    """
    buckets = jnp.where(is_sorted, ids.buckets, PADDING_ROW_ID)
    (buckets, first, second), order, ranks = rank_unique(buckets, ids.first, ids.second)
    is_first = jnp.diff(ranks, prepend=-1) != 0
    # A `find_only` feature must not prevent other features from inserting the same id.
    flags = ids.may_insert[order].astype(jnp.int32)
    may_insert = jnp.zeros(flags.shape, jnp.int32).at[ranks].max(flags)[ranks] > 0
    unique = MixedIds(
        buckets=jnp.where(is_first, buckets, PADDING_ROW_ID),
        first=first,
        second=second,
        may_insert=may_insert,
    )
    return unique, order, ranks


def local_rows(
    buckets: Int[Array, " ids"],
    lanes: Int[Array, " ids"],
    tables: Sequence[DynamicTablePlan],
    *,
    first_row: bool,
) -> Int[Array, " ids"]:
    """Maps (bucket, lane) pairs to rows. The result is undefined for lane -1.

    With `first_row`, row 0 is the shard's first row, otherwise the table's first row.
    """
    offsets = [
        (table.first_row if first_row else 0) - SLOTS_PER_BUCKET * table.first_bucket
        for table in tables
    ]
    starts = [table.first_bucket for table in tables]
    on_shard = SLOTS_PER_BUCKET * buckets + lanes
    return on_shard + value_of_range(buckets, starts, offsets)


def table_of_buckets(
    buckets: Int[Array, " ids"], tables: Sequence[DynamicTablePlan]
) -> Int[Array, " ids"]:
    starts = [table.first_bucket for table in tables]
    return value_of_range(buckets, starts, range(len(tables)))


def _note_use(
    directory: IdDirectory,
    ids: MixedIds,
    lanes: Int[Array, " ids"],
    is_used: Bool[Array, " ids"],
    dynamic: Dynamic,
    now: UInt32[Array, ""],
) -> IdDirectory:
    scores = directory.scores
    last_use = read_elements(scores, ids.buckets, lanes)
    steps = read_elements(scores, ids.buckets, lanes + SLOTS_PER_BUCKET)
    steps = _decayed(steps, _age(last_use, now), dynamic)
    # The count saturates: if it wrapped to 0, a frequent id would be evicted first.
    is_counted = (last_use != now) & (steps != np.uint32(2**32 - 1))
    steps = steps + is_counted.astype(jnp.uint32)
    now = jnp.broadcast_to(now, steps.shape)
    # Both halves are read before either is written, so that XLA updates `scores` in
    # place.
    scores, now, steps = read_before_write((scores, now, steps))
    scores = set_elements(scores, ids.buckets, lanes, now, is_used)
    scores = set_elements(scores, ids.buckets, lanes + SLOTS_PER_BUCKET, steps, is_used)
    return dataclasses.replace(directory, scores=scores)


def _age(last_use: Array, now: Array) -> Array:
    # Clocks are unsigned. If a clock is set back, a plain difference would make ids
    # look old.
    return jnp.where(now > last_use, now - last_use, jnp.uint32(0))


def _decayed(steps: Array, age: Array, dynamic: Dynamic) -> Array:
    match dynamic.evict:
        case LeastFrequentlyUsed(int() as half_life):
            return steps >> jnp.minimum(age // np.uint32(half_life), 31)
    return steps


class _Groups(NamedTuple):
    """Admitted ids, grouped by bucket. All arrays are int32.

    Attributes:
      buckets: `[ids]`, bucket of each group, packed at the front.
      starts: `[ids + 1]`, number of admitted ids before each group.
      count: number of groups.
      sources: `[ids]`, position of each admitted id among all ids.
    """

    buckets: Array
    starts: Array
    count: Array
    sources: Array


def _group(ids: MixedIds, is_admitted: Bool[Array, " ids"]) -> _Groups:
    (num_ids,) = is_admitted.shape
    numbers = jnp.arange(num_ids, dtype=jnp.int32)
    rank = running_sum(is_admitted) - 1
    sources = _scatter(numbers, jnp.where(is_admitted, rank, num_ids))
    buckets = ids.buckets.at[sources].get(mode="clip", wrap_negative_indices=False)
    num_admitted = rank[-1] + 1
    is_head = (numbers < num_admitted) & (jnp.diff(buckets, prepend=-1) != 0)
    group = running_sum(is_head) - 1
    at = jnp.where(is_head, group, num_ids)
    starts = jnp.full((num_ids + 1,), num_admitted, jnp.int32)
    starts = starts.at[at].min(numbers, mode="drop", wrap_negative_indices=False)
    # The scatter also wrote to position `num_ids`, for ids that don't start a group.
    # Restore its value.
    starts = starts.at[num_ids].set(num_admitted)
    return _Groups(
        buckets=_scatter(buckets, at),
        starts=starts,
        count=group[-1] + 1,
        sources=sources,
    )


def _scatter(values: Array, positions: Array, fill: int = 0) -> Array:
    result = jnp.full(values.shape, fill, values.dtype)
    return result.at[positions].set(values, mode="drop", wrap_negative_indices=False)


def _fill_buckets(
    directory: IdDirectory,
    ids: MixedIds,
    is_admitted: Bool[Array, " ids"],
    tables: Sequence[DynamicTablePlan],
    now: UInt32[Array, ""],
) -> tuple[IdDirectory, Int[Array, " ids"], Int[Array, " tables"]]:
    """Gives admitted ids the least valuable lanes, and counts evictions.

    Ids that don't fit get lane -1.
    """
    (num_ids,) = is_admitted.shape
    groups = _group(ids, is_admitted)
    per_turn = min(_BUCKETS_PER_TURN, num_ids)

    # Loops over buckets with new ids, which are few in a steady state. One pass over
    # the directory would read every line.
    def fill(state):
        turn, keys, scores, lanes, evictions = state
        bucket, start, count = _groups_of_turn(groups, turn, per_turn)
        old_keys, old_scores = keys[bucket], scores[bucket]
        # From here on, arrays are `[buckets, 64]`, and column j is lane `order[:, j]`:
        # empty lanes first, then evictable ones, then taken ones. New ids are put into
        # the first columns.
        kinds, order = _lanes_by_value(old_keys, old_scores, tables[0].dynamic, now)
        gets_id, source = _ids_of_lanes(kinds, start, count, groups)
        # In `keys`, the halves of a line are the ids' first and second words. In
        # `scores`, they are the ids' last uses and step counts.
        words = (ids.first[source], ids.second[source])
        uses = (jnp.broadcast_to(now, gets_id.shape), jnp.ones_like(words[0]))
        new_keys = _with_new(old_keys, words, gets_id, order)
        new_scores = _with_new(old_scores, uses, gets_id, order)
        is_evicted = gets_id & (kinds == _EVICTABLE)
        num_evicted = jnp.sum(is_evicted, axis=1, dtype=jnp.int32)
        table_of = table_of_buckets(bucket, tables)
        target = jnp.where(count > 0, bucket, keys.shape[0])
        id_position = jnp.where(gets_id, source, num_ids)
        return (
            turn + 1,
            keys.at[target].set(new_keys, mode="drop"),
            scores.at[target].set(new_scores, mode="drop"),
            lanes.at[id_position].set(order, mode="drop", wrap_negative_indices=False),
            evictions + _sum_by_table(num_evicted, table_of, tables),
        )

    num_turns = (groups.count + per_turn - 1) // per_turn
    no_lanes = jnp.full((num_ids,), _NO_LANE, jnp.int32)
    no_evictions = jnp.zeros((len(tables),), jnp.int32)
    _, keys, scores, lanes, evictions = jax.lax.while_loop(
        lambda state: state[0] < num_turns,
        fill,
        (jnp.int32(0), directory.keys, directory.scores, no_lanes, no_evictions),
    )
    directory = dataclasses.replace(directory, keys=keys, scores=scores)
    return directory, lanes, evictions


def _groups_of_turn(
    groups: _Groups, turn: Int[Array, ""], size: int
) -> tuple[Int[Array, " size"], Int[Array, " size"], Int[Array, " size"]]:
    group = turn * size + jnp.arange(size, dtype=jnp.int32)
    in_bounds = jnp.minimum(group, groups.buckets.shape[0] - 1)
    start = groups.starts[in_bounds]
    # Past the last group, the bucket is arbitrary, and a count of 0 prevents writes to
    # it.
    count = jnp.where(group < groups.count, groups.starts[in_bounds + 1] - start, 0)
    return groups.buckets[in_bounds], start, count


def _ids_of_lanes(
    kinds: Array, start: Int[Array, " n"], count: Int[Array, " n"], groups: _Groups
) -> tuple[Bool[Array, "n lanes"], Int[Array, "n lanes"]]:
    """Marks lanes for new ids, in `_lanes_by_value` order, and finds their ids."""
    number = jnp.arange(SLOTS_PER_BUCKET, dtype=jnp.int32)[None, :]
    num_free = jnp.sum(kinds != _TAKEN, axis=1, dtype=jnp.int32)
    is_new = number < jnp.minimum(count, num_free)[:, None]
    admitted = jnp.minimum(start[:, None] + number, groups.sources.shape[0] - 1)
    return is_new, groups.sources[admitted]


def _lanes_by_value(
    keys: Array, scores: Array, dynamic: Dynamic, now: Array
) -> tuple[Array, Array]:
    """Sorts each bucket's lanes: empty ones first, then evictable, then taken ones.

    Within each kind, the least valuable lanes come first.
    """
    is_empty = (keys[:, :SLOTS_PER_BUCKET] == NO_ID) & (
        keys[:, SLOTS_PER_BUCKET:] == NO_ID
    )
    last_use, steps = scores[:, :SLOTS_PER_BUCKET], scores[:, SLOTS_PER_BUCKET:]
    # An id used in this step can't be evicted, or two ids would read and train one row.
    is_evictable = last_use != now
    age = _age(last_use, now)
    values = [last_use]
    match dynamic.evict:
        case None:
            is_evictable = jnp.zeros_like(is_evictable)
        case TimeToLive(ttl):
            is_evictable &= age > np.uint32(ttl)
        case LeastFrequentlyUsed():
            values = [_decayed(steps, age, dynamic), last_use]
    kinds = jnp.where(is_evictable, jnp.int32(_EVICTABLE), jnp.int32(_TAKEN))
    kinds = jnp.where(is_empty, jnp.int32(_EMPTY), kinds)
    # Empty lanes are filled in lane order, whatever their scores.
    values = [jnp.where(is_empty, jnp.uint32(0), value) for value in values]
    lanes = jax.lax.broadcasted_iota(jnp.int32, kinds.shape, 1)
    # The lane is the last key, so ties break the same way on every device and backend.
    operands = (kinds, *values, lanes)
    kinds, *_, order = jax.lax.sort(operands, dimension=1, num_keys=len(operands))
    return kinds, order


def _with_new(
    old: Array, new: tuple[Array, Array], is_new: Array, order: Array
) -> Array:
    row, halves = jnp.arange(old.shape[0], dtype=jnp.int32)[:, None], []
    for half, values in zip(jnp.split(old, 2, axis=1), new, strict=True):
        in_order = jnp.take_along_axis(half, order, axis=1)
        in_order = jnp.where(is_new, values, in_order)
        # Each row of `order` is a permutation, so every zero is overwritten.
        halves.append(jnp.zeros_like(half).at[row, order].set(in_order))
    return jnp.concatenate(halves, axis=1)


def _sum_by_table(
    values: Array, table_of: Int[Array, " n"], tables: Sequence[DynamicTablePlan]
) -> Int[Array, " tables"]:
    # Tables are few, and a TPU scatters single numbers slowly, so compare and sum.
    numbers = jnp.arange(len(tables), dtype=jnp.int32)[None, :]
    values = values.astype(jnp.int32)[:, None]
    by_table = jnp.where(table_of[:, None] == numbers, values, 0)
    return jnp.sum(by_table, axis=0, dtype=jnp.int32)


def _count_and_admit(
    sketch: UInt32[Array, "buckets _"],
    ids: MixedIds,
    is_unknown: Bool[Array, " ids"],
    rule: AdmitAfter,
    now: UInt32[Array, ""],
    current_pass: Pass,
) -> tuple[UInt32[Array, "buckets _"], Bool[Array, " ids"]]:
    """Counts each unknown id in two counters, and admits ids by the lower count."""
    total = read_elements(sketch, ids.buckets, jnp.int32(_TOTAL_LANE))
    # In each bucket, an epoch ends after `ids_per_halving` unknown ids.
    epoch = total // np.uint32(rule.ids_per_halving)
    if rule.window is not None:
        # A new window skips so many epochs that every count becomes 0.
        epoch += now // np.uint32(rule.window) * np.uint32(_COUNT_BITS)
    epoch = epoch << _COUNT_BITS
    num_lanes = np.uint32(_TOTAL_LANE)
    # The first word chose the bucket, so the second word spreads ids over counters.
    first = (ids.second % num_lanes).astype(jnp.int32)
    second = (ids.second // num_lanes % num_lanes).astype(jnp.int32)
    is_counted = is_unknown & current_pass.notes
    # If both counters of an id are in the same lane, the id adds to it only once.
    counters = ((first, is_counted), (second, is_counted & (first != second)))
    for lanes, is_used in counters:
        old = read_elements(sketch, ids.buckets, lanes)
        count = old & _MAX_COUNT
        # A counter also stores the epoch in which it last changed. Its count is halved
        # once for each epoch since then, so a new epoch need not write to every line.
        halvings = (epoch - (old - count)) >> _COUNT_BITS
        count = count >> jnp.minimum(halvings, _COUNT_BITS)
        sketch = set_elements(sketch, ids.buckets, lanes, epoch | count, is_used)
    for lanes, is_used in counters:
        sketch = add_to_elements(sketch, ids.buckets, lanes, is_used)
    # Read both counters before clipping either, because two ids may share a counter.
    values = [
        read_elements(sketch, ids.buckets, lanes) - epoch for lanes, _ in counters
    ]
    for (lanes, is_used), value in zip(counters, values, strict=True):
        value = epoch | jnp.minimum(value, _MAX_COUNT)
        sketch = set_elements(sketch, ids.buckets, lanes, value, is_used)
    counts = [
        read_elements(sketch, ids.buckets, lanes) & _MAX_COUNT for lanes, _ in counters
    ]
    is_admitted = is_unknown & (jnp.minimum(*counts) >= rule.count)
    # The total is updated last, in the pass that fills, so that all ids in a call count
    # in the same epoch.
    is_filled = is_unknown & current_pass.fills
    sketch = add_to_elements(sketch, ids.buckets, jnp.int32(_TOTAL_LANE), is_filled)
    return sketch, is_admitted


def read_elements(lines: Array, buckets: Array, lanes: Array) -> Array:
    """Reads single elements. The result is undefined for lane -1."""
    index = _element(buckets, jnp.maximum(lanes, 0))
    return lines.reshape(-1).at[index].get(mode="clip")


def set_elements(
    lines: Array, buckets: Array, lanes: Array, values: Array, is_set: Array
) -> Array:
    """Sets single elements. Duplicate positions must have equal values."""
    elements = lines.reshape(-1)
    index = jnp.where(is_set, _element(buckets, lanes), elements.shape[0])
    return elements.at[index].set(values, mode="drop").reshape(lines.shape)


def _element(buckets: Array, lanes: Array) -> Array:
    # A flat index, because XLA:CPU is slow with two indices. It may exceed int32,
    # because the largest directory has almost 2**32 elements.
    return buckets.astype(jnp.uint32) * LINE_LANES + lanes.astype(jnp.uint32)


def add_to_elements(
    lines: Array, buckets: Array, lanes: Array, is_added: Array
) -> Array:
    """Adds 1 to single elements, once for each time that a position occurs."""
    elements = lines.reshape(-1)
    index = jnp.where(is_added, _element(buckets, lanes), elements.shape[0])
    return elements.at[index].add(jnp.uint32(1), mode="drop").reshape(lines.shape)
