"""Converts between the features of a batch and the stacks of tables. Global arrays.

A user thinks in features, a step in stacks: tables that lie in one array. The functions
here give the shapes of a batch, and turn what the stacks return into activations and
counts of features. `steps` calls them around the stages of `lookup/`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tpu_embedding.inputs.shard_inputs import (
    FeatureShape,
    feature_shape,
    refuse_unequal_batches,
)
from tpu_embedding.lookup._forward import StackLookup
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.types import LookupStats


def row_numbers(features: Any, plan: EmbeddingPlan) -> list[Any]:
    """Returns the rows that a lookup takes for each feature of a batch.

    Raises:
      TypeError: if a feature holds ids whose rows are not known.
    """
    plan = plan.for_batch(features)
    return [
        feature.inputs.row_numbers(ids, feature)
        for ids, feature in zip(plan.flatten(features), plan.features, strict=True)
    ]


def first_without_rows(features: Any, plan: EmbeddingPlan) -> str | None:
    """Returns the name of the first feature whose ids need rows, or None."""
    plan = plan.for_batch(features)
    pairs = zip(plan.flatten(features), plan.features, strict=True)
    names = (feature.name for ids, feature in pairs if feature.inputs.needs_rows(ids))
    return next(names, None)


def find_rows(tables: dict[str, Any], features: Any, plan: EmbeddingPlan) -> Any:
    """Returns a batch with the rows of all ids, as each kind of vocabulary finds them.

    It changes no table.
    """
    for inputs in dict.fromkeys(feature.inputs for feature in plan.features):
        features = inputs.find_rows(tables, features, plan)
    return features


def feature_shapes(
    leaves: Sequence[Any], plan: EmbeddingPlan
) -> tuple[FeatureShape, ...]:
    """Returns the sizes of each feature of a batch.

    Args:
      leaves: ids of each feature, of which shapes and dtypes are read.
      plan: plan of these features.

    Raises:
      TypeError, ValueError: if a feature's dtype or shape does not fit its config.
    """
    shapes = tuple(
        feature_shape(ids, feature, plan)
        for ids, feature in zip(leaves, plan.features, strict=True)
    )
    refuse_unequal_batches(
        (feature, shape.batch_size)
        for shape, feature in zip(shapes, plan.features, strict=True)
    )
    return shapes


def collect_activations(
    results: Mapping[str, StackLookup],
    shapes: Sequence[FeatureShape],
    plan: EmbeddingPlan,
) -> Any:
    """Returns the activations in the nest of the features, in their output shapes.

    Args:
      results: stack name to the lookup of the stack.
      shapes: sizes of each feature.
      plan: plan of these features.
    """
    activations: list[Any] = [None] * len(plan.features)
    for stack in plan.used_stacks:
        of_stack = results[stack.name].activations
        for i, of_feature in zip(plan.features_of(stack), of_stack, strict=True):
            # Samples that only fill up the batch lie behind the others.
            num_rows = shapes[i].batch_size * max(1, shapes[i].sequence_length)
            activations[i] = of_feature[:num_rows].reshape(shapes[i].output_shape)
    return plan.unflatten(activations)


def collect_stats(
    results: Mapping[str, StackLookup], plan: EmbeddingPlan
) -> LookupStats:
    """Adds up the counts of all devices.

    Args:
      results: stack name to the lookup of the stack.
      plan: plan of the batch's features.
    """
    out_of_range, num_ids, requested_rows = {}, {}, {}
    for stack in plan.used_stacks:
        result = results[stack.name]
        counts = result.routing.out_of_range
        for i, count in zip(plan.features_of(stack), counts, strict=True):
            out_of_range[plan.features[i].name] = jnp.sum(count)
        if result.num_ids is not None and result.requested_rows is not None:
            num_ids[stack.name] = jnp.sum(result.num_ids)
            requested_rows[stack.name] = jnp.sum(result.requested_rows, axis=0)
    return LookupStats(
        rounds={name: result.rounds[0] for name, result in results.items()},
        out_of_range=out_of_range,
        num_ids=num_ids,
        requested_rows=requested_rows,
    )


def cotangent_of_samples(
    cotangent: jax.Array | None,
    shape: FeatureShape,
    feature: FeaturePlan,
    plan: EmbeddingPlan,
) -> Float[Array, "samples dim"]:
    """Returns the cotangent of each sample of a feature, over all devices.

    Args:
      cotangent: like the feature's activations; None: zeros.
      shape: sizes of the feature.
      feature: gives the name for errors.
      plan: gives the number of devices; samples of zeros fill up the last ones.

    Raises:
      ValueError: if it has another shape than the activations.
    """
    if cotangent is None:
        cotangent = jnp.zeros(shape.output_shape)
    if getattr(cotangent, "shape", None) != shape.output_shape:
        raise ValueError(
            f"The cotangent of feature {feature.name!r} must have the shape of its "
            f"activations, {shape.output_shape}, got "
            f"{getattr(cotangent, 'shape', cotangent)}; zeros are for an activation "
            "that the loss does not use."
        )
    dim = shape.output_shape[-1]
    cotangent = cotangent.astype(jnp.float32).reshape(-1, dim)
    per_shard = shape.samples_per_shard * max(1, shape.sequence_length)
    missing = plan.num_shards * per_shard - cotangent.shape[0]
    return jnp.pad(cotangent, ((0, missing), (0, 0)))
