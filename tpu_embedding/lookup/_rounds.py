"""Dedup, rounds, and the exchange with the owners of rows, on one shard.

Buffers are static, so a round carries at most `capacity` ids from each shard to each
owner. All shards cut their ids for an owner at the same id, which they find with an
all-reduce. So all requests for a row travel in one round, and an optimizer can finish a
round before the next begins; see docs/concepts/skew.md.

Callers run round 1 as straight-line code, and then call `fold_later_rounds`, the only
loop over rounds.
"""

import dataclasses
from collections.abc import Callable
from typing import Final, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer, UInt32

from tpu_embedding.config import QuantizationConfig
from tpu_embedding.optimizers.row_optimizer import InSequence
from tpu_embedding.plan.capacity import LANES, RoundSize
from tpu_embedding.plan.plan import StackPlan
from tpu_embedding.rows.access import read_rows
from tpu_embedding.rows.packed_rows import PackedRows, gather_in_bounds
from tpu_embedding.rows.row_gradients import RowGradients
from tpu_embedding.types import PADDING_ROW_ID
from tpu_embedding.xla import computed_apart, running_sum

# Maximum comparisons of a search that compares each query with each value. Above this
# limit, a binary search in a loop is faster.
_MAX_COMPARISONS: Final = 2**23


# Ids of one or more words, ordered lexicographically. The first word is an int32 key,
# `owner * keys_per_shard + local key`. If it is the only word, it names a row.
# Otherwise, it names a bucket, and the words of a 64-bit id follow.
Words = tuple[Integer[Array, " _"], ...]


def rank_unique(
    *words: Integer[Array, " n"],
) -> tuple[Words, Int[Array, " n"], Int[Array, " n"]]:
    """Sorts ids, and finds the rank of each id among the distinct ids.

    Returns:
      Three values. The sorted words. Then the position of each sorted id before
      sorting. Then the rank of each sorted id: the number of smaller distinct ids.
    """
    positions = jnp.arange(words[0].shape[0], dtype=jnp.int32)
    *ids, order = jax.lax.sort(
        (*words, positions), num_keys=len(words), is_stable=False
    )
    is_new = jnp.zeros(positions.shape[0] - 1, bool)
    for word in ids:
        is_new |= word[1:] != word[:-1]
    is_new = jnp.concatenate([jnp.ones(1, bool), is_new])
    return tuple(ids), order, running_sum(is_new) - 1


