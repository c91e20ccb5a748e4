"""Translates 64-bit ids to row numbers: source, owner, and back. Per shard.

Each device mixes its ids, drops repeats, and sends each id to the owner of its bucket.
The owner finds it, or inserts it, and answers with the row. (A single device answers
its own ids as they are.) Ids travel in rounds of whole buckets, because an owner must
see all ids of a bucket at once to insert any. One round is the rule; others run while
some device has ids left.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from tpu_embedding.lookup._dedup import unsort
from tpu_embedding.lookup._directory import (
    Counts,
    NewRows,
    OwnedIds,
    find_lanes,
    insert,
    local_rows,
    no_counts,
)
from tpu_embedding.lookup._running_sums import running_sum
from tpu_embedding.plan.dynamic_rows import DynamicTablePlan
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.stack_plan import StackPlan
from tpu_embedding.rows.id_directory import IdDirectory
from tpu_embedding.rows.id_mixing import NO_ID, mix_ids, multiply_high
from tpu_embedding.rows.packed_rows import round_up
from tpu_embedding.types import PADDING_ROW_ID

_HEADROOM_STDDEVS: Final = 8
"""Room of a round above the mean number of ids per owner, in standard deviations.

An unused place costs 12 bytes."""

_NO_ROW: Final = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceIds:
    """The ids of one feature on the device of its samples. Per shard.

    Attributes:
      high: uint32 `[ids]`, upper words; all bits set in both words: no id.
      low: uint32 `[ids]`, lower words.
      table: position of the table in its stack.
      inserts: True if unknown ids get rows.
    """

    high: UInt32[Array, " ids"]
    low: UInt32[Array, " ids"]
    table: int = dataclasses.field(metadata={"static": True})
    inserts: bool = dataclasses.field(metadata={"static": True})


class _Ids(NamedTuple):
    """Mixed ids of a device. All `[ids]`.

    Attributes:
      keys: int32, `owner * buckets per shard + bucket`; behind the last bucket where
        there is no id.
      first: uint32, first mixed word.
      second: uint32, second mixed word.
      may_insert: bool.
    """

    keys: Array
    first: Array
    second: Array
    may_insert: Array


Answer = Callable[[Any, OwnedIds], tuple[Any, Array, Array]]
"""Answers ids with places in their buckets, and whether they had one before.

