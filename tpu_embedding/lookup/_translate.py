"""Translates 64-bit ids to row numbers: source, owner, and back. Per shard.

Each device mixes its ids, drops repeats, and sends each id to the owner of its bucket.
The owner finds it, or inserts it, and answers with the row. (A single device answers
its own ids as they are.)

One round is the rule. If some device has more ids for an owner than a round holds, all
ids travel in rounds of a range, sorted by bucket and id. A range is the same on all
devices. To insert, an owner must know all ids of a bucket: the rounds run once to note
the ids, and once more to insert them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from tpu_embedding.lookup._dedup import unsort
from tpu_embedding.lookup._directory import (
    Counts,
    NewRows,
    find_lanes,
    insert,
    local_rows,
    no_counts,
)
from tpu_embedding.lookup._owned_ids import ONLY_PASS, OwnedIds, Pass
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
      inserts: bool `[ids]`, True where an unknown id gets a row.
    """

    high: UInt32[Array, " ids"]
    low: UInt32[Array, " ids"]
    inserts: Bool[Array, " ids"]
    table: int = dataclasses.field(metadata={"static": True})


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


class _SortedIds(NamedTuple):
    """Different ids of a device, sorted by owner, bucket and id.

    Attributes:
      owner: int32 `[ids]`.
      words: three uint32 `[ids]`: bucket of the owner, first and second mixed word.
      may_insert: bool `[ids]`.
      is_id: bool `[ids]`, False behind the last id.
      first_numbers: int32 `[num_shards]`, number of the first id for each owner.
      end_numbers: int32 `[num_shards]`, number behind the last one.
    """

    owner: Array
    words: tuple[Array, Array, Array]
    may_insert: Array
    is_id: Array
    first_numbers: Array
    end_numbers: Array


Answer = Callable[..., tuple[Any, Array, Array]]
"""Answers `(state, OwnedIds, Pass)` with the places of ids, and if they had one before.

It takes and returns a state: the directory, and rows. Places of the last pass count."""


class _Range(NamedTuple):
    """The ids that travel in a round. Per shard.

    Attributes:
      is_sent: bool `[ids]`.
      next_numbers: int32 `[num_shards]`, number of the first id of the next range.
      is_last: True if no device has ids behind the range.
    """

    is_sent: Array
    next_numbers: Array
    is_last: Array


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

    def answer(directory, ids, of_pass):
        del of_pass
        lanes = find_lanes(directory, ids)
        return directory, lanes, lanes >= 0

    _, rows, hits = _translate(directory, answer, 1, sources, tables, stack, plan)
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

    def answer(state, ids, of_pass):
        directory, rows_state, counts = state
        directory, lanes, is_known, new, found = insert(
            directory, ids, tables, now, of_pass
        )
        rows_state = start_rows(rows_state, new)
        return (directory, rows_state, _plus(counts, found)), lanes, is_known

    state = (directory, rows_state, no_counts(len(tables)))
    (directory, rows_state, counts), rows, hits = _translate(
        state, answer, 2, sources, tables, stack, plan
    )
    return directory, rows_state, rows, hits, counts


