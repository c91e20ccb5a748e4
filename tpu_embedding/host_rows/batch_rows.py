"""Finds on the host which rows a batch reads, before its step runs.

The NumPy code follows the rules in `inputs/shard_inputs.py` (padding, truncated
sequences) and `lookup/_forward.py` (ids outside the table, weights, default ids). It
makes few passes over the ids and compiles nothing. Tests compare it with the compiled
stages.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any, Final

import jax
import numpy as np

from tpu_embedding.host_rows.store import in_threads
from tpu_embedding.inputs.shard_inputs import FeatureShape, feature_shape
from tpu_embedding.lookup._forward import leaves_out_weights
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.plan.plan import EmbeddingPlan, StackPlan
from tpu_embedding.transfers import moves_arrays
from tpu_embedding.types import (
    PADDING_ROW_ID,
    ShardedRaggedIds,
    batch_shape_of,
    ids_of,
)
from tpu_embedding.vocabularies import rows_of_ids

_NO_ROWS: Final = np.zeros(0, np.int32)
_SMALLEST_NORMAL: Final = np.finfo(np.float32).tiny


RowsOfShards = list[np.ndarray]
"""Sorted unique local rows, one int32 array per shard."""


@moves_arrays
def rows_of_batch(
    features: Any, plan: EmbeddingPlan, stacks: Collection[str]
) -> dict[str, RowsOfShards]:
    """Finds the rows that a lookup reads from the named stacks, by shard.

    `features` is a global batch, prepared or not, as NumPy or JAX arrays. If JAX arrays
    span several processes, only the samples on this process's devices are read. A wrong
    dtype, form or shape raises, as in a lookup. The results don't share memory with the
    batch.

    Example:
      >>> import numpy as np
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
      >>> ids = {"watched": np.array([7, 10, 7])}  # 10 is outside the table
      >>> rows = rows_of_batch(ids, plan, {"stack_0"})["stack_0"]
      >>> sum(map(len, rows))
      1
    """
    plan, leaves = plan.match(features)
    stack_of = {stack.name: stack for stack in plan.stacks}
    tasks: dict[str, list[Any]] = {name: [] for name in stacks}
    for leaf, feature in zip(leaves, plan.features, strict=True):
        stack = plan.stacks[feature.stack_index]
        if stack.name in tasks:
            ids = rows_of_ids(leaf, feature)
            shape = feature_shape(ids, feature, plan.num_shards)
            tasks[stack.name].append((stack, ids, shape, feature))
    all_tasks = [task for of_stack in tasks.values() for task in of_stack]
    rows_by_feature = iter(all_tasks and in_threads(_rows_by_shard, all_tasks))
    rows: dict[str, RowsOfShards] = {}
    for name, tasks_of_stack in tasks.items():
        # A dict batch may omit all features of a stack.
        nothing = [_NO_ROWS] * stack_of[name].num_shards
        by_feature = [next(rows_by_feature) for _ in tasks_of_stack] or [nothing]
        by_shard = list(zip(*by_feature, strict=True))
        rows[name] = list(in_threads(united_rows, by_shard))
    return rows


def united_rows(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Merges arrays that are each sorted and unique."""
    return rows[0] if len(rows) == 1 else unique_rows(rows)


