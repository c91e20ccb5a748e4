"""Stages 2 to 4: which ids travel when, and the exchange with their owners.

An id is one word or several words. A single word is the key of a row. Several words are
the key of a bucket and the words of a 64-bit id. Keys are int32 and include the owner:
`owner * keys_per_shard + local key`. `dedup` merges equal ids into one request and
groups requests by owner.

A round carries at most `capacity` ids from each shard to each owner. An owner's ids are
split into *ranges* that are equal for all source shards, so all requests for an id
travel in one round. An owner can therefore sum a row's gradients within a round, and an
optimizer can finish a round before the next begins.

A round's range ends before the first id that doesn't fit for some source. The shards
find it with an all-reduce (minimum) of one number per owner and word of the id.

`send_unique` sends the first round, which callers run as straight-line code. Later
rounds exist only under skew. `fold_later_rounds` is the only loop over rounds: the
forward pass folds "fetch, combine" over it, an update "spread, send, merge, apply the
rule", and a vocabulary "find or insert". All shards agree on when to stop.

Ids, rows and gradients travel by all-to-all, in buckets of equal size, one per
destination. If several devices hold copies of a shard, each copy serves its own group
of devices. The gradients of all copies are gathered and summed in the same order, so
copies stay bitwise equal after the update. (A GPU adds repeated rows in no fixed order
unless XLA is set to be deterministic.)
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

_MAX_COMPARISONS: Final = 2**23
"""Maximum comparisons of a search that compares each query with each value.

Above it, a binary search in a loop is faster."""


Words = tuple[Integer[Array, " _"], ...]
"""Ids of one or more words, ordered lexicographically."""


def rank_unique(
    *words: Integer[Array, " n"],
) -> tuple[Words, Int[Array, " n"], Int[Array, " n"]]:
    """Sorts ids, and ranks each among the distinct ids.

    Returns:
      The words, ascending; the position of each id before sorting; and its rank, the
      number of smaller distinct ids.
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
    """Returns values of sorted ids in their order before sorting.

    `order` has the position of each id before sorting; see `rank_unique`.
    """
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
    """The ids of a shard, sorted by key. Per shard.

    Attributes:
      words: `[ids]` each, ascending; padding last. The first word is the key.
      order: int32 `[ids]`, position of each sorted id before sorting.
      ranks: int32 `[ids]`, number of smaller distinct ids. If duplicates are kept, each
        occurrence counts as distinct.
      first_positions: int32 `[num_shards + 1]`, sorted position of the first id of each
        destination; the last entry is the position of the first padding.
      first_ranks: int32 `[num_shards + 1]`, rank of the first id of each
        destination; the last entry is the number of unique ids.
      keys_per_shard: keys that each shard owns.
    """

    words: Words
    order: Int[Array, " ids"]
    ranks: Int[Array, " ids"]
    first_positions: Int[Array, " shards_and_one"]
    first_ranks: Int[Array, " shards_and_one"]
    keys_per_shard: int = dataclasses.field(metadata={"static": True})

    @property
    def sorted_keys(self) -> Int[Array, " ids"]:
        """Keys of the sorted ids."""
        return self.words[0]


@jax.named_scope("dedup")
def dedup(
    words: Words, num_shards: int, keys_per_shard: int, *, keeps_duplicates: bool
) -> SortedIds:
    """Sorts ids. One sort both finds duplicates and groups ids by destination.

    Args:
      words: words of the ids. The key of padding is larger than all keys of shards.
      num_shards: destinations.
      keys_per_shard: keys that each shard owns.
      keeps_duplicates: whether each occurrence of an id travels separately.
    """
    if keeps_duplicates:
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
    """Counts the unique ids of the shard that are below each query."""
    return _ranks_before(_search(unique.words, words), unique.ranks)


def id_at_rank(ranks: Int[Array, " queries"], unique: SortedIds) -> Words:
    """Returns the unique id of each rank, or words of `PADDING_ROW_ID` past the end."""
    positions = _search((unique.ranks,), (ranks,))
    return tuple(
        word.at[positions].get(mode="fill", fill_value=PADDING_ROW_ID)
        for word in unique.words
    )


def broadcast_to_ids(
    values: Int[Array, " shards"], unique: SortedIds
) -> Int[Array, " ids"]:
    """Returns the value of each sorted id's destination, undefined for padding."""
    # A running sum over the steps between destinations replaces a gather, because a TPU
    # gathers single integers slowly.
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
    """Counts the unique ids before each sorted position."""
    before = gather_in_bounds(ranks, jnp.maximum(positions - 1, 0))
    return jnp.where(positions == 0, 0, before + 1)


