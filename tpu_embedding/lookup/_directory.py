"""Finds the rows of 64-bit ids in a directory, and inserts new ids. Per shard.

It runs at the owner of the buckets, on ids in the order of bucket and id, each once.
Everything is integer arithmetic on the whole set of ids, so neither the order of a
batch nor the number of devices changes a result. The rules stand in
docs/guides/dynamic_tables.md.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from tpu_embedding.dynamic import (
    SLOTS_PER_BUCKET,
    AdmitAfter,
    AdmitWithProbability,
    Dynamic,
    LeastFrequentlyUsed,
    TimeToLive,
)
from tpu_embedding.lookup._running_sums import running_sum
from tpu_embedding.plan.dynamic_rows import DynamicTablePlan
from tpu_embedding.rows.id_directory import IdDirectory
from tpu_embedding.rows.id_mixing import NO_ID
from tpu_embedding.rows.narrow_rows import mix_bits
from tpu_embedding.types import PADDING_ROW_ID

_BUCKETS_PER_TURN: Final = 128
"""Buckets that one turn of the loop over new ids fills."""

_NO_LANE: Final = -1
_EMPTY, _EVICTABLE, _TAKEN = range(3)
_COUNT_BITS: Final = 8
_MAX_COUNT: Final = 2**_COUNT_BITS - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnedIds:
    """Ids at the owner of their buckets, by bucket and id. Per shard.

    Attributes:
      buckets: int32 `[ids]`, rising; buckets of this shard's directory.
      first: uint32 `[ids]`, first mixed word.
      second: uint32 `[ids]`, second mixed word.
      is_id: bool `[ids]`, False for padding and for repeats.
      may_insert: bool `[ids]`, True if some feature that asks for it inserts ids.
    """

    buckets: Int[Array, " ids"]
    first: UInt32[Array, " ids"]
    second: UInt32[Array, " ids"]
    is_id: Bool[Array, " ids"]
    may_insert: Bool[Array, " ids"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class NewRows:
    """Rows that new ids have got. Per shard.

    Attributes:
      rows: int32 `[ids]`, rows of this shard, rising; `PADDING_ROW_ID` behind the last.
      first: uint32 `[ids]`, first mixed word of the id.
      second: uint32 `[ids]`, second mixed word.
      tables: int32 `[ids]`, position of the table in the stack.
      count: int32 scalar, number of rows.
    """

    rows: Int[Array, " ids"]
    first: UInt32[Array, " ids"]
    second: UInt32[Array, " ids"]
    tables: Int[Array, " ids"]
    count: Int[Array, ""]


class Counts(NamedTuple):
    """Distinct ids of one call by table, int32 `[tables]`; see `DynamicStats`."""

    hits: Any
    inserts: Any
    evictions: Any
    not_admitted: Any
    no_place: Any


def no_counts(num_tables: int) -> Counts:
    """Returns zeros."""
    return Counts(*[jnp.zeros((num_tables,), jnp.int32)] * len(Counts._fields))


@jax.named_scope("find_ids")
def find_lanes(directory: IdDirectory, ids: OwnedIds) -> Int[Array, " ids"]:
    """Returns the place of each id in its bucket, or -1."""
    lines = directory.keys.at[ids.buckets].get(mode="clip", wrap_negative_indices=False)
    is_found = (lines[:, :SLOTS_PER_BUCKET] == ids.first[:, None]) & (
        lines[:, SLOTS_PER_BUCKET:] == ids.second[:, None]
    )
    # A sum of at most one lane: XLA:CPU computes it in vectors, unlike argmax.
    lanes = jnp.arange(1, SLOTS_PER_BUCKET + 1, dtype=jnp.int32)
    lane = jnp.sum(jnp.where(is_found, lanes, 0), axis=1, dtype=jnp.int32) - 1
    return jnp.where(ids.is_id, lane, _NO_LANE)


@jax.named_scope("insert_ids")
def insert(
    directory: IdDirectory,
    ids: OwnedIds,
    tables: Sequence[DynamicTablePlan],
    now: UInt32[Array, ""],
) -> tuple[IdDirectory, Int[Array, " ids"], NewRows, Counts]:
    """Finds ids, and gives places to new ones. Per shard.

    Args:
      directory: the directory; in place where donated.
      ids: each once.
      tables: tables of the stack.
      now: clock of this step.

    Returns:
      The directory; the place of each id in its bucket, or -1; the rows of new ids;
      counts.
    """
    lanes = find_lanes(directory, ids)
    is_found = lanes != _NO_LANE
    is_unknown = ids.is_id & ~is_found & ids.may_insert
    directory = _note_use(directory, ids, lanes, is_found & ids.may_insert, now)
    dynamic = tables[0].dynamic
    directory, is_admitted = _admit(directory, ids, is_unknown, dynamic, now)
    table_of = table_of_buckets(ids.buckets, tables)
    directory, new_lanes, num_evicted = _fill_buckets(
        directory, ids, is_admitted, tables, now
    )
    is_new = new_lanes != _NO_LANE
    count = functools.partial(count_by_table, table_of=table_of, num_tables=len(tables))
    counts = Counts(
        hits=count(is_found),
        inserts=count(is_new),
        evictions=num_evicted,
        not_admitted=count(ids.is_id & ~is_found & ~is_admitted),
        no_place=count(is_admitted & ~is_new),
    )
    directory = dataclasses.replace(
        directory, used_rows=directory.used_rows + counts.inserts - counts.evictions
    )
    lanes = jnp.where(is_new, new_lanes, lanes)
    rows = local_rows(ids.buckets, lanes, tables, first_row=True)
    return directory, lanes, _compact(ids, rows, table_of, is_new), counts


def local_rows(
    buckets: Int[Array, " ids"],
    lanes: Int[Array, " ids"],
    tables: Sequence[DynamicTablePlan],
    *,
    first_row: bool,
) -> Int[Array, " ids"]:
    """Returns the rows of places in buckets; undefined where there is no place.

    Args:
      buckets: buckets of this shard.
      lanes: places.
      tables: tables of the stack.
      first_row: True: rows of the shard; False: rows of the table on the shard.
    """
    table_of = table_of_buckets(buckets, tables)
    offsets = [
        (t.first_row if first_row else 0) - SLOTS_PER_BUCKET * t.first_bucket
        for t in tables
    ]
    return SLOTS_PER_BUCKET * buckets + lanes + value_by_table(offsets, table_of)


def value_by_table(
    values: Sequence[int], table_of: Int[Array, " ids"]
) -> Int[Array, " ids"]:
    """Returns the value of each id's table; no gather of single numbers."""
    steps = np.diff(np.asarray(values, np.int32), prepend=np.int32(0))
    result = jnp.full(table_of.shape, steps[0], jnp.int32)
    for i, step in enumerate(steps[1:], start=1):
        result = result + jnp.where(table_of >= i, step, 0)
    return result


