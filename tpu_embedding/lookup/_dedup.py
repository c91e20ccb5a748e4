"""Stage 2, dedup: merges equal ids into one request, and groups requests by owner."""

import dataclasses
from typing import Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Integer

from tpu_embedding.lookup._running_sums import running_sum
from tpu_embedding.plan.stack_plan import StackPlan
from tpu_embedding.rows.packed_rows import gather_in_bounds
from tpu_embedding.types import PADDING_ROW_ID

_MAX_COMPARISONS: Final = 2**23
"""Maximum comparisons of a search that compares each query with each value.

Above it, a binary search in a loop is faster."""


class Ranked(NamedTuple):
    """Sorted integers, and the rank of each among the distinct ones.

    Attributes:
      values: int32 `[n]`, rising.
      order: int32 `[n]`, position of each value before sorting.
      ranks: int32 `[n]`, number of distinct values that are smaller.
    """

    values: Int[Array, " n"]
    order: Int[Array, " n"]
    ranks: Int[Array, " n"]


def rank_unique(values: Int[Array, " n"]) -> Ranked:
    """Sorts integers, and ranks each among the distinct values."""
    places = jnp.arange(values.shape[0], dtype=jnp.int32)
    values, order = jax.lax.sort((values, places), num_keys=1, is_stable=False)
    is_new = jnp.concatenate([jnp.ones(1, bool), values[1:] != values[:-1]])
    return Ranked(values, order, running_sum(is_new.astype(jnp.int32)) - 1)


def unsort(
    values: Integer[Array, " n"], order: Int[Array, " n"]
) -> Integer[Array, " n"]:
    """Returns values of sorted places in the order before sorting.

    Args:
      values: one value per sorted place.
      order: position of each sorted place before sorting, as `rank_unique` returns it.
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
class Dedup:
    """The ids of a shard, sorted by key. Per shard.

    Attributes:
      sorted_keys: int32 `[ids]`, rising; padding last.
      order: int32 `[ids]`, position of each sorted key before sorting.
      ranks: int32 `[ids]`, number of distinct keys that are smaller. If the stack keeps
        duplicates, each occurrence counts as a distinct key.
      first_places: int32 `[num_shards + 1]`, sorted place of the first key of each
        destination; the last entry is the place of the first padding.
      first_ranks: int32 `[num_shards + 1]`, rank of the first key of each
        destination; the last entry is the number of unique ids.
    """

    sorted_keys: Int[Array, " ids"]
    order: Int[Array, " ids"]
    ranks: Int[Array, " ids"]
    first_places: Int[Array, " shards_and_one"]
    first_ranks: Int[Array, " shards_and_one"]


@jax.named_scope("dedup")
def dedup(keys: Int[Array, " ids"], stack: StackPlan) -> Dedup:
    """Sorts keys. One sort both finds duplicates and groups keys by destination."""
    if stack.keeps_duplicates:
        places = jnp.arange(keys.shape[0], dtype=jnp.int32)
        sorted_keys, order = jax.lax.sort((keys, places), num_keys=1, is_stable=True)
        ranks = places
    else:
        sorted_keys, order, ranks = rank_unique(keys)
    first_keys = jnp.arange(stack.num_shards + 1, dtype=jnp.int32)
    first_keys *= stack.rows_per_shard
    first_places = _search(sorted_keys, first_keys)
    return Dedup(
        sorted_keys=sorted_keys,
        order=order,
        ranks=ranks,
        first_places=first_places,
        first_ranks=_ranks_before(first_places, ranks),
    )


def count_below(keys: Int[Array, " queries"], dedup: Dedup) -> Int[Array, " queries"]:
    """Counts the unique ids of the shard whose key is below each query."""
    return _ranks_before(_search(dedup.sorted_keys, keys), dedup.ranks)


def broadcast_to_ids(values: Int[Array, " shards"], dedup: Dedup) -> Int[Array, " ids"]:
    """Returns for each sorted id the value of its destination.

    The value of padding is undefined. A running sum over the steps between
    destinations replaces a gather, because a TPU gathers single integers slowly.
    """
    steps = jnp.diff(values, prepend=0)
    starts = jnp.zeros_like(dedup.ranks)
    starts = starts.at[dedup.first_places[:-1]].add(
        steps, mode="drop", wrap_negative_indices=False
    )
    return running_sum(starts)


def key_at_rank(ranks: Int[Array, " queries"], dedup: Dedup) -> Int[Array, " queries"]:
    """Returns the unique key of each rank; `PADDING_ROW_ID` beyond the last rank."""
    places = _search(dedup.ranks, ranks)
    return dedup.sorted_keys.at[places].get(mode="fill", fill_value=PADDING_ROW_ID)


def _search(
    rising: Int[Array, " n"], queries: Int[Array, " queries"]
) -> Int[Array, " queries"]:
    """Counts the values below each query."""
    num_comparisons = rising.shape[0] * queries.shape[0]
    method = "compare_all" if num_comparisons <= _MAX_COMPARISONS else "scan"
    return jnp.searchsorted(rising, queries, method=method).astype(jnp.int32)


def _ranks_before(
    places: Int[Array, " queries"], ranks: Int[Array, " ids"]
) -> Int[Array, " queries"]:
    """Counts the unique ids before each sorted place."""
    before = gather_in_bounds(ranks, jnp.maximum(places - 1, 0))
    return jnp.where(places == 0, 0, before + 1)