def unique_rows(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Sorts and deduplicates int32 arrays of any shape. Drops `PADDING_ROW_ID`."""
    unique = _unique(np.concatenate([_NO_ROWS, *(x.reshape(-1) for x in rows)]))
    has_padding = len(unique) and unique[-1] == PADDING_ROW_ID
    return unique[:-1] if has_padding else unique


def _unique(values: np.ndarray) -> np.ndarray:
    """Sorts an array in place, and copies its distinct values."""
    # With vector instructions (AVX2 or newer), a sort takes 2 to 3 ns per value.
    # `np.unique` hashes, and takes 40 to 160 ns. Sorting slices in threads and merging
    # them is not faster.
    values.sort()
    is_first = np.empty(len(values), bool)
    is_first[:1] = True
    np.not_equal(values[1:], values[:-1], out=is_first[1:])
    return np.compress(is_first, values)


def _rows_by_shard(
    task: tuple[StackPlan, Any, FeatureShape, FeaturePlan],
) -> RowsOfShards:
    stack, ids, shape, feature = task
    rows = _rows_of_feature(jax.tree.map(_own_samples, ids), shape, feature)
    if stack.num_shards == 1:
        return [unique_rows([rows])]
    # One sort by (shard, local row) deduplicates the rows and splits them by owner.
    # Keys are unsigned, since a stack of 2**31 rows and its padding need 32 bits.
    rows = rows.view(np.uint32)
    num_shards, size = np.uint32(stack.num_shards), np.uint32(stack.rows_per_shard)
    local = rows // num_shards
    keys = _unique(local + (rows - local * num_shards) * size)
    starts = np.arange(stack.num_shards + 1, dtype=np.uint64) * size
    ends = np.searchsorted(keys, starts)
    return [
        (keys[begin:end] - start.astype(np.uint32)).view(np.int32)
        for begin, end, start in zip(ends, ends[1:], starts, strict=False)
    ]


def _own_samples(array: Any) -> Any:
    """Copies the samples on this process's devices to the host."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return array
    # By position, because several devices may hold the same samples, in any order.
    data = {x.index[0].start or 0: x.data for x in array.addressable_shards}
    return np.concatenate([np.asarray(data[start]) for start in sorted(data)])


def _rows_of_feature(ids: Any, shape: FeatureShape, feature: FeaturePlan) -> np.ndarray:
    """Lists the stack rows that a feature reads, int32, with duplicates."""
    values, weights, row_splits = _by_sample(ids, shape)
    if values.dtype.itemsize < 4:  # NumPy can't compare int4, for example.
        values = values.astype(np.int32)
    # Ids beyond int32 match no row, as in a lookup outside `jax.jit`. Inside `jax.jit`,
    # without `jax_enable_x64`, JAX truncates such ids before this library sees them, so
    # a lookup may read wrong rows. `prepare_features` replaces these ids.
    is_row = (values >= 0) & (values < feature.num_rows)
    if feature.config.out_of_range_ids == "clip" and not is_row.all():
        is_row = values != PADDING_ROW_ID  # Padding must not become the last row.
        values = np.clip(values, 0, feature.num_rows - 1)
    is_surely_row = is_row
    if weights is not None and leaves_out_weights(feature):
        with np.errstate(over="ignore", under="ignore"):
            weights = weights.astype(np.float32, copy=False)
        # CPUs and TPUs flush a weight below the smallest normal float32 to zero, and so
        # drop its id. Other devices may keep the id. So find both the id's row and the
        # default id's row, which the sample reads if it has no other ids. Comparisons
        # with NaN are false, so ids with a NaN weight are kept.
        is_surely_row = is_row & ~(weights < _SMALLEST_NORMAL)
        is_row = is_row & ~(weights <= 0)
    # `np.compress` is several times faster than `values[is_row]` for mixed padding.
    rows = values if is_row.all() else np.compress(is_row, values)
    if shape.default_id is not None:
        rows_before = np.zeros(values.size + 1, np.int32)
        np.cumsum(is_surely_row, dtype=np.int32, out=rows_before[1:])
        real_splits = row_splits[: shape.batch_size + 1]  # The rest is padding.
        if not np.diff(rows_before[real_splits]).all():
            # NumPy would promote uint64 ids and a Python int to float64.
            rows = np.append(rows, values.dtype.type(shape.default_id))
    return rows.astype(np.int32, copy=False) + np.int32(feature.row_offset)


def _by_sample(
    ids: Any, shape: FeatureShape
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Flattens ids in sample order, with their weights and row splits.

    Sequences are truncated to the feature's sequence length.
    """
    length = shape.sequence_length
    if not isinstance(ids, ShardedRaggedIds):
        num_samples = math.prod(batch_shape_of(ids))

        def flat(array: Any) -> np.ndarray:
            matrix = np.asarray(array).reshape(num_samples, -1)
            return (matrix[:, :length] if length else matrix).reshape(-1)

        values = flat(ids_of(ids))
        row_splits = values.size // num_samples * np.arange(num_samples + 1)
    else:
        splits_of_shards = np.asarray(ids.row_splits)
        ends = splits_of_shards[:, -1]

        def flat(array: Any) -> np.ndarray:
            shards = zip(np.asarray(array), ends, strict=True)
            return np.concatenate([shard[:end] for shard, end in shards])

        values = flat(ids.values)
        lengths = np.diff(splits_of_shards, axis=1).reshape(-1)
        row_splits = np.concatenate([[0], np.cumsum(lengths)])
        if length and lengths.max() > length:
            starts = np.repeat(row_splits[:-1], lengths)
            values = values[np.arange(values.size) - starts < length]
    # A sequence lookup ignores weights.
    weights = None if length else getattr(ids, "weights", None)
    return values, None if weights is None else flat(weights), row_splits