def table_of_buckets(
    buckets: Int[Array, " ids"], tables: Sequence[DynamicTablePlan]
) -> Int[Array, " ids"]:
    """Returns the position of each bucket's table in the stack."""
    result = jnp.zeros(buckets.shape, jnp.int32)
    for table in tables[1:]:
        result = result + (buckets >= table.first_bucket)
    return result


def count_by_table(
    mask: Bool[Array, " ids"], table_of: Int[Array, " ids"], num_tables: int
) -> Int[Array, " tables"]:
    if num_tables == 1:
        return jnp.sum(mask, dtype=jnp.int32)[None]
    numbers = jnp.arange(num_tables, dtype=jnp.int32)
    is_of_table = mask[:, None] & (table_of[:, None] == numbers)
    return jnp.sum(is_of_table, axis=0, dtype=jnp.int32)


def _note_use(
    directory: IdDirectory,
    ids: OwnedIds,
    lanes: Int[Array, " ids"],
    is_used: Bool[Array, " ids"],
    now: UInt32[Array, ""],
) -> IdDirectory:
    """Sets the last use of ids, and counts the step once."""
    scores = directory.scores
    last_use = _at(scores, ids.buckets, lanes)
    steps = _at(scores, ids.buckets, lanes + SLOTS_PER_BUCKET)
    is_counted = (last_use != now) & (steps != np.uint32(2**32 - 1))
    steps = steps + is_counted.astype(jnp.uint32)
    now = jnp.broadcast_to(now, steps.shape)
    scores = _set(scores, ids.buckets, lanes, now, is_used)
    scores = _set(scores, ids.buckets, lanes + SLOTS_PER_BUCKET, steps, is_used)
    return dataclasses.replace(directory, scores=scores)


