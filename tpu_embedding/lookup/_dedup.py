"""Stage 2, dedup: merges equal ids into one request, and groups requests by owner.

An id is one word, the key of a row; or several, the key of a bucket and the words of a
64-bit id. Keys are int32, and name the owner: `owner * keys_per_shard + local key`.
"""

import dataclasses
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Integer

from tpu_embedding.rows.packed_rows import gather_in_bounds
from tpu_embedding.types import PADDING_ROW_ID
from tpu_embedding.xla import running_sum

_MAX_COMPARISONS: Final = 2**23
"""Maximum comparisons of a search that compares each query with each value.

Above it, a binary search in a loop is faster."""


Words = tuple[Integer[Array, " _"], ...]
"""Ids of one word or several, in lexicographic order."""


class RankedIds(NamedTuple):
    """Sorted ids, and the rank of each among the distinct ones.

    Attributes:
      words: `[n]` each, rising.
      order: int32 `[n]`, position of each id before sorting.
      ranks: int32 `[n]`, number of distinct ids that are smaller.
    """

    words: Words
    order: Int[Array, " n"]
    ranks: Int[Array, " n"]


def rank_unique(*words: Integer[Array, " n"]) -> RankedIds:
    """Sorts ids, and ranks each among the distinct ones.

    Args:
      *words: the words of the ids.
    """
    positions = jnp.arange(words[0].shape[0], dtype=jnp.int32)
    *ids, order = jax.lax.sort(
        (*words, positions), num_keys=len(words), is_stable=False
    )
    is_new = jnp.zeros(positions.shape[0] - 1, bool)
    for word in ids:
        is_new |= word[1:] != word[:-1]
    is_new = jnp.concatenate([jnp.ones(1, bool), is_new])
    return RankedIds(tuple(ids), order, running_sum(is_new) - 1)


def unsort(
    values: Integer[Array, " n"], order: Int[Array, " n"]
) -> Integer[Array, " n"]:
    """Returns values of sorted ids in the order before sorting.

    Args:
      values: one value per sorted id.
      order: position of each id before sorting, as `rank_unique` returns it.
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
      words: `[ids]` each, rising; padding last. The first word is the key.
      order: int32 `[ids]`, position of each sorted id before sorting.
      ranks: int32 `[ids]`, number of distinct ids that are smaller. If duplicates are
        kept, each occurrence counts as a distinct id.
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
      words: words of the ids; the key of padding is behind those of all shards.
      num_shards: destinations.
      keys_per_shard: keys that each shard owns.
      keeps_duplicates: True if each occurrence of an id travels separately.
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


def broadcast_to_ids(
    values: Int[Array, " shards"], unique: SortedIds
) -> Int[Array, " ids"]:
    """Returns for each sorted id the value of its destination.

    The value of padding is undefined. A running sum over the steps between
    destinations replaces a gather, because a TPU gathers single integers slowly.
    """
    steps = jnp.diff(values, prepend=0)
    starts = jnp.zeros_like(unique.ranks)
    starts = starts.at[unique.first_positions[:-1]].add(
        steps, mode="drop", wrap_negative_indices=False
    )
    return running_sum(starts)


def id_at_rank(ranks: Int[Array, " queries"], unique: SortedIds) -> Words:
    """Returns the unique id of each rank; words of `PADDING_ROW_ID` beyond the last."""
    positions = _search((unique.ranks,), (ranks,))
    return tuple(
        word.at[positions].get(mode="fill", fill_value=PADDING_ROW_ID)
        for word in unique.words
    )


def _search(rising: Words, queries: Words) -> Int[Array, " queries"]:
    """Counts the ids below each query."""
    (num_ids,), (num_queries,) = rising[0].shape, queries[0].shape
    if len(rising) == 1:
        is_small = num_ids * num_queries <= _MAX_COMPARISONS
        method = "compare_all" if is_small else "scan"
        found = jnp.searchsorted(rising[0], queries[0], method=method)
        return found.astype(jnp.int32)

    def halve(_, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) // 2
        is_below = jnp.zeros(num_queries, bool)
        is_equal = low < high
        for word, query in zip(rising, queries, strict=True):
            found = word.at[middle].get(mode="clip")
            is_below |= is_equal & (found < query)
            is_equal &= found == query
        return jnp.where(is_below, middle + 1, low), jnp.where(is_below, high, middle)

    bounds = jnp.zeros(num_queries, jnp.int32), jnp.full(num_queries, num_ids)
    return jax.lax.fori_loop(0, num_ids.bit_length(), halve, bounds)[0]


def _ranks_before(
    positions: Int[Array, " queries"], ranks: Int[Array, " ids"]
) -> Int[Array, " queries"]:
    """Counts the unique ids before each sorted position."""
    before = gather_in_bounds(ranks, jnp.maximum(positions - 1, 0))
    return jnp.where(positions == 0, 0, before + 1)
