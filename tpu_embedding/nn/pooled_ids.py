"""Warns of ids that are pooled though nobody has asked for it."""

import warnings
from typing import Any

import jax
import numpy as np

from tpu_embedding.nn.recording import is_mapped
from tpu_embedding.plan.plan import EmbeddingPlan


def warn_of_pooled_ids(features: Any, plan: EmbeddingPlan, stacklevel: int) -> None:
    """Warns of arrays of ids `[batch, n]` whose feature and table name no combiner.

    `nnx.Embed` returns `[batch, n, dim]` for them, and this layer `[batch, dim]`. Ids
    on the host that are padded with negative ones are bags, which users mean to pool.

    Args:
      features: batch of the layer.
      plan: plan of the features.
      stacklevel: frames from here to the user's line.
    """
    if all(x.says_combiner for x in plan.features) or is_mapped(features):
        return
    plan = plan.for_batch(features)
    for feature, ids in zip(plan.features, plan.flatten(features), strict=True):
        config = feature.config
        is_sequence = config.max_sequence_length or config.output_shape is not None
        is_matrix = isinstance(ids, jax.Array | np.ndarray) and ids.ndim == 2
        if feature.says_combiner or is_sequence or not is_matrix or ids.shape[1] < 2:
            continue
        if isinstance(ids, np.ndarray) and ids.dtype.kind == "i" and np.any(ids < 0):
            continue
        batch, length = ids.shape
        dim = feature.table.dim
        warnings.warn(
            f"Feature {feature.name!r} has ids of shape [{batch}, {length}], and its "
            f"activations are the means of {length} rows, [{batch}, {dim}]. nnx.Embed "
            f"returns [{batch}, {length}, {dim}]: for that, write te.FeatureConfig("
            f"table=table, max_sequence_length={length}). For the mean, write "
            "te.FeatureConfig(table=table, combiner='mean').",
            stacklevel=stacklevel + 1,
        )
