"""Checks a batch on the host, and gives ragged features a static size.

Dense integer ids that lie inside their tables may enter a jitted step directly. This
module does what a jitted step cannot do: raise an error that names the feature and the
id, read 64-bit ids, and split ragged features by shard.
"""

from typing import Any

import jax
import numpy as np

from tpu_embedding.lookup._inputs import (
    as_dense_ids,
    check_dtypes,
    refuse_empty_batch,
    refuse_weighted_sequence,
)
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.types import (
    PADDING_ROW_ID,
    DenseIds,
    FeatureIds,
    RaggedIds,
    ShardedRaggedIds,
    SparseIds,
)

_SMALLEST_BUFFER = 8


def prepare_features(features: Any, plan: EmbeddingPlan, weights: Any = None) -> Any:
    """Checks the ids of a batch on the host and gives them static shapes.

    Ragged features are split by shard and padded. `FeatureConfig.expected_valence` sets
    the padded size in ids per sample. The size doubles until it holds the batch, so no
    id is lost. Each new size costs one more compilation.

    Args:
      features: nest like the plan's `feature_config`; leaves are integer arrays
        `[batch]` or `[batch, valence]` (unused places hold `PADDING_ROW_ID`),
        `DenseIds`, `RaggedIds` or `SparseIds`. Global; any integer dtype.
      plan: of the layer.
      weights: None, or the same nest with an array of weights, or None, per feature;
        for a ragged feature `[num_values]`.

    Returns:
      The nest with NumPy arrays: int32 ids and float32 weights. Pass it to the layer,
      or to `tpu_embedding.shard_batch` first.

    Raises:
      TypeError: if ids are no integers.
      ValueError: if the nest has another structure, an id lies outside its table and
        the feature's policy is `"error"`, or `row_splits` do not fit the values.

    Example:
      >>> import tpu_embedding as te
      >>> table = te.TableConfig(vocabulary_size=10, dim=4, name="movie")
      >>> plan = te.make_plan({"watched": te.FeatureConfig(table=table)})
      >>> ragged = te.RaggedIds(values=np.array([1, 2, 3]), row_splits=[0, 2, 3])
      >>> prepare_features({"watched": ragged}, plan)["watched"].batch_size
      2
    """
    leaves = plan.flatten(features)
    weight_leaves: list[Any] = [None] * len(leaves)
    if weights is not None:
        weight_leaves = plan.flatten(weights, "weights")
    prepared = [
        _prepare_feature(ids, weight, feature, plan)
        for ids, weight, feature in zip(
            leaves, weight_leaves, plan.features, strict=True
        )
    ]
    return jax.tree.unflatten(plan.feature_tree, prepared)


def shard_batch(batch: Any, plan: EmbeddingPlan) -> Any:
    """Puts a nest of arrays on the plan's devices, split along their first axis.

    An array whose first axis is no multiple of the number of devices is copied to each
    device. In a job of several processes, each process passes the same global batch and
    puts the shards of its own devices.
    """

    def place(array):
        array = _check_fits_int32(np.asarray(array))
        divides = array.ndim and array.shape[0] % plan.num_shards == 0
        sharding = plan.sharding if divides else plan.replicated
        if sharding.is_fully_addressable:
            return jax.device_put(array, sharding)
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    return jax.tree.map(place, batch)


def _check_fits_int32(array: np.ndarray) -> np.ndarray:
    """Refuses integers of which JAX would keep the lower half only."""
    is_wide = np.issubdtype(array.dtype, np.integer) and array.dtype.itemsize > 4
    if is_wide and array.size and not jax.config.read("jax_enable_x64"):
        low, high = array.min(), array.max()
        if low < np.iinfo(np.int32).min or high > np.iinfo(np.int32).max:
            raise ValueError(
                f"shard_batch got {array.dtype} values from {low} to {high}, which an "
                "int32 cannot hold; pass ids through prepare_features first."
            )
    return array


