"""Translates 64-bit ids to row numbers: source, owner, and back. Per shard.

Each device mixes its ids, drops repeats, and sends each id to the owner of its bucket.
The owner finds it, or inserts it, and answers with the row. Ids travel in rounds of
whole buckets, because an owner must see all ids of a bucket at once to insert any. One
round is the rule; others run while some device has ids left.
"""

import dataclasses
import functools
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
    count_by_table,
    find_lanes,
    insert,
    local_rows,
    no_counts,
    table_of_buckets,
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


class _Unique(NamedTuple):
    """The different ids of a device, by bucket and id. All `[ids]`.

    Attributes:
      keys: int32, `owner * buckets per shard + bucket`; rising; `end` where unused.
      first: uint32, first mixed word.
      second: uint32, second mixed word.
      may_insert: bool.
    """

    keys: Array
    first: Array
    second: Array
    may_insert: Array


Answer = Callable[[Any, OwnedIds], tuple[Any, Array]]
"""Answers ids with places in their buckets, and changes a state: the directory."""


def find_rows(
    directory: IdDirectory,
    sources: Sequence[SourceIds],
    tables: Sequence[DynamicTablePlan],
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> tuple[list[Int[Array, " _"]], Counts]:
    """Returns the row of each id within its table, and changes nothing. Per shard.

    Args:
      directory: directory of this shard.
      sources: ids of each feature.
      tables: tables of the stack.
      stack: plan of the stack.
      plan: gives the mesh.

    Returns:
      Rows per feature; `PADDING_ROW_ID`, or the default row, for ids without one.
      Counts of distinct ids at this owner, where `not_admitted` counts the unknown.
    """

    def answer(state, ids):
        directory, counts = state
        lanes = find_lanes(directory, ids)
        count = functools.partial(
            count_by_table,
            table_of=table_of_buckets(ids.buckets, tables),
            num_tables=len(tables),
        )
        found = no_counts(len(tables))._replace(
            hits=count(lanes >= 0), not_admitted=count(ids.is_id & (lanes < 0))
        )
        return (directory, _plus(counts, found)), lanes

    state = (directory, no_counts(len(tables)))
    (_, counts), rows = _translate(state, answer, sources, tables, stack, plan)
    return rows, counts


def insert_rows(
    directory: IdDirectory,
    start_rows: Callable[[Any, NewRows], Any],
    rows_state: Any,
    sources: Sequence[SourceIds],
    tables: Sequence[DynamicTablePlan],
    now: UInt32[Array, ""],
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> tuple[IdDirectory, Any, list[Int[Array, " _"]], Counts]:
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
      Directory, rows and slots, rows per feature, and counts at this owner.
    """

    def answer(state, ids):
        directory, rows_state, counts = state
        directory, lanes, new_rows, found = insert(directory, ids, tables, now)
        rows_state = start_rows(rows_state, new_rows)
        return (directory, rows_state, _plus(counts, found)), lanes

    state = (directory, rows_state, no_counts(len(tables)))
    (directory, rows_state, counts), rows = _translate(
        state, answer, sources, tables, stack, plan
    )
    return directory, rows_state, rows, counts


def _translate(
    state: Any,
    answer: Answer,
    sources: Sequence[SourceIds],
    tables: Sequence[DynamicTablePlan],
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> tuple[Any, list[Array]]:
    buckets_per_shard = sum(t.buckets_per_shard for t in tables)
    unique, order, ranks = _unique_ids(sources, tables, buckets_per_shard)
    if plan.mesh.size == 1:
        ids = _owned(*unique, buckets_per_shard)
        state, lanes = answer(state, ids)
        rows = _rows_of_table(ids.buckets, lanes, tables, stack)
    else:
        state, rows = _in_rounds(
            state, answer, unique, tables, buckets_per_shard, stack, plan
        )
    of_ids = unsort(rows[ranks], order)
    return state, _by_feature(of_ids, sources, tables)


def _unique_ids(
    sources: Sequence[SourceIds],
    tables: Sequence[DynamicTablePlan],
    buckets_per_shard: int,
) -> tuple[_Unique, Array, Array]:
    """Sorts the ids of a device by bucket and id, and drops repeats.

    Returns:
      The different ids, the position of each sorted id before sorting, and its rank
      among the different ones.
    """
    end = buckets_per_shard * tables[0].num_shards
    keys, firsts, seconds, flags = [], [], [], []
    for source in sources:
        table = tables[source.table]
        first, second = mix_ids(source.high, source.low)
        bucket = multiply_high(first, table.num_buckets)
        owner, local = jnp.divmod(bucket, table.buckets_per_shard)
        key = owner * buckets_per_shard + table.first_bucket + local
        is_none = (source.high == NO_ID) & (source.low == NO_ID)
        keys.append(jnp.where(is_none, end, key))
        firsts.append(first)
        seconds.append(second)
        flags.append(jnp.full(first.shape, source.inserts))
    keys, firsts, seconds, flags = map(jnp.concatenate, (keys, firsts, seconds, flags))
    (num_ids,) = keys.shape
    places = jnp.arange(num_ids, dtype=jnp.int32)
    # In one table, the bucket rises with the first word: two keys sort as three do.
    operands = (keys, firsts, seconds, places)
    if len(tables) == 1:
        firsts, seconds, keys, order = jax.lax.sort(
            (firsts, seconds, keys, places), num_keys=2, is_stable=False
        )
    else:
        keys, firsts, seconds, order = jax.lax.sort(
            operands, num_keys=3, is_stable=False
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

    if len({source.inserts for source in sources}) == 1:
        may_insert = jnp.full((num_ids,), sources[0].inserts)
    else:
        may_insert = jnp.zeros((num_ids,), bool).at[ranks].max(flags[order])
    unique = _Unique(
        keys=compact(keys, end),
        first=compact(firsts, NO_ID),
        second=compact(seconds, NO_ID),
        may_insert=may_insert,
    )
    return unique, order, ranks


def _owned(
    keys: Array, first: Array, second: Array, may_insert: Array, end: int
) -> OwnedIds:
    is_id = keys < end
    return OwnedIds(
        buckets=jnp.minimum(keys, end - 1),
        first=first,
        second=second,
        is_id=is_id,
        may_insert=may_insert,
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
    unique: _Unique,
    tables: Sequence[DynamicTablePlan],
    buckets_per_shard: int,
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> tuple[Any, Array]:
    """Sends ids to the owners of their buckets, round by round.

    Each round takes a range of buckets of each owner, the same on all devices.

    Returns:
      The state, and the row of each unique id; -1 where there is none.
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
        replies = replies.at[place].get(mode="fill", fill_value=_NO_ROW)
        rows = jnp.where(is_sent, replies, rows)
        return state, rows, end, jnp.any(end < buckets_per_shard)

    rows = jnp.full((num_ids,), _NO_ROW, jnp.int32)
    start = jnp.zeros((num_shards,), jnp.int32)
    carry = run((state, rows, start, jnp.ones((), bool)))
    if capacity < num_ids:
        carry = jax.lax.while_loop(lambda carry: carry[-1], run, carry)
    state, rows, *_ = carry
    return state, rows


def _ask(
    state: Any,
    answer: Answer,
    unique: _Unique,
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
        (local << 1 | unique.may_insert).astype(jnp.uint32),
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
    rows_of_received = None
    header, first, second = received[:, 0], received[:, 1], received[:, 2]
    is_none = header == NO_ID
    bucket = jnp.where(is_none, buckets_per_shard, (header >> 1).astype(jnp.int32))
    places = jnp.arange(bucket.shape[0], dtype=jnp.int32)
    bucket, first, second, flag, order = jax.lax.sort(
        (bucket, first, second, (header & 1).astype(jnp.int32), places),
        num_keys=3,
        is_stable=False,
    )
    is_new = (
        (jnp.diff(bucket, prepend=-1) != 0)
        | (first != jnp.roll(first, 1))
        | (second != jnp.roll(second, 1))
    )
    ranks = running_sum(is_new.astype(jnp.int32)) - 1
    may_insert = jnp.zeros(flag.shape, jnp.int32).at[ranks].max(flag)[ranks]
    ids = OwnedIds(
        buckets=jnp.minimum(bucket, buckets_per_shard - 1),
        first=first,
        second=second,
        is_id=is_new & (bucket < buckets_per_shard),
        may_insert=may_insert > 0,
    )
    state, lanes = answer(state, ids)
    rows = _rows_of_table(ids.buckets, lanes, tables, stack)
    # Repeats have the row of the first.
    rows = jnp.full_like(rows, _NO_ROW).at[ranks].max(rows)[ranks]
    rows_of_received = unsort(rows, order)
    if stack.num_replicas > 1:
        replica = jax.lax.axis_index(stack.replica_axes)
        rows_of_received = jax.lax.dynamic_slice_in_dim(
            rows_of_received, replica * request.shape[0], request.shape[0]
        )
    if num_shards > 1:
        rows_of_received = jax.lax.all_to_all(
            rows_of_received, stack.shard_axes, split_axis=0, concat_axis=0, tiled=True
        )
    return state, rows_of_received


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
    sources: Sequence[SourceIds],
    tables: Sequence[DynamicTablePlan],
) -> list[Array]:
    """Splits rows by feature, and puts the default row where there is none."""
    result, start = [], 0
    for source in sources:
        end = start + source.high.shape[0]
        of_feature = rows[start:end]
        default = tables[source.table].default_row
        if default is not None:
            is_none = (source.high == NO_ID) & (source.low == NO_ID)
            missing = jnp.where(is_none, PADDING_ROW_ID, default)
        else:
            missing = PADDING_ROW_ID
        result.append(jnp.where(of_feature == _NO_ROW, missing, of_feature))
        start = end
    return result


def _plus(counts: Counts, others: Counts) -> Counts:
    return Counts(*[a + b for a, b in zip(counts, others, strict=True)])