def _at(lines: Array, buckets: Array, lanes: Array) -> Array:
    """Reads single elements; those of ids without a place are undefined."""
    return lines.at[buckets, jnp.maximum(lanes, 0)].get(
        mode="clip", wrap_negative_indices=False
    )


def _set(
    lines: Array, buckets: Array, lanes: Array, values: Array, is_set: Array
) -> Array:
    buckets = jnp.where(is_set, buckets, lines.shape[0])
    return lines.at[buckets, lanes].set(
        values, mode="drop", wrap_negative_indices=False
    )


def _admit(
    directory: IdDirectory,
    ids: OwnedIds,
    is_unknown: Bool[Array, " ids"],
    dynamic: Dynamic,
    now: UInt32[Array, ""],
) -> tuple[IdDirectory, Bool[Array, " ids"]]:
    """Decides which unknown ids may have a row."""
    match dynamic.admit:
        case None:
            return directory, is_unknown
        case AdmitWithProbability(probability):
            draws = mix_bits(ids.first ^ mix_bits(ids.second ^ mix_bits(now)))
            limit = min(int(probability * 2**32), 2**32 - 1)
            is_admitted = draws < np.uint32(limit)
            return directory, is_unknown & (is_admitted | (probability == 1))
        case AdmitAfter(count, window):
            return _count_in_sketch(directory, ids, is_unknown, count, window, now)


def _count_in_sketch(
    directory: IdDirectory,
    ids: OwnedIds,
    is_unknown: Bool[Array, " ids"],
    count: int,
    window: int | None,
    now: UInt32[Array, ""],
) -> tuple[IdDirectory, Bool[Array, " ids"]]:
    """Counts unknown ids in two counters each, and compares the smaller."""
    sketch = directory.sketch
    assert sketch is not None
    epoch = jnp.uint32(0) if window is None else now // np.uint32(window)
    epoch = (epoch << _COUNT_BITS).astype(jnp.uint32)
    first_lanes = (ids.second & 127).astype(jnp.int32)
    second_lanes = ((ids.second >> 7) & 127).astype(jnp.int32)
    is_second = is_unknown & (first_lanes != second_lanes)
    counters = ((first_lanes, is_unknown), (second_lanes, is_second))
    for lanes, is_used in counters:
        old = _at(sketch, ids.buckets, lanes)
        is_old = (old >> _COUNT_BITS) == (epoch >> _COUNT_BITS)
        started = jnp.where(is_old, old, epoch)
        sketch = _set(sketch, ids.buckets, lanes, started, is_used)
    for lanes, is_used in counters:
        buckets = jnp.where(is_used, ids.buckets, sketch.shape[0])
        sketch = sketch.at[buckets, lanes].add(
            jnp.uint32(1), mode="drop", wrap_negative_indices=False
        )
    # Both counters are read before one is cut off: two ids may share one.
    found = [_at(sketch, ids.buckets, lanes) - epoch for lanes, _ in counters]
    for (lanes, is_used), value in zip(counters, found, strict=True):
        value = epoch | jnp.minimum(value, _MAX_COUNT)
        sketch = _set(sketch, ids.buckets, lanes, value, is_used)
    is_admitted = is_unknown & (jnp.minimum(*found) >= count)
    return dataclasses.replace(directory, sketch=sketch), is_admitted


class _Groups(NamedTuple):
    """The admitted ids of each bucket that has any.

    Attributes:
      buckets: int32 `[ids]`, buckets with admitted ids, one after the other.
      starts: int32 `[ids + 1]`, number of admitted ids before those of the bucket.
      count: int32 scalar, number of buckets.
      places: int32 `[ids]`, position of each admitted id among all ids.
    """

    buckets: Array
    starts: Array
    count: Array
    places: Array


