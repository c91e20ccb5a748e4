"""Splits ragged ids by shard, and pads them to a static size.

Each shard gets `ceil(batch / num_shards)` consecutive samples. Empty samples fill up
the last shards.
"""

from typing import Any

import numpy as np

from tpu_embedding.inputs.buffer_sizes import RaggedDemand
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.types import RaggedIds, ShardedRaggedIds, padding_of


def demand_of(ids: RaggedIds, feature: FeaturePlan, num_shards: int) -> RaggedDemand:
    """Returns the facts that the size of a feature's buffer depends on.

    Args:
      ids: checked ids.
      feature: feature of the ids.
      num_shards: shards of the samples.
    """
    splits = _splits_of_shards(ids, num_shards)
    lengths = np.diff(np.asarray(ids.row_splits)).astype(np.float64)
    return RaggedDemand(
        feature_name=feature.name,
        expected_valence=feature.config.expected_valence,
        samples_per_shard=splits.shape[1] - 1,
        num_ids=int((splits[:, -1] - splits[:, 0]).max()),
        num_samples=lengths.shape[0],
        valence_sum=float(lengths.sum()),
        valence_square_sum=float(lengths @ lengths),
    )


def pad_to_shards(
    ids: RaggedIds, num_shards: int, size: int, num_parts: int
) -> ShardedRaggedIds:
    """Copies the ids of each shard into a buffer.

    Args:
      ids: int32 or uint64 ids, checked.
      num_shards: shards of the samples.
      size: entries of each buffer, at least the `num_ids` of the demand.
      num_parts: parts of the global batch, of which this is one.
    """
    splits = _splits_of_shards(ids, num_shards)
    bounds = np.append(splits[:, 0], splits[-1, -1])

    def padded(array: Any, padding: np.generic) -> np.ndarray:
        buffers = np.full((num_shards, size), padding)
        for buffer, begin, end in zip(buffers, bounds, bounds[1:], strict=False):
            buffer[: end - begin] = array[begin:end]
        return buffers

    values = np.asarray(ids.values)
    return ShardedRaggedIds(
        values=padded(values, padding_of(values.dtype)),
        row_splits=(splits - splits[:, :1]).astype(np.int32),
        weights=None if ids.weights is None else padded(ids.weights, np.float32(0)),
        batch_size=(len(np.asarray(ids.row_splits)) - 1) * num_parts,
    )


def _splits_of_shards(ids: RaggedIds, num_shards: int) -> np.ndarray:
    """Returns the row splits of each shard, int64 `[num_shards, samples + 1]`."""
    row_splits = np.asarray(ids.row_splits).astype(np.int64, copy=False)
    batch_size = row_splits.shape[0] - 1
    samples = -(-batch_size // num_shards)
    ends = np.arange(num_shards)[:, None] * samples + np.arange(samples + 1)
    return row_splits[np.minimum(ends, batch_size)]
