"""Converts the ids of a parsed feature to the input of each shard.

Each shard gets consecutive samples. If the batch size is not a multiple of the number
of shards, samples without ids fill up the last shards. Their activations are cut off.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tpu_embedding.inputs.batch import FeatureShape
from tpu_embedding.lookup._forward import FeatureInput
from tpu_embedding.types import (
    PADDING_ROW_ID,
    AxisSize,
    DenseIds,
    FeatureIds,
    IdArray,
    ShardedRaggedIds,
    ids_of,
)
from tpu_embedding.xla import running_sum


def fill_up(ids: FeatureIds, num_shards: int) -> DenseIds | ShardedRaggedIds:
    """Returns int32 ids and float32 weights that can be split by shard. Global.

    Returns:
      Ragged ids in their form, or dense ids of shape
      `[padded batch, valence]`, with a valence of at least 1 and
      padding in the last shards. A call with such a result changes nothing.
    """
    values = _to_int32(ids_of(ids))
    axes = values.shape
    is_ragged = isinstance(ids, ShardedRaggedIds)
    values = values.reshape(
        (axes[0], 1) if len(axes) == 1 else (math.prod(axes[:-1]), axes[-1])
    )
    weights = getattr(ids, "weights", None)
    if weights is not None:
        weights = jnp.asarray(weights, jnp.float32).reshape(values.shape)
    if values.shape[1] == 0:
        # The ids have no positions, but the stages need at least one.
        values = jnp.full((values.shape[0], 1), PADDING_ROW_ID, jnp.int32)
        weights = None
    if is_ragged:
        row_splits = jnp.asarray(ids.row_splits)
        return dataclasses.replace(
            ids, values=values, weights=weights, row_splits=row_splits
        )
    num_samples = values.shape[0]
    missing = -(-num_samples // num_shards) * num_shards - num_samples
    room = ((0, missing), (0, 0))
    return DenseIds(
        ids=jnp.pad(values, room, constant_values=PADDING_ROW_ID),
        weights=None if weights is None else jnp.pad(weights, room),
    )


def to_feature_input(
    filled: DenseIds | ShardedRaggedIds,
    shape: FeatureShape,
    sample_axes: tuple[str, ...] = (),
) -> FeatureInput:
    """Converts the result of `fill_up` to a `FeatureInput`. Per shard.

    `sample_axes` are the mesh axes that split the samples. Without them, there is one
    shard.
    """
    if shape.sequence_length:
        return _to_sequences(filled, shape)
    ids: Any = ids_of(filled)
    weights: Any = filled.weights
    sample_ids, valence = None, 1
    num_samples = _num_samples_of(filled)
    if isinstance(filled, DenseIds):
        # The first ids of all samples come first, then the second ids, and so on.
        valence = ids.shape[1]
        ids, weights = ids.T, None if weights is None else weights.T
    else:
        ids, row_splits = ids.reshape(-1), filled.row_splits[0]
        sample_ids = sample_ids_of(row_splits, ids.shape[0])
        ids = jnp.where(sample_ids < num_samples, ids, PADDING_ROW_ID)
        if shape.default_id is not None:
            # Each sample gets an extra position for the default id.
            size = ids.shape[0] + num_samples
            positions = jnp.arange(ids.shape[0]) + sample_ids

            def move(array: Array, padding: int) -> Array:
                longer = jnp.full((size,), padding, array.dtype).at[positions]
                return longer.set(array, indices_are_sorted=True, unique_indices=True)

            ids = move(ids, PADDING_ROW_ID)
            if weights is not None:
                weights = move(weights.reshape(-1), 0)
            row_splits = row_splits + jnp.arange(row_splits.shape[0], dtype=jnp.int32)
            sample_ids = sample_ids_of(row_splits, size)
    is_sample = None
    num_shards = math.prod(map(jax.lax.axis_size, sample_axes))
    if shape.default_id is not None and num_shards * num_samples != shape.batch_size:
        # Padding samples get no default id.
        first = jax.lax.axis_index(sample_axes) * num_samples
        numbers = first + jnp.arange(num_samples, dtype=jnp.int32)
        is_sample = numbers < shape.batch_size
    return FeatureInput(
        ids=ids.reshape(-1),
        weights=None if weights is None else weights.reshape(-1),
        sample_ids=sample_ids,
        num_samples=num_samples,
        valence=valence,
        is_sample=is_sample,
    )


def _num_samples_of(filled: DenseIds | ShardedRaggedIds) -> AxisSize:
    """Returns the samples of a shard, padding included."""
    if isinstance(filled, DenseIds):
        return filled.ids.shape[0]
    return filled.row_splits.shape[1] - 1


def _to_sequences(
    filled: DenseIds | ShardedRaggedIds, shape: FeatureShape
) -> FeatureInput:
    """Pads or truncates samples to the length; each position becomes a sample."""
    num_samples, length = _num_samples_of(filled), shape.sequence_length
    ids = ids_of(filled)
    if isinstance(filled, DenseIds):
        missing = max(0, length - ids.shape[1])
        room = ((0, 0), (0, missing))
        ids = jnp.pad(ids[:, :length], room, constant_values=PADDING_ROW_ID)
    else:
        ids, row_splits = ids.reshape(-1), filled.row_splits[0]
        sample_ids = sample_ids_of(row_splits, ids.shape[0])
        positions = positions_of(row_splits, ids.shape[0])
        # Positions beyond the length would be in the next sample, so drop them.
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


def _to_int32(ids: IdArray) -> Array:
    """Converts ids of any integer type to int32.

    Ids that don't fit in int32 stay out of range at the same end, so clipping finds the
    right row. NumPy converts its own 64-bit ids, because JAX would truncate them.
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

    Positions past the last value get the number of samples.
    """
    ends = jnp.zeros((num_values,), jnp.int32).at[row_splits[1:]].add(1, mode="drop")
    return running_sum(ends)


def positions_of(row_splits: Array, num_values: AxisSize) -> Array:
    """Returns the position of each value in its sample."""
    starts = row_splits.at[sample_ids_of(row_splits, num_values)].get(mode="clip")
    return jnp.arange(num_values, dtype=jnp.int32) - starts
