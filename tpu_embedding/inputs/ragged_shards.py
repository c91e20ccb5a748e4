"""Splits ragged ids by shard, and pads them to a static size."""

from typing import NamedTuple

import numpy as np

from tpu_embedding.inputs.buffer_sizes import RaggedDemand
from tpu_embedding.inputs.wide_ids import padding_of
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.types import RaggedIds, ShardedRaggedIds


class RaggedShards(NamedTuple):
    """The ids of a ragged feature, and the part of each shard.

    Attributes:
      values: int32 or uint64 `[num_values]`, checked.
      row_splits: int64 `[batch + 1]`.
      weights: float32 `[num_values]`, or None.
      first_samples: int64 `[num_shards + 1]`; shard `s` has the samples
        `first_samples[s]` to `first_samples[s + 1]`.
      samples_per_shard: the same for all shards; the last ones are filled up.
      min_valence: see `ShardedRaggedIds`.
      num_parts: parts of the global batch, of which this is one.
    """

    values: np.ndarray
    row_splits: np.ndarray
    weights: np.ndarray | None
    first_samples: np.ndarray
    samples_per_shard: int
    min_valence: int = 0
    num_parts: int = 1

    @classmethod
    def of(
        cls,
        ids: RaggedIds,
        num_shards: int,
        *,
        num_parts: int = 1,
        min_valence: int = 0,
    ) -> "RaggedShards":
        """Deals consecutive samples to the shards."""
        row_splits = np.asarray(ids.row_splits).astype(np.int64, copy=False)
        batch_size = row_splits.shape[0] - 1
        samples_per_shard = -(-batch_size // num_shards)
        first_samples = np.arange(num_shards + 1) * samples_per_shard
        return cls(
            values=np.asarray(ids.values),
            row_splits=row_splits,
            weights=None if ids.weights is None else np.asarray(ids.weights),
            first_samples=np.minimum(first_samples, batch_size),
            samples_per_shard=samples_per_shard,
            min_valence=min_valence,
            num_parts=num_parts,
        )

    def demand(self, feature: FeaturePlan) -> RaggedDemand:
        """Returns the facts that the size of the buffer depends on."""
        ids_per_shard = np.diff(self.row_splits[self.first_samples])
        lengths = np.diff(self.row_splits).astype(np.float64)
        return RaggedDemand(
            feature_name=feature.name,
            expected_valence=feature.config.expected_valence,
            samples_per_shard=self.samples_per_shard,
            num_ids=int(ids_per_shard.max()),
            num_samples=lengths.shape[0],
            valence_sum=float(lengths.sum()),
            valence_square_sum=float(lengths @ lengths),
        )

    def padded(self, size: int) -> ShardedRaggedIds:
        """Copies each shard's part into a buffer of `size` ids."""
        num_shards = self.first_samples.shape[0] - 1
        values = np.full((num_shards, size), padding_of(self.values.dtype))
        row_splits = np.empty((num_shards, self.samples_per_shard + 1), np.int32)
        weights = None
        if self.weights is not None:
            weights = np.zeros((num_shards, size), np.float32)
        for shard in range(num_shards):
            first, last = self.first_samples[shard], self.first_samples[shard + 1]
            begin, end = self.row_splits[first], self.row_splits[last]
            values[shard, : end - begin] = self.values[begin:end]
            if weights is not None:
                assert self.weights is not None
                weights[shard, : end - begin] = self.weights[begin:end]
            row_splits[shard, : last - first + 1] = (
                self.row_splits[first : last + 1] - begin
            )
            row_splits[shard, last - first + 1 :] = end - begin
        return ShardedRaggedIds(
            values=values,
            row_splits=row_splits,
            weights=weights,
            batch_size=(self.row_splits.shape[0] - 1) * self.num_parts,
            min_valence=self.min_valence,
        )