def fetch_rows(
    table: PackedRows,
    row_ids: Int[Array, " buffer"],
    stack: StackPlan,
) -> Float[Array, "buffer dim"]:
    """Gathers the rows requested from this shard, and sends them back. Per shard.

    `row_ids` are the requests of a `Round`.

    Returns:
      The rows that this shard requested, float32, in the positions of its requests.
      Positions without a request are undefined.
    """
    with jax.named_scope("gather"):
        rows = read_rows(table, row_ids)
        if stack.hardware.name == "cpu":
            # Otherwise XLA fuses the gather into the exchange's slices, on one core.
            rows = computed_apart(rows)
    # Rows stored in bfloat16 also travel in bfloat16. The conversion is exact.
    is_short = table.layout.narrow_dtype == "bfloat16" and stack.num_shards > 1
    rows = rows.astype(jnp.bfloat16 if is_short else jnp.float32)
    return quantize(exchange(rows, stack).astype(jnp.float32), stack.quantization)


@jax.named_scope("exchange")
def exchange(buffer: Array, stack: StackPlan) -> Array:
    """Sends bucket `d` of the buffer to shard `d`; receives a bucket from each shard.

    Args:
      buffer: `[num_shards * bucket_size, ...]`, per shard.
      stack: provides the mesh axes that split rows.

    Returns:
      The received buckets in the order of their senders, in the same shape. A second
      exchange returns every bucket to its sender.
    """
    if stack.num_shards == 1:
        return buffer
    shape = buffer.shape
    if buffer.ndim == 1 and buffer.size % (stack.num_shards * LANES) == 0:
        # On TPU, an int32 array of this shape has the flat array's memory layout.
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
    """The requests of one round, at their source and at the owner. Per shard.

    Attributes:
      buffer_positions: int32 `[ids]`, position of each sorted id in the buffer of
        requests. Its row has the same position in the buffer of answers. The position
        is past the end if the id is not part of this round.
      requests: requests to this shard, one bucket per source shard. int32
        `[buffer_size]`, local rows; or uint32 `[buffer_size, words]`, the local key
        first. Unused positions, including the last, have the key `PADDING_ROW_ID`.
      next_ranks: int32 `[num_shards]`, first pending rank per destination after this
        round.
      end_row: int32 `[1]`, end of the range of this shard's own rows that this round
        covers. The range begins where the previous round's range ends.
      is_pending: bool `[1]`, True if some shard has pending ids after this round. It is
        False in a gradient of zeros, so no further round runs.
    """

    buffer_positions: Int[Array, " ids"]
    requests: Integer[Array, "buffer *words"]
    next_ranks: Int[Array, " shards"]
    end_row: Int[Array, "_"]
    is_pending: Bool[Array, "_"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SentIds:
    """The ids of a batch, with the first round sent to the owners. Per shard.

    Attributes:
      unique: the unique ids of the shard.
      first: the first round.
      companions: uint32 `[ids]` each, words that travel with the sorted ids. Equal ids
        have equal words.
      size: buffer sizes of each round.
    """

    unique: SortedIds
    first: Round
    companions: tuple[UInt32[Array, " ids"], ...]
    size: RoundSize = dataclasses.field(metadata={"static": True})

    def positions(self, current: Round) -> Int[Array, " ids"]:
        """Returns the position of each id's row in the buffer of a round."""
        return unsort(current.buffer_positions, self.unique.order)


def send_ids(
    keys: Int[Array, " ids"], max_unique_ids: int, stack: StackPlan
) -> SentIds:
    """Sends the unique ids of the first round to the owners of their rows. Per shard.

    `keys` has the keys of all features; see `_forward.py`. No shard has more than
    `max_unique_ids` unique ids.
    """
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
    """Sends the first round of unique ids to their owners. Per shard.

    See `SentIds` for the arguments.
    """
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
    """Folds `carry = body(carry, round)` over the rounds after the first. Per shard.

    Args:
      body: function to run in each round.
      carry: the caller's result of the first round, `ids.first`.
      ids: from `send_ids`.
      stack: plan of the stack.
      num_passes: number of passes over the rounds, if there are several rounds. Each
        later pass starts again at the first round.

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
    """Sends the requests of a round. Per shard.

    `first_ranks` has the first pending rank of each destination.
    """
    if size.holds_all:
        # No batch of this shape needs a second round, so there is nothing to agree on.
        next_ranks = unique.first_ranks[1:]
        end_row, is_pending = jnp.int32(unique.keys_per_shard), jnp.zeros((), bool)
    else:
        next_ranks, end_keys = _agree_on_range(unique, first_ranks, size, stack)
        end_row = end_keys[jax.lax.axis_index(stack.shard_axes)]
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
    """Finds the range of each destination's ids that fits in a round for all sources.

    Returns:
      The first rank and local key after the range, for each destination.
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
    # Find the smallest end over all devices, word by word. A word counts only where all
    # earlier words are the smallest. The minimum includes copies of a shard, so they
    # get the same ids in a round.
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
    """Returns the gradients that all copies of the shard received.

    Returns:
      The gradients of all copies, one copy after the other. Rows may repeat. If the
      optimizer sees occurrences in sequence, they are in sample order.
    """
    if stack.num_replicas == 1:
        return received

    def gather(buffer: Array) -> Array:
        buffers = jax.lax.all_gather(buffer, stack.replica_axes)
        rest = buffer.shape[1:]
        if isinstance(stack.optimizer.driver, InSequence):
            # Sort the buckets of all copies by the device of their samples.
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
