"""Reads dynamic tables' ids on the host, and places imported or restored ids.

An import provides only ids. A checkpoint also provides their last uses and counts.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tpu_embedding.dynamic.directory import (
    DynamicTablePlan,
    IdDirectory,
    directory_name,
    dynamic_tables,
)
from tpu_embedding.dynamic.ids_64 import NO_ID, Ids64, mix_ids, multiply_high, unmix_ids
from tpu_embedding.dynamic.vocabulary import SLOTS_PER_BUCKET
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.transfers import moves_arrays


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicRows:
    """The ids of a dynamic table and their row numbers, as host arrays `[ids]`.

    Attributes:
      ids: uint64, ascending.
      rows: int64, row of each id in the arrays from `unstack_tables`.
      natural_rows: int64, row that each id would have on a single device.
      last_used: uint32, clock of the last step that used each id.
      counts: uint32, steps that used each id.

    Example:
      >>> import tpu_embedding as te
      >>> vocabulary = te.Dynamic(capacity=100)
      >>> users = te.TableConfig(vocabulary_size=vocabulary, dim=4, name="user")
      >>> features = {"user": te.FeatureConfig(table=users)}
      >>> plan = te.make_plan(features, optimizer="adagrad")
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> te.functional.dynamic_rows(tables, plan)["user"].ids.tolist()
      []
    """

    ids: np.ndarray
    rows: np.ndarray
    natural_rows: np.ndarray
    last_used: np.ndarray
    counts: np.ndarray


def dynamic_rows(tables: dict[str, Any], plan: EmbeddingPlan) -> dict[str, DynamicRows]:
    """Copies the ids and row numbers of all dynamic tables to the host.

    If your job has several processes, all of them must call this together. Each process
    receives all ids.

    Args:
      tables: stack name to rows.
      plan: plan of the layer.

    Example:
      >>> import tpu_embedding as te
      >>> vocabulary = te.Dynamic(capacity=100)
      >>> users = te.TableConfig(vocabulary_size=vocabulary, dim=4, name="user")
      >>> features = {"user": te.FeatureConfig(table=users)}
      >>> plan = te.make_plan(features, optimizer="adagrad")
      >>> tables = te.functional.init_tables(plan, jax.random.key(0))
      >>> slots = te.functional.init_slots(tables, plan)
      >>> ids = te.inputs.prepare_features({"user": [2**40, 7, 7]}, plan)
      >>> result = te.functional.insert_ids(tables, slots, ids, plan)
      >>> te.functional.dynamic_rows(result.tables, plan)["user"].ids.tolist()
      [7, 1099511627776]
    """
    result = {}
    for stack in plan.stacks:
        if dynamic_tables(stack):
            result |= rows_in_directory(tables[directory_name(stack.name)], stack)
    return result


def rows_in_directory(
    directory: IdDirectory, stack: StackPlan
) -> dict[str, DynamicRows]:
    size = SLOTS_PER_BUCKET
    all_keys, all_scores = (
        on_host(array).reshape(stack.num_shards, -1, 2, size)
        for array in (directory.keys, directory.scores)
    )
    result = {}
    for member in dynamic_tables(stack):
        buckets = slice(
            member.first_bucket, member.first_bucket + member.buckets_per_shard
        )
        keys, scores = all_keys[:, buckets], all_scores[:, buckets]
        is_used = ~((keys[:, :, 0] == NO_ID) & (keys[:, :, 1] == NO_ID))
        shard, bucket, lane = np.nonzero(is_used)
        words = keys[shard, bucket, 0, lane], keys[shard, bucket, 1, lane]
        high, low = unmix_ids(*words)
        ids = Ids64(high=high, low=low).to_numpy()
        # Sorted, because the order in the directory depends on the device count.
        order = np.argsort(ids)
        on_shard = size * bucket + lane
        result[member.table.name] = DynamicRows(
            ids=ids[order],
            rows=(on_shard * member.num_shards + shard)[order],
            natural_rows=(shard * member.buckets_per_shard * size + on_shard)[order],
            last_used=scores[shard, bucket, 0, lane][order],
            counts=scores[shard, bucket, 1, lane][order],
        )
    return result


@moves_arrays
def on_host(array: Any) -> np.ndarray:
    """Copies a whole array to the host, even if several processes hold it."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        # For arrays that span processes, JAX supports only `tiled=True`.
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedIds:
    """The ids that have a place in a table. Arrays are `[placed ids]` unless noted.

    Attributes:
      kept: position of each placed id among the given ids.
      sources: `[rows]`, position of each row's id among the given ids, or -1. Rows are
        in `unstack_tables` order.
      num_left_out: number of given ids whose buckets were full.
      last_used: clock at each id's last use, by default the current clock.
      counts: steps that used each id, by default 1.
      init_key: seeds the rows for new ids. Defaults to the directory's key.
      sketch: counters for ids not admitted yet, one line per bucket. By default, all
        are 0.
    """

    first: np.ndarray
    second: np.ndarray
    buckets: np.ndarray
    lanes: np.ndarray
    kept: np.ndarray
    sources: np.ndarray
    num_left_out: int
    last_used: np.ndarray | None = None
    counts: np.ndarray | None = None
    init_key: np.ndarray | None = None
    sketch: np.ndarray | None = None


