"""Translates 64-bit ids to row numbers: source, owner, and back. Per shard.

Each device mixes its ids, and sends each different id to the owner of its bucket, in
the rounds that all ids travel in. The owner finds it, or inserts it, and answers with
the row. A single device answers its own ids as they are.

To insert, an owner must know all ids of a bucket. If they take several rounds, all
rounds run twice: to note the ids, then to insert them.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from tpu_embedding.dynamic.directory import (
    DynamicTablePlan,
    IdDirectory,
    MixedIds,
    NewRows,
    Pass,
    dynamic_tables,
)
from tpu_embedding.dynamic.find_or_insert import (
    Counts,
    find_lanes,
    insert,
    local_rows,
    no_counts,
)
from tpu_embedding.dynamic.ids_64 import NO_ID, mix_ids, multiply_high
from tpu_embedding.lookup._rounds import (
    Round,
    SentIds,
    dedup,
    exchange,
    fold_later_rounds,
    send_unique,
    unsort,
)
from tpu_embedding.plan.capacity import round_size
from tpu_embedding.plan.plan import StackPlan
from tpu_embedding.types import PADDING_ROW_ID

_HEADROOM_STDDEVS: Final = 8
"""Room of a round above the mean number of ids per owner, in standard deviations.

An unused position costs 16 bytes."""

_MIN_CAPACITY: Final = 256

_NO_ROW: Final = NO_ID
"""Answer for an id without a row; others are `2 * row + was known before`."""

Answer = Callable[[Any, MixedIds, Pass], tuple[Any, Array, Array]]
"""Called as `answer(state, ids, of_pass)` at the owner of the ids.

It returns the state, the lane of each id in its bucket, and True for ids that had a row
before. The state is the directory, and rows. The lanes of the last pass count."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
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

    @property
    def is_id(self) -> Bool[Array, " ids"]:
        """False for positions without an id."""
        return ~((self.high == NO_ID) & (self.low == NO_ID))


def find_rows(
    directory: IdDirectory,
    sources: Sequence[SourceIds],
    stack: StackPlan,
) -> tuple[list[Int[Array, " _"]], list[Int[Array, ""]]]:
    """Returns the row of each id within its table, and changes nothing. Per shard.

    Args:
      directory: directory of this shard.
      sources: ids of each feature.
      stack: plan of the stack.

    Returns:
      Rows per feature; `PADDING_ROW_ID`, or the default row, for ids without one. Per
      feature, the number of positions whose id has a row.
    """

    def answer(state, ids, of_pass):
        del of_pass
        lanes = find_lanes(directory, ids)
        return state, lanes, lanes >= 0

    _, answers = _ask_owners((), answer, 1, sources, stack)
    return _by_feature(answers, sources, dynamic_tables(stack))


def insert_rows(
    directory: IdDirectory,
    init_new_rows: Callable[[Any, NewRows], Any],
    rows_state: Any,
    sources: Sequence[SourceIds],
    now: UInt32[Array, ""],
    stack: StackPlan,
) -> tuple[IdDirectory, Any, list[Int[Array, " _"]], list[Int[Array, ""]], Counts]:
    """Returns the row of each id within its table; new ids get one. Per shard.

    Args:
      directory: directory of this shard.
      init_new_rows: writes the initial values of new rows to `rows_state`.
      rows_state: rows and slot variables of this shard.
      sources: ids of each feature.
      now: clock of the step.
      stack: plan of the stack.

    Returns:
      Directory; rows and slots; rows per feature; per feature, the number of positions
      whose id had a row before; counts at this owner.
    """
    tables = dynamic_tables(stack)

    def answer(state, ids, of_pass):
        directory, rows_state, counts = state
        directory, lanes, is_known, new, found = insert(
            directory, ids, tables, now, of_pass
        )
        counts = jax.tree.map(jnp.add, counts, found)
        return (directory, init_new_rows(rows_state, new), counts), lanes, is_known

    state = (directory, rows_state, no_counts(len(tables)))
    state, answers = _ask_owners(state, answer, 2, sources, stack)
    directory, rows_state, counts = state
    return directory, rows_state, *_by_feature(answers, sources, tables), counts


def _ask_owners(
    state: Any,
    answer: Answer,
    num_passes: int,
    sources: Sequence[SourceIds],
    stack: StackPlan,
) -> tuple[Any, UInt32[Array, " ids"]]:
    """Brings the ids of all features to their owners, round by round.

    Returns:
      The state, and the answer for each id; see `_NO_ROW`.
    """
    ids = _mix(sources, stack)
    if stack.num_devices == 1:
        only_pass = Pass(notes=True, fills=True)
        return _answer(state, answer, ids, only_pass, stack)
    sent = _send(ids, stack)
    (is_pending,) = sent.first.is_pending
    answers = jnp.full(ids.buckets.shape, _NO_ROW, jnp.uint32)
    # One round notes and fills at once. Of several, the first one starts the notes.
    fills_at_once = ~is_pending | (num_passes == 1)

    def ask(carry, current: Round, fills):
        state, answers, notes = carry
        of_pass = Pass(notes=notes, fills=fills)
        state, replies = _reply(state, answer, current, of_pass, stack)
        positions = current.buffer_positions
        found = replies.at[positions].get(mode="fill", fill_value=_NO_ROW)
        is_asked = positions < sent.size.buffer_size
        # The pass of the notes ends with its last round.
        return state, jnp.where(is_asked, found, answers), notes & current.is_pending[0]

    notes = jnp.ones((), bool)
    carry = ask((state, answers, notes), sent.first, fills_at_once)
    (state, answers, _), _ = fold_later_rounds(
        lambda carry, current: ask(carry, current, ~carry[2]),
        carry,
        sent,
        stack,
        num_passes,
    )
    return state, unsort(answers, sent.unique.order)


