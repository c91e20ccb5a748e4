"""Converts the ids that the user passes into the input of each shard.

Each shard gets consecutive samples. If the batch size is no multiple of the number of
shards, samples without ids fill up the last shards. Their activations are cut off.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tpu_embedding.inputs.containers import is_integer, is_real
from tpu_embedding.lookup._forward import FeatureInput
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.plan.plan import AnyPlan, EmbeddingPlan
from tpu_embedding.types import (
    PADDING_ROW_ID,
    AxisSize,
    DenseIds,
    FeatureIds,
    IdArray,
    RaggedIds,
    ShardedRaggedIds,
    SparseIds,
    ids_of,
)
from tpu_embedding.xla import running_sum


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureShape:
    """The sizes of one feature in one batch.

    Attributes:
      batch_size: samples of the batch.
      samples_per_shard: samples of each shard, after filling up.
      sequence_length: ids of a sample that are looked up one by one; 0: the ids of a
        sample are combined.
      output_shape: shape of the activations, `dim` included.
      default_id: row of samples without ids, or None.
    """

    batch_size: AxisSize
    samples_per_shard: AxisSize
    sequence_length: int
    output_shape: tuple[AxisSize, ...]
    default_id: int | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardableInput:
    """A feature whose arrays can be split by shard along their first axis.

    Attributes:
      ids: int32, dense `[num_shards * samples_per_shard, valence]` or ragged
        `[num_shards, values_per_shard]`. Global, or per shard inside `shard_map`.
      weights: float32 like `ids`, or None.
      row_splits: int32 `[num_shards, samples_per_shard + 1]`; None if dense.
      is_sample: bool `[num_shards * samples_per_shard]`, as in `FeatureInput`.
    """

    ids: Array
    weights: Array | None
    row_splits: Array | None
    is_sample: Array | None = None


def attach_weights(features: Any, weights: Any, plan: EmbeddingPlan) -> Any:
    """Joins a nest of dense ids with the same nest of weights.

    Raises:
      TypeError: if a feature with weights is ragged.
    """
    joined = []
    plan = plan.for_batch(features)
    leaves = plan.flatten(features)
    for ids, weight, feature in zip(
        leaves, plan.flatten(weights, "weights"), plan.features, strict=True
    ):
        if weight is None:
            joined.append(ids)
            continue
        if isinstance(ids, RaggedIds | SparseIds | ShardedRaggedIds):
            raise TypeError(
                f"Weights of the ragged feature {feature.name!r} must be given to "
                "prepare, together with its ids."
            )
        joined.append(DenseIds(ids=ids_of(ids), weights=weight))
    return jax.tree.unflatten(plan.feature_tree, joined)


def feature_shape(ids: FeatureIds, feature: FeaturePlan, plan: AnyPlan) -> FeatureShape:
    """Returns the sizes of a feature. It reads shapes and dtypes only.

    Raises:
      TypeError: if the ids are no integers, or ragged ids were not prepared.
      ValueError: if the shape of the ids does not fit the feature's configuration.
    """
    if isinstance(ids, RaggedIds | SparseIds):
        raise TypeError(
            f"Feature {feature.name!r} is a {type(ids).__name__}, whose size changes "
            "from batch to batch; pass the batch through "
            "tpu_embedding.inputs.prepare_features on the host first."
        )
    values, weights = ids_of(ids), _weights_of(ids)
    check_dtypes(values, weights, feature)
    batch_size = _batch_size(ids, values, feature, plan)
    is_ragged = isinstance(ids, ShardedRaggedIds)
    length = _sequence_length(values, batch_size, is_ragged, feature)
    config = feature.config
    leading = config.output_shape
    if leading is None or config.has_own_batch:
        leading = (batch_size, length) if length else (batch_size,)
    return FeatureShape(
        batch_size=batch_size,
        samples_per_shard=-(-batch_size // plan.num_shards),
        sequence_length=length,
        output_shape=(*leading, feature.table.dim),
        default_id=config.default_id,
    )


def refuse_unequal_batches(sizes: Iterable[tuple[FeaturePlan, AxisSize]]) -> None:
    """Raises a ValueError for features of unequal batches without an output shape.

    Args:
      sizes: each feature and its number of samples. Sizes that only the run of an
        exported program knows are not compared.
    """
    known = {
        feature.name: size
        for feature, size in sizes
        if feature.config.output_shape is None and isinstance(size, int)
    }
    if len(set(known.values())) > 1:
        first, *others = known
        unequal = [name for name in others if known[name] != known[first]]
        raise ValueError(
            f"Features must have the same number of samples, got {known[first]} for "
            f"feature {first!r} and {known[unequal[0]]} for feature {unequal[0]!r}; "
            f"features that differ from {first!r}: {unequal}. Set "
            "FeatureConfig.output_shape of a feature whose number is meant to differ."
        )


def refuse_weighted_sequence(weights: Any, feature: FeaturePlan) -> None:
    """Raises a ValueError for weights of a sequence, which would have no effect."""
    if weights is not None and feature.config.max_sequence_length:
        raise ValueError(
            f"Feature {feature.name!r} has weights and max_sequence_length="
            f"{feature.config.max_sequence_length}: a sequence is not combined, so "
            "weights have no effect. Leave one of them out."
        )


def _weights_of(ids: FeatureIds) -> IdArray | None:
    """Returns the weights of a feature with a static shape."""
    return ids.weights if isinstance(ids, DenseIds | ShardedRaggedIds) else None


def _matrix_shape(ids: Any) -> tuple[AxisSize, AxisSize]:
    """Returns the number of samples and of ids per sample, which is the last axis.

    Ids of one axis have one id per sample.
    """
    if ids.ndim == 1:
        return ids.shape[0], 1
    return math.prod(ids.shape[:-1]), ids.shape[-1]


def check_dtypes(ids, weights, feature: FeaturePlan) -> None:
    """Rejects ids that are not integers, and weights of another shape.

    Raises:
      TypeError: if the ids are no array of integers.
      ValueError: if the ids are a scalar, or weights have another shape than the ids,
        or belong to a sequence.
    """
    if not hasattr(ids, "dtype"):
        raise TypeError(
            f"Ids of feature {feature.name!r} must be an array, got {ids!r}; "
            "layer.prepare(features) takes lists."
        )
    if isinstance(ids, np.ma.MaskedArray) or isinstance(weights, np.ma.MaskedArray):
        raise TypeError(
            f"Feature {feature.name!r} is a masked array, whose mask a step cannot "
            "read; pass the batch through prepare first."
        )
    if not is_integer(ids.dtype):
        raise TypeError(
            f"Ids of feature {feature.name!r} must be integers, got dtype {ids.dtype}; "
            f"{_way_to_integers(ids, feature)}."
        )
    if ids.ndim == 0:
        raise ValueError(
            f"Ids of feature {feature.name!r} must have a batch axis, got a scalar."
        )
    if weights is None:
        return
    if not hasattr(weights, "dtype"):
        raise TypeError(
            f"Weights of feature {feature.name!r} must be an array, got "
            f"{type(weights).__name__}; pass other forms to prepare."
        )
    if not is_real(weights.dtype):
        raise TypeError(
            f"Weights of feature {feature.name!r} must be real numbers, got dtype "
            f"{weights.dtype}."
        )
    refuse_weighted_sequence(weights, feature)
    if weights.shape != ids.shape:
        raise ValueError(
            f"Weights of feature {feature.name!r} must have the shape of its ids, "
            f"{ids.shape}, got {weights.shape}."
        )


def _way_to_integers(ids: Any, feature: FeaturePlan) -> str:
    """Returns the way from ids of another dtype to integers, for errors."""
    kind = getattr(ids.dtype, "kind", "")
    way = feature.inputs.text_to_ids
    if kind in ("S", "U", "T"):
        return f"turn strings into ids with {way}"
    if kind == "O":
        values = ids.ravel().tolist()
        example = next((x for x in values if not isinstance(x, int)), values[:1])
        return f"they hold {example!r}; strings need {way}"
    return "convert them with .astype(int) if they are whole numbers"


def to_shardable(ids: FeatureIds, shape: FeatureShape, plan: AnyPlan) -> ShardableInput:
    """Fills up the batch to a multiple of the number of shards. Global."""
    is_ragged = isinstance(ids, ShardedRaggedIds)
    matrix = _to_int32(ids_of(ids))
    matrix = matrix.reshape(_matrix_shape(matrix))
    weights = _weights_of(ids)
    if weights is not None:
        weights = jnp.asarray(weights, jnp.float32).reshape(matrix.shape)
    if matrix.shape[1] == 0:
        # No position for an id; the stages want at least one.
        matrix = jnp.full((matrix.shape[0], 1), PADDING_ROW_ID, jnp.int32)
        weights = None
    missing = plan.num_shards * shape.samples_per_shard - shape.batch_size
    is_sample = None
    if missing and shape.default_id is not None:
        is_sample = jnp.arange(shape.batch_size + missing) < shape.batch_size
    if not is_ragged:
        room = ((0, missing), (0, 0))
        matrix = jnp.pad(matrix, room, constant_values=PADDING_ROW_ID)
        weights = None if weights is None else jnp.pad(weights, room)
    return ShardableInput(
        ids=matrix,
        weights=weights,
        row_splits=jnp.asarray(ids.row_splits) if is_ragged else None,
        is_sample=is_sample,
    )


def to_feature_input(shardable: ShardableInput, shape: FeatureShape) -> FeatureInput:
    """Converts a feature into the input of the stages. Per shard."""
    if shape.sequence_length:
        return _to_sequences(shardable, shape)
    ids, weights = shardable.ids, shardable.weights
    sample_ids = None
    if shardable.row_splits is None:
        # The first ids of all samples, then the second ones, and so on.
        ids, weights = ids.T, None if weights is None else weights.T
    else:
        ids, row_splits = ids.reshape(-1), shardable.row_splits[0]
        sample_ids = sample_ids_of(row_splits, ids.shape[0])
        ids = jnp.where(sample_ids < shape.samples_per_shard, ids, PADDING_ROW_ID)
        if shape.default_id is not None:
            # Each sample gets one more position, which the default id may take.
            size = ids.shape[0] + shape.samples_per_shard
            positions = jnp.arange(ids.shape[0]) + sample_ids
            ids = _spread(ids, positions, size, PADDING_ROW_ID)
            if weights is not None:
                weights = _spread(weights.reshape(-1), positions, size, 0)
            row_splits = row_splits + jnp.arange(row_splits.shape[0], dtype=jnp.int32)
            sample_ids = sample_ids_of(row_splits, size)
    return FeatureInput(
        ids=ids.reshape(-1),
        weights=None if weights is None else weights.reshape(-1),
        sample_ids=sample_ids,
        num_samples=shape.samples_per_shard,
        valence=shardable.ids.shape[1] if sample_ids is None else 1,
        is_sample=shardable.is_sample,
    )


def _spread(array: Array, positions: Array, size: AxisSize, padding: int) -> Array:
    """Puts elements into positions of a longer array; the positions rise."""
    return (
        jnp.full((size,), padding, array.dtype)
        .at[positions]
        .set(array, indices_are_sorted=True, unique_indices=True)
    )


def _to_sequences(shardable: ShardableInput, shape: FeatureShape) -> FeatureInput:
    """Cuts or fills up each sample to the length; each position becomes a sample."""
    num_samples, length = shape.samples_per_shard, shape.sequence_length
    ids = shardable.ids
    if shardable.row_splits is None:
        missing = max(0, length - ids.shape[1])
        room = ((0, 0), (0, missing))
        ids = jnp.pad(ids[:, :length], room, constant_values=PADDING_ROW_ID)
    else:
        ids, row_splits = ids.reshape(-1), shardable.row_splits[0]
        sample_ids = sample_ids_of(row_splits, ids.shape[0])
        positions = positions_of(row_splits, ids.shape[0])
        # Positions beyond the length would fall into the next sample.
        starts = jnp.where(positions < length, sample_ids, num_samples) * length
        sequences = jnp.full((num_samples * length,), PADDING_ROW_ID, jnp.int32)
        ids = sequences.at[starts + positions].set(ids, mode="drop")
    return FeatureInput(
        ids=ids.reshape(-1),
        weights=None,
        sample_ids=None,
        num_samples=num_samples * length,
        valence=1,
    )


def _batch_size(
    ids: FeatureIds, values: Any, feature: FeaturePlan, plan: AnyPlan
) -> AxisSize:
    """Returns the samples of a batch.

    Raises:
      ValueError: if there is none, or the ids were prepared for other shards.
    """
    batch_size, _ = _matrix_shape(values)
    if isinstance(ids, ShardedRaggedIds):
        batch_size = ids.batch_size
        if values.shape[0] != plan.num_shards:
            raise ValueError(
                f"Feature {feature.name!r} was prepared for {values.shape[0]} shards, "
                f"but its layer has {plan.num_shards}; prepare it with that layer's "
                "plan."
            )
    if batch_size == 0:
        raise ValueError(
            f"Feature {feature.name!r} must have at least one sample, got ids of shape "
            f"{values.shape}."
        )
    return batch_size


def _sequence_length(
    ids: Any, batch_size: AxisSize, is_ragged: bool, feature: FeaturePlan
) -> int:
    """Returns the length of a sample's sequence; 0 if its ids are combined.

    Raises:
      ValueError: if the shape of the ids does not fit the feature's configuration.
    """
    config = feature.config
    if config.output_shape is None or config.has_own_batch:
        if config.max_sequence_length and ids.ndim == 1:
            raise ValueError(
                f"Feature {feature.name!r} has max_sequence_length="
                f"{config.max_sequence_length}, so its ids must be ragged or of shape "
                f"[batch, valence], got shape {ids.shape}."
            )
        if ids.ndim > 2:
            raise ValueError(
                f"Ids of feature {feature.name!r} must be ragged or have shape [batch] "
                f"or [batch, valence], got {ids.shape}; set FeatureConfig.output_shape "
                f"to {ids.shape[:-1]} to combine the last axis, or to the shape itself "
                "to look up each id without combining."
            )
        return config.max_sequence_length
    num_outputs = math.prod(config.output_shape)
    if num_outputs == batch_size:
        return 0
    is_deep = ids.ndim > 2 and not is_ragged
    if num_outputs % batch_size or (is_deep and num_outputs != math.prod(ids.shape)):
        raise ValueError(
            f"FeatureConfig.output_shape of feature {feature.name!r} must hold the "
            f"{batch_size} samples of its ids, or a multiple of them, got "
            f"{config.output_shape} for ids of shape {ids.shape}."
        )
    if config.default_id is not None:
        raise ValueError(
            f"FeatureConfig.default_id of feature {feature.name!r} is for samples that "
            f"are combined, got {config.default_id} with output_shape="
            f"{config.output_shape}, which makes sequences."
        )
    return num_outputs // batch_size


def _to_int32(ids: IdArray) -> Array:
    """Converts ids of any integer type to int32.

    Ids that an int32 cannot hold stay out of range. They also stay too small or too
    large, so that clipping finds the right end. NumPy converts its own 64-bit ids,
    because JAX would keep their lower half only.
    """
    if np.dtype(ids.dtype).itemsize < 4 or ids.dtype == np.int32:
        return jnp.asarray(ids, np.int32)
    xp = np if isinstance(ids, np.ndarray) else jnp
    is_large = ids > PADDING_ROW_ID
    fits = (ids >= 0) & ~is_large
    outside = xp.where(is_large, PADDING_ROW_ID - 1, -1)
    return jnp.asarray(xp.where(fits, ids.astype(np.int32), outside), np.int32)


def sample_ids_of(row_splits: Array, num_values: AxisSize) -> Array:
    """Returns the sample of each value.

    Positions behind the last value get the number of samples.
    """
    ends = jnp.zeros((num_values,), jnp.int32).at[row_splits[1:]].add(1, mode="drop")
    return running_sum(ends)


def positions_of(row_splits: Array, num_values: AxisSize) -> Array:
    """Returns the position of each value in its sample."""
    starts = row_splits.at[sample_ids_of(row_splits, num_values)].get(mode="clip")
    return jnp.arange(num_values, dtype=jnp.int32) - starts
