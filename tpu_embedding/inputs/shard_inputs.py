"""Parses a batch, and converts its features to the input of each shard.

Each function that takes a batch calls `parse_batch` first, and passes on the `Batch`.
Each shard gets consecutive samples. Samples without ids fill up the last shards, and
their activations are cut off.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tpu_embedding.argument_checks import invalid
from tpu_embedding.inputs.containers import check_unmasked
from tpu_embedding.lookup._forward import FeatureInput
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.types import (
    PADDING_ROW_ID,
    AxisSize,
    DenseIds,
    FeatureIds,
    IdArray,
    RaggedIds,
    ShardedRaggedIds,
    SparseIds,
    batch_shape_of,
    ids_of,
    is_integer,
)
from tpu_embedding.vocabularies import needs_rows, rows_of_ids, unknown_rows
from tpu_embedding.xla import running_sum


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureShape:
    """The sizes of one feature in one batch."""

    batch_size: AxisSize
    # Ids per sample that are looked up one by one. 0 means that they are combined.
    sequence_length: int
    output_shape: tuple[AxisSize, ...]  # Its last axis is `dim`.
    default_id: int | None = None  # Row for samples without ids.

    @property
    def num_rows(self) -> AxisSize:
        """Activation rows: one per sample, or one per sequence position."""
        return self.batch_size * max(1, self.sequence_length)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """A parsed batch, with one entry per feature in plan order."""

    plan: EmbeddingPlan  # Has only the features in the batch.
    leaves: list[Any]  # Ids as the user passed them, with their weights.
    ids: list[Any]  # Row numbers, or the leaf if the feature needs `find_rows`.
    shapes: tuple[FeatureShape, ...]
    raw_feature: FeaturePlan | None  # The first feature that needs `find_rows`.

    def row_numbers(self) -> list[Any]:
        """Lists row numbers by feature. Raises if a feature needs `find_rows`."""
        if self.raw_feature is not None:
            raise unknown_rows(self.raw_feature)
        return self.ids


def parse_batch(
    features: Any, plan: EmbeddingPlan, weights: Any = None, *, serving: bool = False
) -> Batch:
    """Parses the arguments to a lookup, unless they are already a `Batch`."""
    # Exported programs (`serving`) have one shard, and each feature may have its own
    # batch size.
    if isinstance(features, Batch):
        return features
    plan, leaves = plan.match(features)
    if weights is not None:
        weight_leaves = plan.flatten(weights, "weights")
        leaves = list(map(_with_weights, leaves, weight_leaves, plan.features))
    num_shards = 1 if serving else plan.num_shards
    ids, shapes, raw_feature = [], [], None
    for leaf, feature in zip(leaves, plan.features, strict=True):
        if not needs_rows(leaf, feature):
            leaf = rows_of_ids(leaf, feature)
        elif raw_feature is None:
            raw_feature = feature  # No error yet: the caller may find the rows.
        ids.append(leaf)
        shapes.append(feature_shape(leaf, feature, num_shards))
    if not serving:
        check_equal_batches(shapes, plan.features)
    return Batch(
        plan=plan,
        leaves=leaves,
        ids=ids,
        shapes=tuple(shapes),
        raw_feature=raw_feature,
    )


def _with_weights(ids: Any, weights: Any, feature: FeaturePlan) -> Any:
    if weights is None:
        return ids
    if isinstance(ids, RaggedIds | SparseIds | ShardedRaggedIds):
        name = f"Weights of ragged feature {feature.name!r}"
        rule = "be passed to prepare, together with its ids"
        raise invalid(name, rule, weights, kind=TypeError)
    return DenseIds(ids=ids_of(ids), weights=weights)


def feature_shape(ids: Any, feature: FeaturePlan, num_shards: int) -> FeatureShape:
    check_prepared(ids, feature)
    shape = checked_shape(ids, feature)
    if isinstance(ids, ShardedRaggedIds) and ids.values.shape[0] != num_shards:
        rule = f"be prepared with the layer's plan, for {num_shards} shards"
        raise invalid(f"Feature {feature.name!r}", rule, ids.values.shape[0])
    return shape


def check_prepared(ids: Any, feature: FeaturePlan) -> None:
    """Rejects ids without a static shape."""
    if isinstance(ids, RaggedIds | SparseIds):
        fix = "Pass the batch through te.inputs.prepare_features on the host first."
        rule = "have the same size in each batch"
        raise invalid(f"Feature {feature.name!r}", rule, ids, fix, TypeError)


def checked_shape(ids: Any, feature: FeaturePlan) -> FeatureShape:
    """Checks shapes and dtypes, on the host or in a lookup, and finds the sizes."""
    values, config = ids_of(ids), feature.config
    name = f"Ids of feature {feature.name!r}"
    _check_ids(values, feature)
    weights = getattr(ids, "weights", None)
    if weights is not None:
        _check_weights(weights, values.shape, feature)
    is_dense = not isinstance(ids, RaggedIds | SparseIds | ShardedRaggedIds)
    batch_shape = batch_shape_of(ids)
    batch_size = math.prod(batch_shape)
    if batch_size == 0:
        raise invalid(name, "have at least one sample", list(batch_shape))
    if config.output_shape is None and len(batch_shape) > 1:
        raise invalid(
            name,
            "have one axis of samples",
            list(batch_shape),
            f"Set FeatureConfig.output_shape to {batch_shape} to combine the ids of "
            "each sample, or to the whole shape of the ids to look up each id.",
        )
    length = config.max_sequence_length
    if config.output_shape is None or config.has_own_batch:
        if length and is_dense and values.ndim == 1:
            rule = f"be ragged or [batch, valence] for max_sequence_length={length}"
            raise invalid(name, rule, values)
        output_shape = (batch_size, length) if length else (batch_size,)
    else:
        output_shape = config.output_shape
        # One output per sample means that ids are combined. Several mean a sequence.
        num_outputs = math.prod(output_shape)
        length = 0 if num_outputs == batch_size else num_outputs // batch_size
        # Ids with more than two axes must be combined, or all looked up one by one.
        has_deep_ids = is_dense and values.ndim > 2
        if num_outputs % batch_size or (
            length and has_deep_ids and num_outputs != math.prod(values.shape)
        ):
            rule = f"hold the {batch_size} samples of its ids, or a multiple of them, "
            rule += f"for ids of shape {list(values.shape)}"
            field = f"FeatureConfig.output_shape of feature {feature.name!r}"
            raise invalid(field, rule, list(output_shape))
        if length and config.default_id is not None:
            rule = f"be None, because output_shape={output_shape} makes sequences"
            field = f"FeatureConfig.default_id of feature {feature.name!r}"
            raise invalid(field, rule, config.default_id)
    return FeatureShape(
        batch_size=batch_size,
        sequence_length=length,
        output_shape=(*output_shape, feature.table.dim),
        default_id=config.default_id,
    )


def check_equal_batches(
    shapes: Sequence[FeatureShape], features: Sequence[FeaturePlan]
) -> None:
    # Symbolic sizes in exported programs can't be compared.
    known = {
        feature.name: shape.batch_size
        for shape, feature in zip(shapes, features, strict=True)
        if feature.config.output_shape is None and isinstance(shape.batch_size, int)
    }
    first = next(iter(known), "")
    if unequal := [name for name, size in known.items() if size != known[first]]:
        raise invalid(
            f"Samples of feature {unequal[0]!r}",
            f"be {known[first]}, as many as feature {first!r} has",
            known[unequal[0]],
            f"Features that differ from {first!r}: {unequal}. Set "
            "FeatureConfig.output_shape if a feature's number should differ.",
        )


def _check_ids(ids: Any, feature: FeaturePlan) -> None:
    # A dtype isn't enough, because pandas Series and PyTorch tensors also have one.
    arrays = np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct
    is_read = all(isinstance(leaf, arrays) for leaf in jax.tree.leaves(ids))
    field = f"Ids of feature {feature.name!r}"
    if not is_read or not hasattr(ids, "dtype"):
        fix = "layer.prepare(features) takes lists and other arrays."
        raise invalid(field, "be a NumPy or JAX array", ids, fix, TypeError)
    check_unmasked(type(ids), field)
    if not is_integer(ids.dtype):
        fix = "Convert them with .astype(int) if they are whole numbers."
        kind = getattr(ids.dtype, "kind", "")
        if kind in ("S", "U", "T"):
            fix = f"Turn strings into ids with {feature.inputs.text_to_ids}."
        elif kind == "O":
            values = ids.ravel().tolist()
            example = next((v for v in values if not isinstance(v, int)), values[:1])
            fix = f"They hold {example!r}. Strings need {feature.inputs.text_to_ids}."
        raise invalid(field, "be integers", ids, fix, TypeError)
    if ids.ndim == 0:
        raise invalid(field, "have a batch axis", ids)


def _check_weights(
    weights: Any, shape: tuple[AxisSize, ...], feature: FeaturePlan
) -> None:
    field = f"Weights of feature {feature.name!r}"
    if not hasattr(weights, "dtype"):
        fix = "Pass other forms through prepare."
        raise invalid(field, "be an array", weights, fix, TypeError)
    check_unmasked(type(weights), field)
    is_float = jnp.issubdtype(weights.dtype, np.floating)
    if not (is_float or weights.dtype == bool or is_integer(weights.dtype)):
        raise invalid(field, "be real numbers", weights, kind=TypeError)
    if length := feature.config.max_sequence_length:
        rule = f"be None, because max_sequence_length={length} combines no ids"
        raise invalid(field, rule, weights)
    if weights.shape != shape:
        raise invalid(field, f"have the shape of its ids, {list(shape)}", weights)


def fill_up(ids: FeatureIds, num_shards: int) -> DenseIds | ShardedRaggedIds:
    """Makes global int32 ids and float32 weights that can be split by shard.

    Ragged ids keep their form. Dense ids become `[padded batch, valence]`, with a
    valence of at least 1 and padding in the last shards. A second call changes nothing.
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
        # The ids have no positions, but later stages need at least one position.
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
    """Converts one shard of a result from `fill_up` to a `FeatureInput`.

    `sample_axes` names the mesh axes that split the samples. It is empty if the batch
    has only one shard.
    """
    if shape.sequence_length:
        return _to_sequences(filled, shape)
    ids: Any = ids_of(filled)
    weights: Any = filled.weights
    sample_ids, valence = None, 1
    if isinstance(filled, DenseIds):
        # The first ids of all samples come first, then the second ids, and so on. A TPU
        # adds such blocks without moving them.
        num_samples, valence = ids.shape
        ids, weights = ids.T, None if weights is None else weights.T
    else:
        ids, row_splits = ids.reshape(-1), filled.row_splits[0]
        num_samples = row_splits.shape[0] - 1
        sample_ids = sample_ids_of(row_splits, ids.shape[0])
        # Positions past the last id of the shard may hold anything.
        ids = jnp.where(sample_ids < num_samples, ids, PADDING_ROW_ID)
        if shape.default_id is not None:
            # Each sample gets an extra position for the default id, after its own ids.
            # Ids aren't checked yet, so any sample may need the default id.
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
        # Samples that only fill up the batch don't get the default id. Otherwise, they
        # would touch that id's row.
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