def _translate(
    state: Any,
    answer: Answer,
    num_passes: int,
    sources: Sequence[SourceIds],
    tables: Sequence[DynamicTablePlan],
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> tuple[Any, list[Array], list[Array]]:
    buckets_per_shard = sum(t.buckets_per_shard for t in tables)
    end = buckets_per_shard * tables[0].num_shards
    ids = _mix(sources, tables, buckets_per_shard)
    if plan.mesh.size == 1:
        state, lanes, is_known = answer(state, _owned(ids, end), ONLY_PASS)
        rows = _rows_of_table(jnp.minimum(ids.keys, end - 1), lanes, tables, stack)
    else:
        unique, order, ranks = _unique_ids(ids, len(tables), end)
        state, replies = _in_rounds(
            state, answer, num_passes, unique, tables, stack, plan
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
        parts.append((key, first, second, source.inserts))
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
    num_passes: int,
    unique: _Ids,
    tables: Sequence[DynamicTablePlan],
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> tuple[Any, Array]:
    """Sends ids to the owners of their buckets, in as many rounds as they need.

    Returns:
      The state, and per unique id `2 * row + 1` if it was known before, `2 * row` if it
      is new, and all bits set if it has no row.
    """
    (num_ids,) = unique.keys.shape
    ids = _by_owner(unique, tables)
    capacity = _capacity(num_ids, tables)
    fits = jnp.ones((), bool)
    if capacity < num_ids:
        fits = jnp.max(ids.end_numbers - ids.first_numbers) <= capacity
        fits = jax.lax.pmin(fits.astype(jnp.int32), plan.sample_axes) == 1

    def ask(state, rows, is_sent, first_numbers, of_pass):
        place = jnp.arange(num_ids, dtype=jnp.int32) - first_numbers[ids.owner]
        place = jnp.where(
            is_sent, ids.owner * capacity + place, stack.num_shards * capacity
        )
        answer_pass = functools.partial(answer, of_pass=of_pass)
        state, replies = _ask(state, answer_pass, ids, place, capacity, tables, stack)
        replies = replies.at[place].get(mode="fill", fill_value=NO_ID)
        return state, jnp.where(is_sent, replies, rows)

    def run(carry):
        state, rows, first_numbers, passes_left = carry
        of_round = _next_range(ids, first_numbers, capacity, plan)
        of_pass = Pass(notes=passes_left == 2, fills=passes_left == 1)
        state, rows = ask(state, rows, of_round.is_sent, first_numbers, of_pass)
        is_last = of_round.is_last
        first_numbers = jnp.where(is_last, ids.first_numbers, of_round.next_numbers)
        return state, rows, first_numbers, passes_left - is_last.astype(jnp.int32)

    rows = jnp.full((num_ids,), NO_ID, jnp.uint32)
    is_sent = ids.is_id & fits
    state, rows = ask(state, rows, is_sent, ids.first_numbers, ONLY_PASS)
    if capacity < num_ids:
        passes_left = jnp.where(fits, jnp.int32(0), jnp.int32(num_passes))
        carry = (state, rows, ids.first_numbers, passes_left)
        carry = jax.lax.while_loop(lambda carry: carry[-1] > 0, run, carry)
        state, rows, *_ = carry
    return state, rows


def _by_owner(unique: _Ids, tables: Sequence[DynamicTablePlan]) -> _SortedIds:
    num_shards = tables[0].num_shards
    buckets_per_shard = sum(table.buckets_per_shard for table in tables)
    ends = jnp.arange(num_shards + 1, dtype=jnp.int32) * buckets_per_shard
    numbers = jnp.searchsorted(unique.keys, ends, method="scan").astype(jnp.int32)
    owner = jnp.minimum(unique.keys // buckets_per_shard, num_shards - 1)
    return _SortedIds(
        owner=owner,
        words=(
            (unique.keys - owner * buckets_per_shard).astype(jnp.uint32),
            unique.first,
            unique.second,
        ),
        may_insert=unique.may_insert,
        is_id=unique.keys < num_shards * buckets_per_shard,
        first_numbers=numbers[:-1],
        end_numbers=numbers[1:],
    )


def _next_range(
    ids: _SortedIds, first_numbers: Array, capacity: int, plan: EmbeddingPlan
) -> _Range:
    """Returns the range that ends before the first id that does not fit, anywhere."""
    (num_ids,) = ids.owner.shape
    cut = first_numbers + capacity
    is_undecided = cut < ids.end_numbers
    at = jnp.minimum(cut, num_ids - 1)
    is_below = jnp.zeros((num_ids,), bool)
    is_equal = jnp.ones((num_ids,), bool)
    ends = []
    for words in ids.words:
        # The smallest first word of all devices, then the second of those that have it.
        end = jnp.where(is_undecided, words[at], NO_ID)
        end = jax.lax.pmin(end, plan.sample_axes)
        is_undecided &= words[at] == end
        is_below |= is_equal & (words < end[ids.owner])
        is_equal &= words == end[ids.owner]
        ends.append(end)
    numbers = jnp.arange(num_ids, dtype=jnp.int32)
    is_sent = ids.is_id & (numbers >= first_numbers[ids.owner]) & is_below
    return _Range(
        is_sent=is_sent,
        next_numbers=first_numbers.at[ids.owner].add(is_sent.astype(jnp.int32)),
        is_last=jnp.all(ends[0] == NO_ID),
    )


def _ask(
    state: Any,
    answer: Callable[[Any, OwnedIds], tuple[Any, Array, Array]],
    ids: _SortedIds,
    place: Array,
    capacity: int,
    tables: Sequence[DynamicTablePlan],
    stack: StackPlan,
) -> tuple[Any, Array]:
    """Sends one round of ids, answers those received, and returns the replies."""
    num_shards = stack.num_shards
    buckets, first, second = ids.words
    header = buckets << 1 | ids.may_insert.astype(jnp.uint32)
    request = jnp.full((num_shards * capacity, 3), NO_ID, jnp.uint32)
    words = jnp.stack((header, first, second), axis=1)
    request = request.at[place].set(words, mode="drop")
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
    buckets = jnp.where(is_id, header >> 1, 0).astype(jnp.int32)
    owned = OwnedIds(
        buckets=buckets,
        first=received[:, 1],
        second=received[:, 2],
        is_id=is_id,
        may_insert=(header & 1) == 1,
    )
    state, lanes, is_known = answer(state, owned)
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


def _capacity(num_ids: int, tables: Sequence[DynamicTablePlan]) -> int:
    """Returns the ids that a device sends to one owner in a round."""
    # The first owner has the most buckets; in small tables, the last ones have none.
    mean = num_ids * max(t.buckets_per_shard / t.num_buckets for t in tables)
    room = math.ceil(mean + _HEADROOM_STDDEVS * math.sqrt(mean))
    return min(num_ids, round_up(max(room, 256), 128))


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
