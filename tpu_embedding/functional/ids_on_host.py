"""The ids of dynamic tables and their rows, on the host."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from tpu_embedding.plan.dynamic_rows import DynamicTablePlan, dynamic_tables
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.plan.stack_plan import StackPlan
from tpu_embedding.rows.id_directory import IdDirectory, directory_name
from tpu_embedding.rows.id_mixing import NO_ID, unmix_ids
from tpu_embedding.types import Ids64


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicRows:
    """The ids of a dynamic table and their rows, on the host; all arrays `[ids]`.

    Attributes:
      ids: uint64, rising.
      rows: int64, row of each id in the arrays of `unstack_tables`.
      natural_rows: int64, row of each id on one device.
      last_used: uint32, clock of the last step that used the id.
      counts: uint32, steps that used it.
    """

    ids: np.ndarray
    rows: np.ndarray
    natural_rows: np.ndarray
    last_used: np.ndarray
    counts: np.ndarray


def dynamic_rows(tables: dict[str, Any], plan: EmbeddingPlan) -> dict[str, DynamicRows]:
    """Returns the ids of all dynamic tables and their rows, on the host.

    All processes of a job call it together, and each gets all ids.

    Args:
      tables: stack name to rows.
      plan: plan of the layer.
    """
    result = {}
    for stack in plan.stacks:
        if stack.is_dynamic:
            result |= rows_in_directory(tables[directory_name(stack.name)], stack)
    return result


def rows_in_directory(
    directory: IdDirectory, stack: StackPlan
) -> dict[str, DynamicRows]:
    """Returns the ids of each table of a dynamic stack, and their rows."""
    keys, scores = (
        on_host(x).reshape(stack.num_shards, -1, 2, x.shape[1] // 2)
        for x in (directory.keys, directory.scores)
    )
    return {
        member.table.name: _rows_of(keys, scores, member)
        for member in dynamic_tables(stack)
    }


def on_host(array: Any) -> np.ndarray:
    """Returns the whole of an array that may lie on devices of several processes."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)


def _rows_of(
    keys: np.ndarray, scores: np.ndarray, member: DynamicTablePlan
) -> DynamicRows:
    first = member.first_bucket
    of_table = slice(first, first + member.buckets_per_shard)
    keys, scores = keys[:, of_table], scores[:, of_table]
    is_used = ~((keys[:, :, 0] == NO_ID) & (keys[:, :, 1] == NO_ID))
    shard, bucket, lane = np.nonzero(is_used)
    high, low = unmix_ids(keys[shard, bucket, 0, lane], keys[shard, bucket, 1, lane])
    ids = Ids64(high=high, low=low).to_numpy()
    order = np.argsort(ids)
    size = keys.shape[3]
    on_shard = size * bucket + lane
    return DynamicRows(
        ids=ids[order],
        rows=(on_shard * member.num_shards + shard)[order],
        natural_rows=(shard * member.buckets_per_shard * size + on_shard)[order],
        last_used=scores[shard, bucket, 0, lane][order],
        counts=scores[shard, bucket, 1, lane][order],
    )