def _to_sequences(
    filled: DenseIds | ShardedRaggedIds, shape: FeatureShape
) -> FeatureInput:
    """Pads or truncates samples to the sequence length. Positions become samples."""
    ids, length = ids_of(filled), shape.sequence_length
    if isinstance(filled, DenseIds):
        num_samples = ids.shape[0]
        missing = max(0, length - ids.shape[1])
        room = ((0, 0), (0, missing))
        ids = jnp.pad(ids[:, :length], room, constant_values=PADDING_ROW_ID)
    else:
        ids, row_splits = ids.reshape(-1), filled.row_splits[0]
        num_samples = row_splits.shape[0] - 1
        sample_ids = sample_ids_of(row_splits, ids.shape[0])
        positions = positions_of(row_splits, ids.shape[0])
        # A position beyond the length would fall into the next sample. So move it past
        # the last sample, where it is out of bounds and dropped.
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
    """Converts ids from any integer type to int32."""
    # Ids that don't fit stay out of range at the same end, so that clipping finds the
    # right row. NumPy arrays are converted in NumPy: JAX would truncate 64-bit ids.
    if np.dtype(ids.dtype).itemsize < 4 or ids.dtype == np.int32:
        return jnp.asarray(ids, np.int32)
    xp = np if isinstance(ids, np.ndarray) else jnp
    is_large = ids > PADDING_ROW_ID
    fits = (ids >= 0) & ~is_large
    outside = xp.where(is_large, PADDING_ROW_ID - 1, -1)
    return jnp.asarray(xp.where(fits, ids.astype(np.int32), outside), np.int32)


def sample_ids_of(row_splits: Array, num_values: AxisSize) -> Array:
    """Finds each value's sample. Values past the last sample get `num_samples`."""
    # A value's sample number is the count of sample ends up to the value's position.
    # One scatter and one running sum count them. Ends at `num_values` are dropped.
    ends = jnp.zeros((num_values,), jnp.int32).at[row_splits[1:]].add(1, mode="drop")
    return running_sum(ends)


def positions_of(row_splits: Array, num_values: AxisSize) -> Array:
    """Numbers the values of each sample from 0."""
    # All indices are in bounds. `clip` avoids the masks of the default mode.
    starts = row_splits.at[sample_ids_of(row_splits, num_values)].get(mode="clip")
    return jnp.arange(num_values, dtype=jnp.int32) - starts
