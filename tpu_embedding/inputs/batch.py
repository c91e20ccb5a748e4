"""Parses a batch: one checked leaf per feature, with its sizes.

Each function that takes a batch calls `parse_batch` first. Layers and `lookup` pass the
`Batch` on to other such functions, which don't walk the nest or check a feature again.
`prepare` reads the user's containers instead, and applies the same rules to them.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embedding.argument_checks import invalid
from tpu_embedding.inputs.containers import check_unmasked
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.types import (
    AxisSize,
    DenseIds,
    FeatureIds,
    RaggedIds,
    ShardedRaggedIds,
    SparseIds,
    batch_shape_of,
    ids_of,
    is_integer,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureShape:
    """The sizes of one feature in one batch.

    Attributes:
      batch_size: samples of the batch.
      sequence_length: ids per sample that are looked up one by one. 0 means that a
        sample's ids are combined.
      output_shape: shape of the activations, `dim` included.
      default_id: row of samples without ids, or None.
    """

    batch_size: AxisSize
    sequence_length: int
    output_shape: tuple[AxisSize, ...]
    default_id: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch of a lookup. All lists are in the order of the plan's features.

    Attributes:
      plan: plan of the batch's features.
      leaves: ids of each feature as the user passed them, with their weights.
      ids: row numbers of each feature. Features that need `find_rows` hold their leaf.
      shapes: sizes of each feature.
      raw_feature: the first feature that needs `find_rows`, if any.
    """

    plan: EmbeddingPlan
    leaves: list[Any]
    ids: list[Any]
    shapes: tuple[FeatureShape, ...]
    raw_feature: FeaturePlan | None

    def row_numbers(self) -> list[Any]:
        """Returns the row numbers of each feature.

        Raises:
          TypeError: if a feature needs `find_rows`.
        """
        if self.raw_feature is not None:
            raise self.raw_feature.inputs.unknown_rows(self.raw_feature)
        return self.ids


def parse_batch(
    features: Any, plan: EmbeddingPlan, weights: Any = None, *, serving: bool = False
) -> Batch:
    """Parses the arguments of a lookup.

    Args:
      features: nest like `feature_config`, whose dicts may lack keys; or a `Batch`,
        which is returned.
      plan: plan of the layer.
      weights: the same nest with an array or None per dense feature.
      serving: True in exported programs. They have one shard, and each feature may have
        its own batch size.

    Raises:
      TypeError: if ids are not integers, or ragged ids were not prepared.
      ValueError: if the nest or a shape doesn't fit the plan.
    """
    if isinstance(features, Batch):
        return features
    plan, leaves = plan.match(features)
    if weights is not None:
        weight_leaves = plan.flatten(weights, "weights")
        leaves = list(map(_with_weights, leaves, weight_leaves, plan.features))
    num_shards = 1 if serving else plan.num_shards
    ids, raw_feature = [], None
    for leaf, feature in zip(leaves, plan.features, strict=True):
        if not feature.inputs.needs_rows(leaf):
            leaf = feature.inputs.row_numbers(leaf, feature)
        elif raw_feature is None:
            raw_feature = feature
        ids.append(leaf)
    shapes = tuple(
        feature_shape(feature_ids, feature, num_shards)
        for feature_ids, feature in zip(ids, plan.features, strict=True)
    )
    if not serving:
        check_equal_batches(shapes, plan.features)
    return Batch(
        plan=plan, leaves=leaves, ids=ids, shapes=shapes, raw_feature=raw_feature
    )


def _with_weights(ids: Any, weights: Any, feature: FeaturePlan) -> Any:
    """Adds weights to dense ids; None adds none."""
    if weights is None:
        return ids
    if isinstance(ids, RaggedIds | SparseIds | ShardedRaggedIds):
        name = f"Weights of ragged feature {feature.name!r}"
        rule = "be passed to prepare, together with its ids"
        raise invalid(name, rule, weights, kind=TypeError)
    return DenseIds(ids=ids_of(ids), weights=weights)


def feature_shape(
    ids: FeatureIds, feature: FeaturePlan, num_shards: int
) -> FeatureShape:
    """Checks the form of a feature in a lookup and returns its sizes.

    Raises:
      TypeError: if the ids are not integers, or ragged ids were not prepared.
      ValueError: if the shape of the ids does not fit the feature's configuration.
    """
    check_prepared(ids, feature)
    shape = checked_shape(ids, feature)
    if isinstance(ids, ShardedRaggedIds) and ids.values.shape[0] != num_shards:
        rule = f"be prepared with the layer's plan, for {num_shards} shards"
        raise invalid(f"Feature {feature.name!r}", rule, ids.values.shape[0])
    return shape


def check_prepared(ids: FeatureIds, feature: FeaturePlan) -> None:
    """Raises TypeError for ids without a static shape."""
    if isinstance(ids, RaggedIds | SparseIds):
        fix = "Pass the batch through te.inputs.prepare_features on the host first."
        rule = "have the same size in each batch"
        raise invalid(f"Feature {feature.name!r}", rule, ids, fix, TypeError)


def checked_shape(ids: FeatureIds, feature: FeaturePlan) -> FeatureShape:
    """Checks the form of a feature on the host or in a lookup and returns its sizes.

    It reads only shapes and dtypes.

    Raises:
      TypeError: if ids are not integers, or weights not real numbers.
      ValueError: if a shape does not fit the feature's configuration.
    """
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
        # One output per sample combines its ids. A multiple returns sequences.
        num_outputs = math.prod(output_shape)
        length = 0 if num_outputs == batch_size else num_outputs // batch_size
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
    """Raises ValueError if features without an output shape have unequal batches.

    Symbolic sizes in exported programs are not compared.
    """
    known = {
        feature.name: shape.batch_size
        for shape, feature in zip(shapes, features, strict=True)
        if feature.config.output_shape is None and isinstance(shape.batch_size, int)
    }
    if len(set(known.values())) > 1:
        first, *others = known
        unequal = [name for name in others if known[name] != known[first]]
        other = unequal[0]
        raise invalid(
            f"Samples of feature {other!r}",
            f"be {known[first]}, as many as feature {first!r} has",
            known[other],
            f"Features that differ from {first!r}: {unequal}. Set "
            "FeatureConfig.output_shape if a feature's number should differ.",
        )


def _check_ids(ids: Any, feature: FeaturePlan) -> None:
    """Rejects ids that are not an array of integers with a batch axis."""
    # Series of pandas and tensors of PyTorch also have a dtype.
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
    """Rejects weights that are not real numbers in the shape of the ids."""
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
