"""Places given ids in the buckets of dynamic tables, on the host, for imports."""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np

from tpu_embedding.dynamic import SLOTS_PER_BUCKET
from tpu_embedding.functional.dynamic_ids import on_host
from tpu_embedding.plan.dynamic_rows import DynamicTablePlan, dynamic_tables
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.stack_plan import StackPlan
from tpu_embedding.rows.id_directory import IdDirectory
from tpu_embedding.rows.id_mixing import NO_ID, mix_ids, multiply_high
from tpu_embedding.types import Ids64


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedIds:
    """The ids of a table and their places; words, buckets and lanes are `[placed ids]`.

    Attributes:
      first: first mixed word of each id that has a place.
      second: second mixed word.
      buckets: its bucket.
      lanes: its place in the bucket.
      sources: position among the given ids for each row of the table, in the order of
        `unstack_tables`, without the default row; -1: none.
      num_left_out: ids without a place, because their buckets are full.
    """

    first: np.ndarray
    second: np.ndarray
    buckets: np.ndarray
    lanes: np.ndarray
    sources: np.ndarray
    num_left_out: int


def place_ids(ids: np.ndarray, member: DynamicTablePlan) -> PlacedIds:
    """Returns the places of ids in an empty table; the first 64 of a bucket have one.

    Args:
      ids: uint64, distinct.
      member: the table.
    """
    words = Ids64.of_array(ids)
    first, second = mix_ids(np.asarray(words.high), np.asarray(words.low))
    buckets = multiply_high(first, member.num_buckets).astype(np.int64)
    order = np.argsort(buckets, kind="stable")
    ranked = buckets[order]
    lanes = np.arange(len(order)) - np.searchsorted(ranked, ranked)
    fits = lanes < SLOTS_PER_BUCKET
    kept, lanes = order[fits], lanes[fits]
    shards, on_shard = np.divmod(buckets[kept], member.buckets_per_shard)
    rows = (SLOTS_PER_BUCKET * on_shard + lanes) * member.num_shards + shards
    num_rows = member.buckets_per_shard * SLOTS_PER_BUCKET * member.num_shards
    sources = np.full(num_rows, -1, np.int64)
    sources[rows] = kept
    return PlacedIds(
        first=first[kept],
        second=second[kept],
        buckets=buckets[kept],
        lanes=lanes,
        sources=sources,
        num_left_out=len(ids) - len(kept),
    )


def with_placed_ids(
    directory: IdDirectory,
    placed: Mapping[str, PlacedIds],
    stack: StackPlan,
    plan: EmbeddingPlan,
) -> IdDirectory:
    """Returns the directory of a stack in which some tables have these ids only.

    They count as used once, at the clock of the directory. All processes of a job call
    it together; the whole directory is on the host for that time.

    Args:
      directory: directory of the stack.
      placed: name of a table to its ids.
      stack: the stack.
      plan: plan of the layer.
    """
    new = jax.tree.map(lambda x: np.array(on_host(x)), directory)
    shards, members = stack.num_shards, dynamic_tables(stack)
    keys, scores = (
        x.reshape(shards, -1, 2, SLOTS_PER_BUCKET) for x in (new.keys, new.scores)
    )
    used_rows = new.used_rows.reshape(shards, len(members))
    new.clock[:] = np.maximum(new.clock, 1)
    for i, member in enumerate(members):
        if (ids := placed.get(member.table.name)) is None:
            continue
        size = member.buckets_per_shard
        of_table = slice(member.first_bucket, member.first_bucket + size)
        keys[:, of_table], scores[:, of_table] = NO_ID, 0
        shard, on_shard = np.divmod(ids.buckets, size)
        line = shard, on_shard + member.first_bucket
        keys[*line, 0, ids.lanes], keys[*line, 1, ids.lanes] = ids.first, ids.second
        scores[*line, 0, ids.lanes], scores[*line, 1, ids.lanes] = new.clock[0], 1
        used_rows[:, i] = np.bincount(shard, minlength=shards)
        if new.sketch is not None:
            new.sketch.reshape(shards, -1, new.sketch.shape[-1])[:, of_table] = 0
    sharding = plan.rows_sharding(stack)
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, sharding, x.__getitem__), new
    )