def _group(ids: OwnedIds, is_admitted: Bool[Array, " ids"]) -> _Groups:
    (num_ids,) = is_admitted.shape
    numbers = jnp.arange(num_ids, dtype=jnp.int32)
    rank = running_sum(is_admitted.astype(jnp.int32)) - 1
    # The last admitted id before each one tells whether a bucket begins.
    places = _scatter(numbers, jnp.where(is_admitted, rank, num_ids), num_ids)
    buckets = ids.buckets.at[places].get(mode="clip", wrap_negative_indices=False)
    num_admitted = rank[-1] + 1
    is_head = (numbers < num_admitted) & (jnp.diff(buckets, prepend=-1) != 0)
    group = running_sum(is_head.astype(jnp.int32)) - 1
    at = jnp.where(is_head, group, num_ids)
    starts = jnp.full((num_ids + 1,), num_admitted, jnp.int32)
    starts = starts.at[at].min(numbers, mode="drop", wrap_negative_indices=False)
    # Place `num_ids` took the ids that begin no bucket.
    starts = starts.at[num_ids].set(num_admitted)
    return _Groups(
        buckets=_scatter(buckets, at, num_ids),
        starts=starts,
        count=group[-1] + 1,
        places=places,
    )


def _scatter(values: Array, places: Array, size: int) -> Array:
    result = jnp.zeros((size,), values.dtype)
    return result.at[places].set(values, mode="drop", wrap_negative_indices=False)


def _fill_buckets(
    directory: IdDirectory,
    ids: OwnedIds,
    is_admitted: Bool[Array, " ids"],
    tables: Sequence[DynamicTablePlan],
    now: UInt32[Array, ""],
) -> tuple[IdDirectory, Int[Array, " ids"], Int[Array, " tables"]]:
    """Gives places to admitted ids, bucket by bucket.

    A loop works off the buckets that have admitted ids, some at a time. In a steady
    state these are few.

    Returns:
      The directory, the place of each new id or -1, and evictions by table.
    """
    (num_ids,) = is_admitted.shape
    groups = _group(ids, is_admitted)
    per_turn = min(_BUCKETS_PER_TURN, num_ids)
    dynamic = tables[0].dynamic
    row = jnp.arange(per_turn, dtype=jnp.int32)[:, None]
    place = jnp.arange(SLOTS_PER_BUCKET, dtype=jnp.int32)[None, :]

    def fill(state):
        turn, keys, scores, lanes, evictions = state
        group = turn * per_turn + jnp.arange(per_turn, dtype=jnp.int32)
        is_group = group < groups.count
        group = jnp.minimum(group, num_ids - 1)
        bucket, start = groups.buckets[group], groups.starts[group]
        count = jnp.where(is_group, groups.starts[group + 1] - start, 0)
        old_keys, old_scores = keys[bucket], scores[bucket]
        kinds, order = _places_by_value(old_keys, old_scores, dynamic, now)
        num_free = jnp.sum(kinds != _TAKEN, axis=1, dtype=jnp.int32)
        is_new = place < jnp.minimum(count, num_free)[:, None]
        admitted = jnp.minimum(start[:, None] + place, num_ids - 1)
        source = groups.places[admitted]
        words = (ids.first[source], ids.second[source])
        values = (jnp.broadcast_to(now, is_new.shape), jnp.ones_like(words[0]))
        # A bucket of no group is written nowhere.
        target = jnp.where(is_group, bucket, keys.shape[0])
        keys = keys.at[target].set(
            _with_new(old_keys, words, is_new, order, row), mode="drop"
        )
        scores = scores.at[target].set(
            _with_new(old_scores, values, is_new, order, row), mode="drop"
        )
        lanes = lanes.at[jnp.where(is_new, source, num_ids)].set(
            order, mode="drop", wrap_negative_indices=False
        )
        num_evicted = jnp.sum(is_new & (kinds == _EVICTABLE), axis=1, dtype=jnp.int32)
        evictions += _sum_by_table(num_evicted, bucket, tables)
        return turn + 1, keys, scores, lanes, evictions

    num_turns = (groups.count + per_turn - 1) // per_turn
    _, keys, scores, lanes, evictions = jax.lax.while_loop(
        lambda state: state[0] < num_turns,
        fill,
        (
            jnp.int32(0),
            directory.keys,
            directory.scores,
            jnp.full((num_ids,), _NO_LANE, jnp.int32),
            jnp.zeros((len(tables),), jnp.int32),
        ),
    )
    directory = dataclasses.replace(directory, keys=keys, scores=scores)
    return directory, lanes, evictions