def place_ids(
    ids: np.ndarray, member: DynamicTablePlan, natural_rows: np.ndarray | None = None
) -> PlacedIds:
    """Places distinct uint64 ids in an empty table. A bucket takes its first 64 ids.

    To keep the ids' places from a table with the same number of buckets, pass
    `natural_rows`. A natural row is `64 * bucket + lane`.
    """
    words = Ids64.of_array(ids)
    first, second = mix_ids(np.asarray(words.high), np.asarray(words.low))
    if natural_rows is not None:
        kept = np.arange(len(ids))
        buckets, lanes = np.divmod(natural_rows, SLOTS_PER_BUCKET)
    else:
        buckets = multiply_high(first, member.dynamic.num_buckets).astype(np.int64)
        # The sort is stable, because a full bucket keeps the first ids, and a restore
        # passes the most valuable ids first.
        order = np.argsort(buckets, kind="stable")
        buckets = buckets[order]
        lanes = np.arange(len(order)) - np.searchsorted(buckets, buckets)
        fits = lanes < SLOTS_PER_BUCKET
        kept, buckets, lanes = order[fits], buckets[fits], lanes[fits]
    shards, on_shard = np.divmod(buckets, member.buckets_per_shard)
    rows = (SLOTS_PER_BUCKET * on_shard + lanes) * member.num_shards + shards
    num_rows = member.buckets_per_shard * SLOTS_PER_BUCKET * member.num_shards
    sources = np.full(num_rows, -1, np.int64)
    sources[rows] = kept
    return PlacedIds(
        first=first[kept],
        second=second[kept],
        buckets=buckets,
        lanes=lanes,
        kept=kept,
        sources=sources,
        num_left_out=len(ids) - len(kept),
    )


def with_placed_ids(
    directory: IdDirectory,
    placed: Mapping[str, PlacedIds],
    stack: StackPlan,
    plan: EmbeddingPlan,
    clock: int | None = None,
) -> IdDirectory:
    """Replaces the ids of some tables in a directory.

    All processes must call this together. Each host temporarily holds the whole
    directory.
    """
    new = jax.tree.map(lambda array: np.array(on_host(array)), directory)
    shards, members = stack.num_shards, dynamic_tables(stack)
    keys, scores = (
        array.reshape(shards, -1, 2, SLOTS_PER_BUCKET)
        for array in (new.keys, new.scores)
    )
    used_rows = new.used_rows.reshape(shards, len(members))
    # A clock starts at 1; see `IdDirectory`.
    new.clock[:] = np.maximum(new.clock, 1) if clock is None else clock
    for i, member in enumerate(members):
        if (ids := placed.get(member.table.name)) is None:
            continue
        size = member.buckets_per_shard
        buckets = slice(member.first_bucket, member.first_bucket + size)
        keys[:, buckets], scores[:, buckets] = NO_ID, 0
        shard, on_shard = np.divmod(ids.buckets, size)
        line = shard, on_shard + member.first_bucket
        keys[*line, 0, ids.lanes], keys[*line, 1, ids.lanes] = ids.first, ids.second
        # Imported ids count as used now, so that they are not the first to be evicted.
        last_used = new.clock[0] if ids.last_used is None else ids.last_used
        scores[*line, 0, ids.lanes] = last_used
        scores[*line, 1, ids.lanes] = 1 if ids.counts is None else ids.counts
        if ids.init_key is not None:
            new.init_keys.reshape(shards, len(members), 2)[:, i] = ids.init_key
        used_rows[:, i] = np.bincount(shard, minlength=shards)
        if new.sketch is not None:
            lines = new.sketch.reshape(shards, -1, new.sketch.shape[-1])[:, buckets]
            # Shards round up their bucket counts, so together they may have more lines
            # than `ids.sketch`.
            padded = np.zeros((shards * size, lines.shape[-1]), lines.dtype)
            if ids.sketch is not None:
                padded[: len(ids.sketch)] = ids.sketch
            lines[:] = padded.reshape(lines.shape)
    # With a callback, each process copies only the shards on its own devices.
    sharding = plan.rows_sharding(stack)
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, sharding, x.__getitem__), new
    )
