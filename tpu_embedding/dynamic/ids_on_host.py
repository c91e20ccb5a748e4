"""Reads the ids of dynamic tables on the host, and places imported or restored ids.

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
    """The ids of a dynamic table and their rows, on the host. All arrays are `[ids]`.

    Attributes:
      ids: uint64, ascending.
      rows: int64, row of each id in the arrays from `unstack_tables`.
      natural_rows: int64, row that each id would have on a single device.
      last_used: uint32, clock of the last step that used the id.
      counts: uint32, number of steps that used the id.

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
    """Returns the ids of all dynamic tables and their rows, on the host.

    All processes of a job must call this together, and each receives all ids.

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
    """Returns the ids and rows of each table of a dynamic stack."""
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
    """Returns a whole array on the host, even if several processes hold it."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedIds:
    """The ids of a table that have a place, and their places.

    Attributes:
      first: first mixed words, `[placed ids]`.
      second: second mixed words, `[placed ids]`.
      buckets: buckets, `[placed ids]`.
      lanes: lanes in the buckets, `[placed ids]`.
      kept: positions of the placed ids among the given ids, `[placed ids]`.
      sources: position among the given ids of each row's id, `[rows]`, in the row order
        of `unstack_tables`. -1 marks a row without an id.
      num_left_out: number of ids that don't fit, because their buckets are full.
      last_used: last uses, `[placed ids]`. Defaults to now.
      counts: numbers of steps that used the ids, `[placed ids]`. Defaults to one.
      init_key: key of new ids' initial values. Defaults to the directory's.
      sketch: counters of ids that are not admitted yet, one line per bucket. Defaults
        to zero.
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
    """Returns the places of ids in an empty table. A bucket takes its first 64 ids.

    Args:
      ids: distinct uint64 ids.
      member: the table.
      natural_rows: places of the ids in a table with the same number of buckets: 64
        times the bucket plus the lane. By default, ids are assigned new places.
    """
    words = Ids64.of_array(ids)
    first, second = mix_ids(np.asarray(words.high), np.asarray(words.low))
    if natural_rows is not None:
        kept = np.arange(len(ids))
        buckets, lanes = np.divmod(natural_rows, SLOTS_PER_BUCKET)
    else:
        buckets = multiply_high(first, member.dynamic.num_buckets).astype(np.int64)
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
    """Returns a stack's directory with the ids of some tables replaced.

    All processes of a job must call this together. Each host temporarily holds the
    whole directory. By default, the clock keeps its value, which is raised to 1 if it
    is 0.
    """
    new = jax.tree.map(lambda array: np.array(on_host(array)), directory)
    shards, members = stack.num_shards, dynamic_tables(stack)
    keys, scores = (
        array.reshape(shards, -1, 2, SLOTS_PER_BUCKET)
        for array in (new.keys, new.scores)
    )
    used_rows = new.used_rows.reshape(shards, len(members))
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
        last_used = new.clock[0] if ids.last_used is None else ids.last_used
        scores[*line, 0, ids.lanes] = last_used
        scores[*line, 1, ids.lanes] = 1 if ids.counts is None else ids.counts
        if ids.init_key is not None:
            new.init_keys.reshape(shards, len(members), 2)[:, i] = ids.init_key
        used_rows[:, i] = np.bincount(shard, minlength=shards)
        if new.sketch is not None:
            lines = new.sketch.reshape(shards, -1, new.sketch.shape[-1])[:, buckets]
            padded = np.zeros((shards * size, lines.shape[-1]), lines.dtype)
            if ids.sketch is not None:
                padded[: len(ids.sketch)] = ids.sketch
            lines[:] = padded.reshape(lines.shape)
    sharding = plan.rows_sharding(stack)
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, sharding, x.__getitem__), new
    )