def unsort(
    values: Integer[Array, " n"], order: Int[Array, " n"]
) -> Integer[Array, " n"]:
    """Undoes a sort, given the positions before sorting."""
    return (
        jnp.zeros_like(values)
        .at[order]
        .set(
            values,
            unique_indices=True,
            mode="promise_in_bounds",
            wrap_negative_indices=False,
        )
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SortedIds:
    """Ids in key order.

    Attributes:
      words: sorted, with padding last.
      order: positions before sorting.
      ranks: counts of smaller distinct ids. If duplicates are kept, each occurrence
        counts as distinct.
      first_positions: where the ids for each destination begin, and finally where
        padding begins.
      first_ranks: ranks at `first_positions`. The last one counts all unique ids.
    """

    words: Words
    order: Int[Array, " ids"]
    ranks: Int[Array, " ids"]
    first_positions: Int[Array, " shards_and_one"]
    first_ranks: Int[Array, " shards_and_one"]
    keys_per_shard: int = dataclasses.field(metadata={"static": True})

    @property
    def sorted_keys(self) -> Int[Array, " ids"]:
        return self.words[0]


@jax.named_scope("dedup")
def dedup(
    words: Words, num_shards: int, keys_per_shard: int, *, keeps_duplicates: bool
) -> SortedIds:
    """Sorts ids. One sort both finds duplicates and groups ids by destination.

    Padding needs a key above all keys that shards own.
    """
    if keeps_duplicates:
        # A stable sort keeps the occurrences of a row in sample order.
        positions = jnp.arange(words[0].shape[0], dtype=jnp.int32)
        *ids, order = jax.lax.sort(
            (*words, positions), num_keys=len(words), is_stable=True
        )
        ids, ranks = tuple(ids), positions
    else:
        ids, order, ranks = rank_unique(*words)
    first_keys = jnp.arange(num_shards + 1, dtype=jnp.int32) * keys_per_shard
    first_positions = _search(ids[:1], (first_keys,))
    return SortedIds(
        words=ids,
        order=order,
        ranks=ranks,
        first_positions=first_positions,
        first_ranks=_ranks_before(first_positions, ranks),
        keys_per_shard=keys_per_shard,
    )


def count_below(words: Words, unique: SortedIds) -> Int[Array, " queries"]:
    """Counts the unique ids below each query."""
    return _ranks_before(_search(unique.words, words), unique.ranks)


def id_at_rank(ranks: Int[Array, " queries"], unique: SortedIds) -> Words:
    """Finds the unique id at each rank, or padding past the end."""
    positions = _search((unique.ranks,), (ranks,))
    return tuple(
        word.at[positions].get(mode="fill", fill_value=PADDING_ROW_ID)
        for word in unique.words
    )


def broadcast_to_ids(
    values: Int[Array, " shards"], unique: SortedIds
) -> Int[Array, " ids"]:
    """Repeats each destination's value for its sorted ids. Undefined for padding."""
    # A TPU gathers single integers slowly. Instead, the difference from the previous
    # value is added where each destination begins, and a running sum turns differences
    # into values. Differences are added, not set, because a destination without ids
    # begins where the next destination does.
    steps = jnp.diff(values, prepend=0)
    starts = jnp.zeros_like(unique.ranks)
    starts = starts.at[unique.first_positions[:-1]].add(
        steps, mode="drop", wrap_negative_indices=False
    )
    return running_sum(starts)


def _search(rising: Words, queries: Words) -> Int[Array, " queries"]:
    """Counts the ids below each query."""
    (num_ids,), (num_queries,) = rising[0].shape, queries[0].shape
    if len(rising) == 1:
        is_small = num_ids * num_queries <= _MAX_COMPARISONS
        method = "compare_all" if is_small else "scan"
        counts = jnp.searchsorted(rising[0], queries[0], method=method)
        return counts.astype(jnp.int32)

    def halve(_, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) // 2
        is_below = jnp.zeros(num_queries, bool)
        # A finished search may look past the end, so its comparison must not count.
        is_equal = low < high
        for word, query in zip(rising, queries, strict=True):
            middle_word = word.at[middle].get(mode="clip")
            is_below |= is_equal & (middle_word < query)
            is_equal &= middle_word == query
        return jnp.where(is_below, middle + 1, low), jnp.where(is_below, high, middle)

    bounds = jnp.zeros(num_queries, jnp.int32), jnp.full(num_queries, num_ids)
    return jax.lax.fori_loop(0, num_ids.bit_length(), halve, bounds)[0]


def _ranks_before(
    positions: Int[Array, " queries"], ranks: Int[Array, " ids"]
) -> Int[Array, " queries"]:
    """Counts unique ids before each sorted position."""
    before = gather_in_bounds(ranks, jnp.maximum(positions - 1, 0))
    return jnp.where(positions == 0, 0, before + 1)


def fetch_rows(
    table: PackedRows,
    row_ids: Int[Array, " buffer"],
    stack: StackPlan,
) -> Float[Array, "buffer dim"]:
    """Gathers the rows that a `Round` requests, and sends them back.

    Returns:
      Float32 rows, at the positions of this shard's requests. Other positions are
      undefined.
    """
    with jax.named_scope("gather"):
        rows = read_rows(table, row_ids)
        if stack.hardware.name == "cpu":
            # Otherwise, XLA fuses the gather with slices in the exchange, and runs it
            # on one core.
            rows = computed_apart(rows)
    # Rows stored in bfloat16 also travel in bfloat16. This is exact, because `quantize`
    # runs after the exchange.
    is_short = table.layout.narrow_dtype == "bfloat16" and stack.num_shards > 1
    rows = rows.astype(jnp.bfloat16 if is_short else jnp.float32)
    return quantize(exchange(rows, stack).astype(jnp.float32), stack.quantization)


@jax.named_scope("exchange")
def exchange(buffer: Array, stack: StackPlan) -> Array:
    """Sends bucket `d` of the buffer to shard `d`; receives a bucket from each shard.

    `buffer` is `[num_shards * bucket_size, ...]`. The result is ordered by sender, so a
    second exchange returns every bucket.
    """
    if stack.num_shards == 1:
        return buffer
    shape = buffer.shape
    if buffer.ndim == 1 and buffer.size % (stack.num_shards * LANES) == 0:
        # On TPU, an int32 array of this shape has the flat array's memory layout, and
        # its buckets are sent without a copy.
        buffer = buffer.reshape(-1, LANES)
    received = jax.lax.all_to_all(
        buffer, stack.shard_axes, split_axis=0, concat_axis=0, tiled=True
    )
    return received.reshape(shape)


def quantize(
    rows: Float[Array, "*shape"], config: QuantizationConfig | None
) -> Float[Array, "*shape"]:
    """Rounds each element to the nearest quantized value, if there is a config."""
    if config is None:
        return rows
    step = (config.upper - config.lower) / (config.num_buckets - 1)
    clipped = jnp.clip(rows, config.lower, config.upper)
    return jnp.floor((clipped - config.lower) / step + 0.5) * step + config.lower


Carry = TypeVar("Carry")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """Requests in one round, at their source and at the owner.

    Attributes:
      buffer_positions: position of each sorted id in the buffer of requests, or past
        the end if the id is not in this round. The answers have the same positions.
      requests: received requests, in buckets by source. They are int32 local rows
        `[buffer_size]`, or uint32 words `[buffer_size, words]` that begin with the
        local key. Unused positions, including the last, have the key `PADDING_ROW_ID`.
      next_ranks: first rank that is pending after this round, per destination.
      end_row: `[1]`, where this round ends among the rows that this shard owns. The
        round begins where the previous round ended.
      is_pending: `[1]`, True if some shard has ids for a later round. In a gradient of
        zeros, it is False, so later rounds don't run.
    """

    buffer_positions: Int[Array, " ids"]
    requests: Integer[Array, "buffer *words"]
    next_ranks: Int[Array, " shards"]
    end_row: Int[Array, "_"]
    is_pending: Bool[Array, "_"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SentIds:
    """Sorted ids, after the first round was sent to the owners.

    Attributes:
      companions: words that travel with the sorted ids. Equal ids have equal words.
    """

    unique: SortedIds
    first: Round
    companions: tuple[UInt32[Array, " ids"], ...]
    size: RoundSize = dataclasses.field(metadata={"static": True})

    def positions(self, current: Round) -> Int[Array, " ids"]:
        """Finds the buffer position of each id, in the order before sorting."""
        return unsort(current.buffer_positions, self.unique.order)


def send_ids(
    keys: Int[Array, " ids"], max_unique_ids: int, stack: StackPlan
) -> SentIds:
    """Dedups at most `max_unique_ids` distinct keys, and sends the first round."""
    unique = dedup(
        (keys,),
        stack.num_shards,
        stack.rows_per_shard,
        keeps_duplicates=stack.keeps_duplicates,
    )
    return send_unique(unique, (), stack.round_size(max_unique_ids), stack)


def send_unique(
    unique: SortedIds,
    companions: tuple[UInt32[Array, " ids"], ...],
    size: RoundSize,
    stack: StackPlan,
) -> SentIds:
    """Sends the first round of unique ids to the owners."""
    first_ranks = unique.first_ranks[:-1]
    first = _next_round(unique, companions, first_ranks, size, stack)
    return SentIds(unique=unique, first=first, companions=companions, size=size)


def fold_later_rounds(
    body: Callable[[Carry, Round], Carry],
    carry: Carry,
    ids: SentIds,
    stack: StackPlan,
    num_passes: int = 1,
) -> tuple[Carry, Int[Array, ""]]:
    """Folds `carry = body(carry, round)` over the rounds after the first.

    `carry` holds the results of the first round, `ids.first`. If there are several
    rounds, each pass after the first pass starts again at the first round.

    Returns:
      The final carry, and the number of rounds, including the first.
    """
    if ids.size.holds_all:
        return carry, jnp.int32(1)

    def is_running(state):
        _, _, passes_left, _ = state
        return passes_left > 0

    def run(state):
        carry, next_ranks, passes_left, rounds = state
        current = _next_round(ids.unique, ids.companions, next_ranks, ids.size, stack)
        carry = body(carry, current)
        (is_pending,) = current.is_pending
        next_ranks = current.next_ranks
        if num_passes > 1:
            next_ranks = jnp.where(is_pending, next_ranks, ids.unique.first_ranks[:-1])
        passes_left -= (~is_pending).astype(jnp.int32)
        return carry, next_ranks, passes_left, rounds + 1

    passes_left = num_passes * ids.first.is_pending[0].astype(jnp.int32)
    state = (carry, ids.first.next_ranks, passes_left, jnp.int32(1))
    carry, _, _, rounds = jax.lax.while_loop(is_running, run, state)
    return carry, rounds


@jax.named_scope("route")
def _next_round(
    unique: SortedIds,
    companions: tuple[UInt32[Array, " ids"], ...],
    first_ranks: Int[Array, " shards"],
    size: RoundSize,
    stack: StackPlan,
) -> Round:
    """Sends the requests of a round that begins at `first_ranks`."""
    if size.holds_all:
        # No batch of this shape needs a second round, so shards needn't agree on a cut.
        next_ranks = unique.first_ranks[1:]
        end_row, is_pending = jnp.int32(unique.keys_per_shard), jnp.zeros((), bool)
    else:
        next_ranks, end_keys = _agree_on_range(unique, first_ranks, size, stack)
        end_row = end_keys[jax.lax.axis_index(stack.shard_axes)]
        # All shards see the same ends, so they leave the loop together. Otherwise its
        # collectives would hang.
        is_pending = jnp.any(end_keys != unique.keys_per_shard)
    rank_in_round = unique.ranks - broadcast_to_ids(first_ranks, unique)
    is_in_round = (
        (unique.sorted_keys != PADDING_ROW_ID)
        & (rank_in_round >= 0)
        & (unique.ranks < broadcast_to_ids(next_ranks, unique))
    )
    destination = jax.lax.div(unique.sorted_keys, jnp.int32(unique.keys_per_shard))
    request = unique.sorted_keys - unique.keys_per_shard * destination
    if words := (*unique.words[1:], *companions):
        request = jnp.stack((request.astype(jnp.uint32), *words), axis=1)
    buffer_positions = jnp.where(
        is_in_round, size.bucket_size * destination + rank_in_round, size.buffer_size
    )
    shape = (size.buffer_size, *request.shape[1:])
    requests = jnp.full(shape, PADDING_ROW_ID, request.dtype)
    # Writing one slice per destination would compile to a loop on TPUs. By the
    # compiler's count, a whole step would take 16 % more cycles. Equal ids write equal
    # requests.
    requests = requests.at[buffer_positions].set(
        request, mode="drop", wrap_negative_indices=False
    )
    return Round(
        buffer_positions=buffer_positions,
        requests=exchange(requests, stack),
        next_ranks=next_ranks,
        end_row=end_row[None],
        is_pending=is_pending[None],
    )


def _agree_on_range(
    unique: SortedIds,
    first_ranks: Int[Array, " shards"],
    size: RoundSize,
    stack: StackPlan,
) -> tuple[Int[Array, " shards"], Int[Array, " shards"]]:
    """Finds the range of ids that fits in one round from every source.

    Returns:
      For each destination, the first rank and the first local key after the range.
    """
    first_keys = jnp.arange(stack.num_shards, dtype=jnp.int32) * unique.keys_per_shard
    cut = first_ranks + size.capacity
    key, *others = id_at_rank(cut, unique)
    # The range ends at the first id that doesn't fit, or after the shard's last key.
    fits = cut >= unique.first_ranks[1:]
    end = (
        jnp.where(fits, unique.keys_per_shard, key - first_keys),
        *(jnp.where(fits, jnp.uint32(0), word) for word in others),
    )
    # Find the smallest end over all devices, word by word. A device's word counts only
    # where all its earlier words are the smallest. Devices with copies of a shard take
    # part, because copies need equal rounds.
    smallest, is_candidate = [], None
    for word in end:
        if is_candidate is not None:
            word = jnp.where(
                is_candidate, word, jnp.full_like(word, jnp.iinfo(word.dtype).max)
            )
        smallest.append(jax.lax.pmin(word, stack.sample_axes))
        is_equal = word == smallest[-1]
        is_candidate = is_equal if is_candidate is None else is_candidate & is_equal
    end_keys, *others = smallest
    return count_below((first_keys + end_keys, *others), unique), end_keys


def gather_from_replicas(received: RowGradients, stack: StackPlan) -> RowGradients:
    """Gathers the gradients that all copies of a shard received. Rows may repeat."""
    if stack.num_replicas == 1:
        return received

    # All copies sum the same gradients in the same order, so they stay bitwise equal.
    # (A GPU adds repeated rows in any order unless XLA is set to be deterministic.)

    def gather(buffer: Array) -> Array:
        buffers = jax.lax.all_gather(buffer, stack.replica_axes)
        rest = buffer.shape[1:]
        if isinstance(stack.optimizer.driver, InSequence):
            # To restore sample order, sort buckets by the device that has the samples.
            axes = (*stack.replica_axes, *stack.shard_axes)
            sizes = [jax.lax.axis_size(axis) for axis in axes]
            buckets = buffers.reshape(*sizes, -1, *rest)
            order = [axes.index(axis) for axis in stack.sample_axes]
            buffers = buckets.transpose(*order, *range(len(axes), buckets.ndim))
        return buffers.reshape(-1, *rest)

    with jax.named_scope("replicas"):
        row_ids = gather(received.row_ids)
        values = gather(received.values)
    return RowGradients(row_ids=row_ids, values=values)