def _mix(sources: Sequence[SourceIds], stack: StackPlan) -> MixedIds:
    """Mixes the ids of all features, one after the other; buckets of all shards."""
    tables = dynamic_tables(stack)
    buckets_per_shard = sum(table.buckets_per_shard for table in tables)
    parts = []
    for source in sources:
        table = tables[source.table]
        first, second = mix_ids(source.high, source.low)
        bucket = multiply_high(first, table.num_buckets)
        owner, local = jnp.divmod(bucket, table.buckets_per_shard)
        bucket = owner * buckets_per_shard + table.first_bucket + local
        bucket = jnp.where(source.is_id, bucket, PADDING_ROW_ID)
        parts.append(MixedIds(bucket, first, second, source.inserts))
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def _send(ids: MixedIds, stack: StackPlan) -> SentIds:
    """Sends each different id to the owner of its bucket."""
    tables = dynamic_tables(stack)
    unique = dedup(
        (ids.buckets, ids.first, ids.second),
        stack.num_shards,
        sum(table.buckets_per_shard for table in tables),
        keeps_duplicates=False,
    )
    # An id may be inserted if one of its features inserts.
    inserts = jnp.zeros(ids.buckets.shape, jnp.uint32)
    inserts = inserts.at[unique.ranks].max(
        ids.may_insert[unique.order].astype(jnp.uint32), mode="promise_in_bounds"
    )
    # The first owner has the most buckets; in small tables, the last ones have none.
    (num_ids,) = ids.buckets.shape
    mean = num_ids * max(t.buckets_per_shard / t.num_buckets for t in tables)
    room = math.ceil(mean + _HEADROOM_STDDEVS * math.sqrt(mean))
    capacity = max(room, _MIN_CAPACITY)
    size = round_size(num_ids, stack.num_shards, num_ids, capacity=capacity)
    return send_unique(unique, (inserts[unique.ranks],), size, stack)


def _reply(
    state: Any, answer: Answer, current: Round, of_pass: Pass, stack: StackPlan
) -> tuple[Any, UInt32[Array, " buffer"]]:
    """Answers the requests of a round, and sends the answers back."""
    requests = current.requests
    if stack.num_replicas > 1:
        # Each copy of the directory must see the ids of all.
        requests = jax.lax.all_gather(requests, stack.replica_axes, tiled=True)
    bucket, first, second, may_insert = requests.T
    ids = MixedIds(bucket.astype(jnp.int32), first, second, may_insert == 1)
    state, replies = _answer(state, answer, ids, of_pass, stack)
    if stack.num_replicas > 1:
        size = current.requests.shape[0]
        start = jax.lax.axis_index(stack.replica_axes) * size
        replies = jax.lax.dynamic_slice_in_dim(replies, start, size)
    return state, exchange(replies, stack)


def _answer(
    state: Any, answer: Answer, ids: MixedIds, of_pass: Pass, stack: StackPlan
) -> tuple[Any, UInt32[Array, " ids"]]:
    """Answers ids at their owner; see `_NO_ROW`."""
    tables = dynamic_tables(stack)
    state, lanes, is_known = answer(state, ids, of_pass)
    on_shard = local_rows(ids.buckets, lanes, tables, first_row=False)
    row = on_shard * stack.num_shards + jax.lax.axis_index(stack.shard_axes)
    replies = row.astype(jnp.uint32) << 1 | is_known.astype(jnp.uint32)
    return state, jnp.where(lanes < 0, _NO_ROW, replies)


def _by_feature(
    answers: UInt32[Array, " ids"],
    sources: Sequence[SourceIds],
    tables: Sequence[DynamicTablePlan],
) -> tuple[list[Int[Array, " _"]], list[Int[Array, ""]]]:
    """Returns rows, the default row where there is none, and hits, per feature."""
    ends = [sum(x.high.shape[0] for x in sources[: i + 1]) for i in range(len(sources))]
    rows, hits = [], []
    for source, found in zip(sources, jnp.split(answers, ends[:-1]), strict=True):
        default = tables[source.table].default_row
        missing = PADDING_ROW_ID
        if default is not None:
            missing = jnp.where(source.is_id, default, PADDING_ROW_ID)
        has_row = found != _NO_ROW
        rows.append(jnp.where(has_row, (found >> 1).astype(jnp.int32), missing))
        hits.append(jnp.sum(has_row & (found & 1 == 1), dtype=jnp.int32))
    return rows, hits