It takes and returns a state: the directory, and rows."""


def find_rows(
    directory: IdDirectory,
    sources: Sequence[SourceIds],
    tables: Sequence[DynamicTablePlan],
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> tuple[list[Int[Array, " _"]], list[Int[Array, ""]]]:
    """Returns the row of each id within its table, and changes nothing. Per shard.

    Args:
      directory: directory of this shard.
      sources: ids of each feature.
      tables: tables of the stack.
      stack: plan of the stack.
      plan: gives the mesh.

    Returns:
      Rows per feature; `PADDING_ROW_ID`, or the default row, for ids without one. Per
      feature, the number of places whose id has a row.
    """

    def answer(directory, ids):
        lanes = find_lanes(directory, ids)
        return directory, lanes, lanes >= 0

    _, rows, hits = _translate(directory, answer, sources, tables, stack, plan)
    return rows, hits


def insert_rows(
    directory: IdDirectory,
    start_rows: Callable[[Any, NewRows], Any],
    rows_state: Any,
    sources: Sequence[SourceIds],
    tables: Sequence[DynamicTablePlan],
    now: UInt32[Array, ""],
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> tuple[IdDirectory, Any, list[Int[Array, " _"]], list[Int[Array, ""]], Counts]:
    """Returns the row of each id within its table; new ids get one. Per shard.

    Args:
      directory: directory of this shard.
      start_rows: writes the initial values of new rows to `rows_state`.
      rows_state: rows and slot variables of this shard.
      sources: ids of each feature.
      tables: tables of the stack.
      now: clock of the step.
      stack: plan of the stack.
      plan: gives the mesh.

    Returns:
      Directory; rows and slots; rows per feature; per feature, the number of places
      whose id had a row before; counts at this owner.
    """

    def answer(state, ids):
        directory, rows_state, counts = state
        directory, lanes, is_known, new, found = insert(directory, ids, tables, now)
        rows_state = start_rows(rows_state, new)
        return (directory, rows_state, _plus(counts, found)), lanes, is_known

    state = (directory, rows_state, no_counts(len(tables)))
    (directory, rows_state, counts), rows, hits = _translate(
        state, answer, sources, tables, stack, plan
    )
    return directory, rows_state, rows, hits, counts


def _translate(
    state: Any,
    answer: Answer,
    sources: Sequence[SourceIds],
    tables: Sequence[DynamicTablePlan],
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> tuple[Any, list[Array], list[Array]]:
    buckets_per_shard = sum(t.buckets_per_shard for t in tables)
    end = buckets_per_shard * tables[0].num_shards
    ids = _mix(sources, tables, buckets_per_shard)
    if plan.mesh.size == 1:
        state, lanes, is_known = answer(state, _owned(ids, end))
        rows = _rows_of_table(jnp.minimum(ids.keys, end - 1), lanes, tables, stack)
    else:
        unique, order, ranks = _unique_ids(ids, len(tables), end)
        state, replies = _in_rounds(
            state, answer, unique, tables, buckets_per_shard, stack, plan
        )
        of_ids = unsort(replies[ranks], order)
        is_known = (of_ids & 1) == 1
        rows = jnp.where(of_ids == NO_ID, _NO_ROW, (of_ids >> 1).astype(jnp.int32))
        is_known &= rows != _NO_ROW
    return state, *_by_feature(rows, is_known, sources, tables)


def _mix(
    sources: Sequence[SourceIds],
    tables: Sequence[DynamicTablePlan],
    buckets_per_shard: int,
) -> _Ids:
    """Mixes the ids of all features, one after the other."""
    end = buckets_per_shard * tables[0].num_shards
    parts = []
    for source in sources:
        table = tables[source.table]
        first, second = mix_ids(source.high, source.low)
        bucket = multiply_high(first, table.num_buckets)
        owner, local = jnp.divmod(bucket, table.buckets_per_shard)
        key = owner * buckets_per_shard + table.first_bucket + local
        is_none = (source.high == NO_ID) & (source.low == NO_ID)
        key = jnp.where(is_none, end, key)
        parts.append((key, first, second, jnp.full(first.shape, source.inserts)))
    return _Ids(*(jnp.concatenate(part) for part in zip(*parts, strict=True)))


def _unique_ids(ids: _Ids, num_tables: int, end: int) -> tuple[_Ids, Array, Array]:
    """Sorts the ids of a device by bucket and id, and drops repeats.

    Returns:
      The different ids, the position of each sorted id before sorting, and its rank
      among the different ones.
    """
    keys, firsts, seconds, flags = ids
    (num_ids,) = keys.shape
    places = jnp.arange(num_ids, dtype=jnp.int32)
    if num_tables == 1:
        # The bucket rises with the first word: two keys sort as three do.
        firsts, seconds, keys, order = jax.lax.sort(
            (firsts, seconds, keys, places), num_keys=2, is_stable=False
        )
    else:
        keys, firsts, seconds, order = jax.lax.sort(
            (keys, firsts, seconds, places), num_keys=3, is_stable=False
        )
    is_new = (
        (jnp.diff(keys, prepend=-1) != 0)
        | (firsts != jnp.roll(firsts, 1))
        | (seconds != jnp.roll(seconds, 1))
    )
    ranks = running_sum(is_new.astype(jnp.int32)) - 1

    def compact(values, fill):
        result = jnp.full((num_ids,), fill, values.dtype)
        return result.at[ranks].set(values, mode="promise_in_bounds")

    unique = _Ids(
        keys=compact(keys, end),
        first=compact(firsts, NO_ID),
        second=compact(seconds, NO_ID),
        may_insert=jnp.zeros((num_ids,), bool).at[ranks].max(flags[order]),
    )
    return unique, order, ranks


def _owned(ids: _Ids, end: int) -> OwnedIds:
    return OwnedIds(
        buckets=jnp.minimum(ids.keys, end - 1),
        first=ids.first,
        second=ids.second,
        is_id=ids.keys < end,
        may_insert=ids.may_insert,
    )


def _rows_of_table(
    buckets: Array,
    lanes: Array,
    tables: Sequence[DynamicTablePlan],
    stack: StackPlan,
) -> Array:
    """Returns rows of the table; -1 where there is none."""
    on_shard = local_rows(buckets, lanes, tables, first_row=False)
    shard = jax.lax.axis_index(stack.shard_axes)
    return jnp.where(lanes < 0, _NO_ROW, on_shard * stack.num_shards + shard)


def _in_rounds(
    state: Any,
    answer: Answer,
    unique: _Ids,
    tables: Sequence[DynamicTablePlan],
    buckets_per_shard: int,
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> tuple[Any, Array]:
    """Sends ids to the owners of their buckets, round by round.

    Each round takes a range of buckets of each owner, the same on all devices.

    Returns:
      The state, and per unique id `2 * row + 1` if it was known before, `2 * row` if it
      is new, and all bits set if it has no row.
    """
    num_shards = stack.num_shards
    (num_ids,) = unique.keys.shape
    capacity = _capacity(num_ids, num_shards, tables)
    owners = jnp.arange(num_shards, dtype=jnp.int32)
    owner = jnp.minimum(unique.keys // buckets_per_shard, num_shards - 1)
    local = unique.keys - owner * buckets_per_shard
    numbers = jnp.arange(num_ids, dtype=jnp.int32)
    is_id = unique.keys < num_shards * buckets_per_shard
    end_of_owner = _count_below(unique.keys, (owners + 1) * buckets_per_shard)

    def run(carry):
        state, rows, start, _ = carry
        first_number = _count_below(unique.keys, owners * buckets_per_shard + start)
        # The first bucket that does not fit, of any device.
        cut = first_number + capacity
        bucket = local.at[jnp.minimum(cut, num_ids - 1)].get(mode="clip")
        end = jnp.where(cut < end_of_owner, bucket, buckets_per_shard)
        end = jax.lax.pmin(end, plan.sample_axes)
        end = jnp.maximum(end, jnp.minimum(start + 1, buckets_per_shard))
        place = numbers - first_number[owner]
        is_sent = is_id & (local >= start[owner]) & (local < end[owner])
        # More ids of one bucket than a round has room for read the default row.
        is_sent &= place < capacity
        place = jnp.where(is_sent, owner * capacity + place, num_shards * capacity)
        state, replies = _ask(
            state,
            answer,
            unique,
            local,
            place,
            capacity,
            buckets_per_shard,
            tables,
            stack,
        )
        replies = replies.at[place].get(mode="fill", fill_value=NO_ID)
        rows = jnp.where(is_sent, replies, rows)
        return state, rows, end, jnp.any(end < buckets_per_shard)

    rows = jnp.full((num_ids,), NO_ID, jnp.uint32)
    start = jnp.zeros((num_shards,), jnp.int32)
    carry = run((state, rows, start, jnp.ones((), bool)))
    if capacity < num_ids:
        carry = jax.lax.while_loop(lambda carry: carry[-1], run, carry)
    state, rows, *_ = carry
    return state, rows


def _ask(
    state: Any,
    answer: Answer,
    unique: _Ids,
    local: Array,
    place: Array,
    capacity: int,
    buckets_per_shard: int,
    tables: Sequence[DynamicTablePlan],
    stack: StackPlan,
) -> tuple[Any, Array]:
    """Sends one round of ids, answers those received, and returns the replies."""
    num_shards = stack.num_shards
    words = (
        (local << 1 | unique.may_insert.astype(jnp.int32)).astype(jnp.uint32),
        unique.first,
        unique.second,
    )
    request = jnp.full((num_shards * capacity, 3), NO_ID, jnp.uint32)
    request = request.at[place].set(jnp.stack(words, axis=1), mode="drop")
    if num_shards > 1:
        request = jax.lax.all_to_all(
            request, stack.shard_axes, split_axis=0, concat_axis=0, tiled=True
        )
    received = request
    if stack.num_replicas > 1:
        # Each copy of the directory must see the ids of all.
        received = jax.lax.all_gather(request, stack.replica_axes, tiled=True)
    header = received[:, 0]
    is_id = header != NO_ID
    buckets = jnp.where(is_id, (header >> 1).astype(jnp.int32), 0)
    ids = OwnedIds(
        buckets=buckets,
        first=received[:, 1],
        second=received[:, 2],
        is_id=is_id,
        may_insert=(header & 1) == 1,
    )
    state, lanes, is_known = answer(state, ids)
    rows = _rows_of_table(buckets, lanes, tables, stack)
    replies = rows.astype(jnp.uint32) << 1 | is_known.astype(jnp.uint32)
    replies = jnp.where(rows == _NO_ROW, NO_ID, replies)
    if stack.num_replicas > 1:
        replica = jax.lax.axis_index(stack.replica_axes)
        replies = jax.lax.dynamic_slice_in_dim(
            replies, replica * request.shape[0], request.shape[0]
        )
    if num_shards > 1:
        replies = jax.lax.all_to_all(
            replies, stack.shard_axes, split_axis=0, concat_axis=0, tiled=True
        )
    return state, replies


def _capacity(num_ids: int, num_shards: int, tables: Sequence[DynamicTablePlan]) -> int:
    """Returns the ids that a device sends to one owner in a round."""
    mean = num_ids / num_shards
    room = math.ceil(mean + _HEADROOM_STDDEVS * math.sqrt(mean))
    # A bucket travels whole; in small tables many ids share one.
    of_bucket = num_ids / min(table.num_buckets for table in tables)
    room = max(room, math.ceil(4 * of_bucket), 256)
    return min(num_ids, round_up(room, 128))


def _count_below(rising: Array, queries: Array) -> Array:
    return jnp.searchsorted(rising, queries, method="scan").astype(jnp.int32)


def _by_feature(
    rows: Array,
    is_known: Array,
    sources: Sequence[SourceIds],
    tables: Sequence[DynamicTablePlan],
) -> tuple[list[Array], list[Array]]:
    """Splits rows by feature, and puts the default row where there is none.

    Returns:
      Rows, and the number of known ids, per feature.
    """
    result, hits, start = [], [], 0
    for source in sources:
        of_feature = slice(start, start + source.high.shape[0])
        start = of_feature.stop
        missing: Any = PADDING_ROW_ID
        default = tables[source.table].default_row
        if default is not None:
            is_none = (source.high == NO_ID) & (source.low == NO_ID)
            missing = jnp.where(is_none, PADDING_ROW_ID, default)
        found = rows[of_feature]
        result.append(jnp.where(found == _NO_ROW, missing, found))
        hits.append(jnp.sum(is_known[of_feature], dtype=jnp.int32))
    return result, hits


def _plus(counts: Counts, others: Counts) -> Counts:
    return Counts(*[a + b for a, b in zip(counts, others, strict=True)])
