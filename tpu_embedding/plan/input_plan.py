"""The part of a plan that loader processes need, which can be pickled.

A plan holds devices, and functions of the user. Neither can be sent to another process.
Preparing a batch needs only the features, the sizes of their tables, and the number of
devices.
"""

import dataclasses
from typing import Any

import jax

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

    def __repr__(self) -> str:
        return f"InputPlan({len(self.features)} features, {self.num_shards} shards)"

    def __reduce__(self):
        # JAX pickles trees of its own containers only, so the nest itself is pickled.
        numbers = self.unflatten(range(len(self.features)))
        return _restore, (
            self.features,
            numbers,
            self.num_shards,
            self.num_process_parts,
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


def without_functions(feature: FeaturePlan) -> FeaturePlan:
    """Returns a feature without the initializer and the optimizer of its table."""
    table = dataclasses.replace(feature.table, initializer=None, optimizer=None)
    config = dataclasses.replace(feature.config, table=table)
    return dataclasses.replace(feature, config=config)