def _places_by_value(
    keys: Array, scores: Array, dynamic: Dynamic, now: Array
) -> tuple[Array, Array]:
    """Sorts the places of buckets: empty ones, then those to evict, then the others.

    Returns:
      The kind of each place and the places, both `[buckets, 64]` in that order.
    """
    is_empty = (keys[:, :SLOTS_PER_BUCKET] == NO_ID) & (
        keys[:, SLOTS_PER_BUCKET:] == NO_ID
    )
    last_use, steps = scores[:, :SLOTS_PER_BUCKET], scores[:, SLOTS_PER_BUCKET:]
    is_evictable = last_use != now
    # A clock that was set back makes no id old.
    age = jnp.where(now > last_use, now - last_use, jnp.uint32(0))
    values = [last_use]
    match dynamic.evict:
        case None:
            is_evictable = jnp.zeros_like(is_evictable)
        case TimeToLive(ttl):
            is_evictable &= age > np.uint32(ttl)
        case LeastFrequentlyUsed(half_life):
            if half_life is not None:
                steps = steps >> jnp.minimum(age // np.uint32(half_life), 31)
            values = [steps, last_use]
    kinds = jnp.where(is_evictable, jnp.int32(_EVICTABLE), jnp.int32(_TAKEN))
    kinds = jnp.where(is_empty, jnp.int32(_EMPTY), kinds)
    values = [jnp.where(is_empty, jnp.uint32(0), value) for value in values]
    lanes = jax.lax.broadcasted_iota(jnp.int32, kinds.shape, 1)
    operands = (kinds, *values, lanes)
    kinds, *_, order = jax.lax.sort(operands, dimension=1, num_keys=len(operands))
    return kinds, order


def _with_new(
    old: Array, new: tuple[Array, Array], is_new: Array, order: Array, row: Array
) -> Array:
    """Returns lines with new pairs of words in the first places of an order."""
    halves = []
    for half, values in zip(jnp.split(old, 2, axis=1), new, strict=True):
        in_order = jnp.take_along_axis(half, order, axis=1)
        in_order = jnp.where(is_new, values, in_order)
        halves.append(jnp.zeros_like(half).at[row, order].set(in_order))
    return jnp.concatenate(halves, axis=1)


def _sum_by_table(
    values: Array, buckets: Array, tables: Sequence[DynamicTablePlan]
) -> Array:
    if len(tables) == 1:
        return jnp.sum(values)[None]
    is_of_table = table_of_buckets(buckets, tables)[:, None] == jnp.arange(len(tables))
    return jnp.sum(jnp.where(is_of_table, values[:, None], 0), axis=0)


def _compact(
    ids: OwnedIds, rows: Array, table_of: Array, is_new: Bool[Array, " ids"]
) -> NewRows:
    """Moves new rows to the front."""
    (num_ids,) = rows.shape
    rank = running_sum(is_new.astype(jnp.int32))
    places = jnp.where(is_new, rank - 1, num_ids)
    padding = jnp.full((num_ids,), PADDING_ROW_ID, jnp.int32)
    return NewRows(
        rows=padding.at[places].set(rows, mode="drop", wrap_negative_indices=False),
        first=_scatter(ids.first, places, num_ids),
        second=_scatter(ids.second, places, num_ids),
        tables=_scatter(table_of, places, num_ids),
        count=rank[-1],
    )
