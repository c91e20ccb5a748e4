"""Finds, on the host, the rows that a batch's lookup reads.

The devices cache only some of these rows, so a batch's rows must be known before its
step runs. This module repeats in NumPy the rules of `inputs/shard_inputs.py` (padding,
truncated sequences) and `lookup/_forward.py` (ids outside the table, weights, default
ids). It makes few passes over the ids and compiles nothing. Tests compare its results
with the compiled stages.

This module can't predict the lookup in two cases:

* CPUs and TPUs flush weights below the smallest normal float32 to zero; other devices
  may not. A lookup may therefore drop an id with such a weight, and read the default
  row if the sample has no other ids. This module returns the id's row and the default
  row, which is a superset of the rows read.
* NumPy ids that don't fit in int32 count as outside their table, as in a lookup without
  `jax.jit`. With `jax.jit` and without `jax_enable_x64`, JAX truncates 64-bit arguments
  before this library sees them. `prepare_features` replaces such ids.
"""

from collections.abc import Collection
from typing import Any, Final

import numpy as np

from tpu_embedding.inputs.shard_inputs import FeatureShape, feature_shape
from tpu_embedding.lookup._forward import leaves_out_weights
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.transfers import moves_arrays
from tpu_embedding.types import PADDING_ROW_ID, ShardedRaggedIds, ids_of
from tpu_embedding.vocabularies import rows_of_ids

_SMALLEST_NORMAL: Final = np.finfo(np.float32).tiny


@moves_arrays
def rows_of_batch(
    features: Any, plan: EmbeddingPlan, stacks: Collection[str]
) -> dict[str, list[np.ndarray]]:
    """Returns the rows that a batch's lookup reads, for the given stacks.

    Args:
      features: global batch for `lookup`, prepared or not, as NumPy arrays or as JAX
        arrays that this process holds in full. Dicts may omit features.
      plan: plan of the layer.
      stacks: names of stacks. Features of other stacks are skipped.

    Returns:
      A dict from stack name to a list of int32 arrays `[rows read]`, one array for each
      of the batch's features in that stack. They hold stack rows in
      `[0, stack.num_rows)`, unordered, with duplicates and without padding. They don't
      share memory with the batch.

    Raises:
      TypeError, ValueError: if a feature's dtype, form or shape doesn't match its
        config, as in the lookup.

    Example:
      >>> import numpy as np
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
      >>> ids = {"watched": np.array([7, 10, 7])}  # 10 is outside the table
      >>> rows_of_batch(ids, plan, {"stack_0"})["stack_0"][0].tolist()
      [7, 7]
    """
    plan, leaves = plan.match(features)
    rows: dict[str, list[np.ndarray]] = {name: [] for name in stacks}
    for leaf, feature in zip(leaves, plan.features, strict=True):
        name = plan.stacks[feature.stack_index].name
        if name in rows:
            ids = rows_of_ids(leaf, feature)
            shape = feature_shape(ids, feature, plan.num_shards)
            rows[name].append(_rows_of_feature(ids, shape, feature))
    return rows


def _rows_of_feature(ids: Any, shape: FeatureShape, feature: FeaturePlan) -> np.ndarray:
    """Returns the stack rows that a feature reads, int32 `[rows read]`."""
    values, weights, row_splits = _by_sample(ids, shape)
    if values.dtype.itemsize < 4:  # NumPy can't compare int4, for example.
        values = values.astype(np.int32)
    is_row = (values >= 0) & (values < feature.num_rows)
    if feature.config.out_of_range_ids == "clip" and not is_row.all():
        is_row = values != PADDING_ROW_ID
        values = np.clip(values, 0, feature.num_rows - 1)
    is_surely_row = is_row
    if weights is not None and leaves_out_weights(feature):
        with np.errstate(over="ignore", under="ignore"):
            weights = weights.astype(np.float32, copy=False)
        # Comparisons with NaN are false, so ids with a NaN weight are kept.
        is_surely_row = is_row & ~(weights < _SMALLEST_NORMAL)
        is_row = is_row & ~(weights <= 0)
    # Several times faster than `values[is_row]` if padding is mixed in.
    rows = values if is_row.all() else np.compress(is_row, values)
    if shape.default_id is not None:
        rows_before = np.zeros(values.size + 1, np.int32)
        np.cumsum(is_surely_row, dtype=np.int32, out=rows_before[1:])
        real_splits = row_splits[: shape.batch_size + 1]  # The rest is padding.
        if not np.diff(rows_before[real_splits]).all():
            rows = np.append(rows, values.dtype.type(shape.default_id))
    return rows.astype(np.int32, copy=False) + np.int32(feature.row_offset)


def _by_sample(
    ids: Any, shape: FeatureShape
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Returns ids in sample order, their weights, and the row splits.

    Sequences are truncated to the feature's sequence length. Their weights are `None`,
    because a sequence lookup ignores weights.
    """
    length = shape.sequence_length
    if not isinstance(ids, ShardedRaggedIds):

        def flat(array: Any) -> np.ndarray:
            matrix = np.asarray(array).reshape(shape.batch_size, -1)
            return (matrix[:, :length] if length else matrix).reshape(-1)

        values = flat(ids_of(ids))
        valence = values.size // shape.batch_size
        row_splits = valence * np.arange(shape.batch_size + 1)
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
    weights = None if length else getattr(ids, "weights", None)
    return values, None if weights is None else flat(weights), row_splits