def _prepare_feature(
    ids: Any, weights: Any, feature: FeaturePlan, plan: EmbeddingPlan
) -> FeatureIds:
    if isinstance(ids, ShardedRaggedIds):
        raise TypeError(f"Feature {feature.name!r} has been prepared already.")
    if ids is None:
        raise ValueError(
            f"Feature {feature.name!r} is None; pass its ids, or leave it out of "
            "feature_config."
        )
    is_plain = not isinstance(ids, DenseIds | RaggedIds | SparseIds)
    ids = as_dense_ids(np.asarray(ids) if is_plain else ids)
    if weights is None:
        weights = ids.weights
    elif isinstance(weights, RaggedIds):
        weights = weights.values
    if weights is not None:
        weights = np.asarray(weights, np.float32)
        _check_weights(weights, feature)
    if isinstance(ids, SparseIds):
        ids, weights = _sort_sparse(ids, weights, feature)
    if isinstance(ids, RaggedIds):
        return _shard_ragged(ids, weights, feature, plan)
    assert isinstance(ids, DenseIds)
    matrix = np.asarray(ids.ids)
    check_dtypes(matrix, weights, feature)
    refuse_empty_batch(matrix, feature)
    checked = _check_range(matrix, feature, "position")
    if weights is None and is_plain:
        return checked
    return DenseIds(ids=checked, weights=weights)


def _sort_sparse(
    ids: SparseIds, weights: np.ndarray | None, feature: FeaturePlan
) -> tuple[RaggedIds | DenseIds, np.ndarray | None]:
    """Turns coordinates into a ragged feature, or into a dense one for sequences.

    In a sequence, the last coordinate is a position, so places between ids stay empty.
    Otherwise it only orders the ids of a sample.
    """
    indices, values = np.asarray(ids.indices), np.asarray(ids.values)
    shape = np.asarray(ids.dense_shape)
    if values.size == 0:
        values, indices = values.astype(np.int32), indices.reshape(0, shape.size)
    check_dtypes(values, weights, feature)
    _check_indices(indices, values, shape, feature)
    batch_size = int(np.prod(shape[:-1]))
    samples: Any = np.ravel_multi_index(tuple(indices[:, :-1].T), tuple(shape[:-1]))
    length = feature.config.max_sequence_length
    if length:
        refuse_weighted_sequence(weights, feature)
        is_kept = indices[:, -1] < length
        large = PADDING_ROW_ID - 1
        matrix = np.full((batch_size, length), PADDING_ROW_ID, np.int64)
        matrix[samples[is_kept], indices[is_kept, -1]] = np.where(
            values > PADDING_ROW_ID, large, values
        )[is_kept]
        return DenseIds(ids=matrix), weights
    order = np.lexsort((indices[:, -1], samples))
    row_splits = np.searchsorted(samples[order], np.arange(batch_size + 1))
    ragged = RaggedIds(values=values[order], row_splits=row_splits)
    return ragged, weights if weights is None else weights[order]


def _check_indices(
    indices: np.ndarray, values: np.ndarray, shape: np.ndarray, feature: FeaturePlan
) -> None:
    owner = f"feature {feature.name!r}"
    if indices.shape != (values.shape[0], shape.shape[0]) or shape.shape[0] < 2:
        raise ValueError(
            f"indices of {owner} must have shape [num_values, rank] with rank >= 2, "
            f"here ({values.shape[0]}, {shape.shape[0]}), got {indices.shape}."
        )
    is_outside = ((indices < 0) | (indices >= shape)).any(axis=1)
    if is_outside.any():
        i = int(np.flatnonzero(is_outside)[0])
        raise ValueError(
            f"indices of {owner} must lie within dense_shape {shape.tolist()}, got "
            f"{indices[i].tolist()} at value {i}."
        )
    unique, first, counts = np.unique(
        indices, axis=0, return_index=True, return_counts=True
    )
    if feature.config.max_sequence_length and (counts > 1).any():
        i = int(np.flatnonzero(counts > 1)[0])
        raise ValueError(
            f"indices of {owner}, a sequence, must be unique, got "
            f"{unique[i].tolist()} {counts[i]} times, first at value {first[i]}."
        )


def _check_weights(weights: np.ndarray, feature: FeaturePlan) -> None:
    is_bad = ~np.isfinite(weights)
    if is_bad.any():
        place = tuple(int(i) for i in np.argwhere(is_bad)[0])
        raise ValueError(
            f"Weights of feature {feature.name!r} must be finite, got "
            f"{weights[place]} at {place}."
        )


