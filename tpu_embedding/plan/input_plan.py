"""The part of a plan that loader processes need, which can be pickled.

A plan holds devices, and functions of the user. Neither can be sent to another process.
Preparing a batch needs only the features, the sizes of their tables, and the number of
devices.
"""

import dataclasses
from typing import Any

import jax

from tpu_embedding.config import FeatureConfig
from tpu_embedding.plan.features import FeatureNest, FeaturePlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputPlan(FeatureNest):
    """The part of an `EmbeddingPlan` that `prepare_features` reads.

    `EmbeddingPlan.for_loaders` makes it. It can be pickled if the nest of features can,
    and starts no device of the process that receives it.

    Attributes:
      features: in the order of the leaves of the user's nest. Their
        tables lack initializers and optimizers.
      feature_tree: the nest.
      num_shards: devices of the layer.
      num_process_parts: see `EmbeddingPlan`.
    """

    num_shards: int
    num_process_parts: int | None = 1

    def __reduce__(self):
        # JAX pickles trees of its own containers only, so the nest itself is pickled.
        numbers = jax.tree.unflatten(self.feature_tree, range(len(self.features)))
        counts = self.num_shards, self.num_process_parts
        return _restore, (self.features, numbers, *counts)


def input_plan_of(
    features: tuple[FeaturePlan, ...],
    tree: Any,
    *,
    num_shards: int,
    num_process_parts: int | None,
) -> InputPlan:
    """Returns the part of a plan that loaders need, without the user's functions."""
    return InputPlan(
        features=tuple(
            dataclasses.replace(feature, config=_without_functions(feature.config))
            for feature in features
        ),
        feature_tree=tree,
        num_shards=num_shards,
        num_process_parts=num_process_parts,
    )


def _restore(
    features: tuple[FeaturePlan, ...],
    numbers: Any,
    num_shards: int,
    num_process_parts: int | None,
) -> InputPlan:
    return InputPlan(
        features=features,
        feature_tree=jax.tree.structure(numbers),
        num_shards=num_shards,
        num_process_parts=num_process_parts,
    )


def _without_functions(config: FeatureConfig) -> FeatureConfig:
    table = dataclasses.replace(config.table, initializer=None, optimizer=None)
    return dataclasses.replace(config, table=table)
