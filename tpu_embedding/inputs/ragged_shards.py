"""Splits ragged ids by shard, and turns ids with coordinates into ragged ids.

Each shard gets `ceil(batch / num_shards)` consecutive samples. Empty samples fill up
the last shards, and padding fills each shard up to a static size.

Coordinates usually come in row-major order. A comparison of neighbours detects it. Only
other orders are sorted.
"""

import math
from typing import Any

import numpy as np

from tpu_embedding.inputs.buffer_sizes import RaggedDemand
from tpu_embedding.inputs.containers import MAX_SAMPLES
from tpu_embedding.inputs.shard_inputs import refuse_weighted_sequence
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.types import (
    DenseIds,
    RaggedIds,
    ShardedRaggedIds,
    SparseIds,
    padding_of,
)


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


def from_sparse(
    ids: SparseIds, weights: np.ndarray | None, feature: FeaturePlan
) -> RaggedIds | DenseIds:
    """Turns sparse ids into ragged ones, or into dense ones for sequences.

    In a sequence, the last coordinate is a position, so those between ids stay empty.
    Otherwise it only orders the ids of a sample.

    Args:
      ids: NumPy arrays that `read_ids` has checked; `values` are int32 or
        uint64, and checked.
      weights: float32 `[num_values]`, or None.
      feature: feature of the ids.

    Raises:
      ValueError: if a coordinate lies outside `dense_shape`, or two ids have one
        position of a sequence.
    """
    samples, positions = _coordinates(ids, feature)
    batch_size = math.prod(int(size) for size in ids.dense_shape[:-1])
    values = np.asarray(ids.values)
    length = feature.config.max_sequence_length
    if length:
        refuse_weighted_sequence(weights, feature)
        _refuse_many_samples(batch_size, length, feature)
        is_kept = positions < length
        flat = samples[is_kept] * np.int64(length) + positions[is_kept]
        _refuse_equal_positions(flat, length, feature)
        matrix = np.full(batch_size * length, padding_of(values.dtype))
        matrix[flat] = values[is_kept]
        return DenseIds(ids=matrix.reshape(batch_size, length))
    if not _is_row_major(samples, positions):
        order = np.lexsort((positions, samples))
        values = values[order]
        weights = None if weights is None else weights[order]
    row_splits = np.zeros(batch_size + 1, np.int64)
    np.cumsum(np.bincount(samples, minlength=batch_size), out=row_splits[1:])
    return RaggedIds(values=values, row_splits=row_splits, weights=weights)


def _coordinates(ids: SparseIds, feature: FeaturePlan) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sample of each id and its position there, both checked."""
    indices = np.asarray(ids.indices).astype(np.int64, copy=False)
    shape = [int(size) for size in ids.dense_shape]
    # As unsigned numbers, negative coordinates are large too.
    largest = indices.view(np.uint64)
    for axis, size in enumerate(shape):
        if len(indices) and largest[:, axis].max() >= size:
            _raise_outside(ids, shape, feature)
    # Copies of the columns, in fewer bits, are faster to compare than the columns.
    samples = indices[:, 0].astype(np.int32)
    for axis in range(1, len(shape) - 1):
        samples = samples * np.int32(shape[axis]) + indices[:, axis].astype(np.int32)
    fits_int32 = shape[-1] <= np.iinfo(np.int32).max
    positions = indices[:, -1].astype(np.int32 if fits_int32 else np.int64)
    return samples, positions


def _raise_outside(ids: SparseIds, shape: list[int], feature: FeaturePlan) -> None:
    indices = np.asarray(ids.indices)
    is_outside = ((indices < 0) | (indices >= np.asarray(shape))).any(axis=1)
    i = int(is_outside.argmax())
    raise ValueError(
        f"indices of feature {feature.name!r} must lie within dense_shape {shape}, got "
        f"{indices[i].tolist()} at value {i}."
    )


def _is_row_major(samples: np.ndarray, positions: np.ndarray) -> bool:
    before, after = samples[:-1], samples[1:]
    in_order = (after > before) | (positions[1:] >= positions[:-1])
    return bool(in_order.all()) and bool((after >= before).all())


def _refuse_many_samples(batch_size: int, length: int, feature: FeaturePlan) -> None:
    if batch_size * length > MAX_SAMPLES:
        raise ValueError(
            f"dense_shape of feature {feature.name!r}, a sequence of length {length}, "
            f"must have at most {MAX_SAMPLES // length} samples, got {batch_size}."
        )


def _refuse_equal_positions(
    flat: np.ndarray, length: int, feature: FeaturePlan
) -> None:
    if not (flat[1:] > flat[:-1]).all():
        flat = np.sort(flat)
    is_equal = flat[1:] == flat[:-1]
    if is_equal.any():
        first = int(flat[is_equal.argmax()])
        raise ValueError(
            f"indices of feature {feature.name!r}, a sequence, must be unique, got "
            f"sample {first // length} and position {first % length} "
            f"{(flat == first).sum()} times."
        )