def _check_range(ids: np.ndarray, feature: FeaturePlan, where: str) -> np.ndarray:
    """Returns the ids as int32.

    Ids that no int32 holds become -1, or too large an id for the policy `"clip"`.
    """
    vocabulary_size = feature.table.vocabulary_size
    policy = feature.config.out_of_range_ids
    is_outside = ((ids < 0) | (ids >= vocabulary_size)) & (ids != PADDING_ROW_ID)
    if policy == "error" and is_outside.any():
        place = tuple(int(i) for i in np.argwhere(is_outside)[0])
        raise ValueError(
            f"Ids of feature {feature.name!r} must lie in [0, {vocabulary_size}), the "
            f"rows of its table, got {ids[place]} at {where} {place}, and "
            f"{int(is_outside.sum())} such ids in all. Correct the data, or set "
            "FeatureConfig.out_of_range_ids to 'drop' or 'clip'."
        )
    # The conversion would wrap ids that an int32 cannot hold. Replace them first.
    is_foreign = (ids < 0) | (ids > PADDING_ROW_ID)
    replacement = np.where(ids < 0, -1, -1 if policy != "clip" else vocabulary_size)
    kept = np.where(is_foreign, 0, ids).astype(np.int32)
    return np.where(is_foreign, replacement, kept).astype(np.int32)


def _shard_ragged(
    ids: RaggedIds,
    weights: np.ndarray | None,
    feature: FeaturePlan,
    plan: EmbeddingPlan,
) -> ShardedRaggedIds:
    values, row_splits = np.asarray(ids.values), np.asarray(ids.row_splits)
    if values.size == 0:
        values = values.astype(np.int32)
    check_dtypes(values, weights, feature)
    _check_row_splits(row_splits, values, feature)
    values = _check_range(values, feature, "value")
    batch_size = row_splits.shape[0] - 1
    samples_per_shard = -(-batch_size // plan.num_shards)
    cuts = np.minimum(np.arange(plan.num_shards + 1) * samples_per_shard, batch_size)
    starts = row_splits[cuts]
    size = _buffer_size(int(np.diff(starts).max()), samples_per_shard, feature)

    sharded_values = np.full((plan.num_shards, size), PADDING_ROW_ID, np.int32)
    sharded_weights = np.zeros((plan.num_shards, size), np.float32)
    sharded_splits = np.empty((plan.num_shards, samples_per_shard + 1), np.int32)
    for shard in range(plan.num_shards):
        begin, end = starts[shard], starts[shard + 1]
        sharded_values[shard, : end - begin] = values[begin:end]
        if weights is not None:
            sharded_weights[shard, : end - begin] = weights[begin:end]
        splits = row_splits[cuts[shard] : cuts[shard + 1] + 1] - begin
        sharded_splits[shard, : splits.shape[0]] = splits
        sharded_splits[shard, splits.shape[0] :] = end - begin
    return ShardedRaggedIds(
        values=sharded_values,
        row_splits=sharded_splits,
        weights=None if weights is None else sharded_weights,
        batch_size=batch_size,
    )


def _check_row_splits(
    row_splits: np.ndarray, values: np.ndarray, feature: FeaturePlan
) -> None:
    owner = f"row_splits of feature {feature.name!r}"
    if row_splits.ndim != 1 or row_splits.shape[0] < 2:
        raise ValueError(
            f"{owner} must have shape [batch + 1] with at least one sample, got "
            f"{row_splits.shape}."
        )
    if not np.issubdtype(row_splits.dtype, np.integer):
        raise TypeError(f"{owner} must be integers, got dtype {row_splits.dtype}.")
    if values.ndim != 1:
        raise ValueError(
            f"values of feature {feature.name!r} must have one axis, got shape "
            f"{values.shape}."
        )
    if row_splits[0] != 0 or row_splits[-1] != values.shape[0]:
        raise ValueError(
            f"{owner} must begin with 0 and end with the number of values, "
            f"{values.shape[0]}, got {row_splits[0]} and {row_splits[-1]}."
        )
    falls = np.flatnonzero(row_splits[1:] < row_splits[:-1])
    if falls.size:
        i = int(falls[0])
        raise ValueError(
            f"{owner} must not fall, got {row_splits[i]} and then {row_splits[i + 1]} "
            f"at sample {i}."
        )


def _buffer_size(needed: int, samples_per_shard: int, feature: FeaturePlan) -> int:
    size = _SMALLEST_BUFFER
    if feature.config.expected_valence is not None:
        size = max(1, round(feature.config.expected_valence * samples_per_shard))
    while size < needed:
        size *= 2
    return size
