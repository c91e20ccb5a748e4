"""DLRM and DLRM-DCNv2, click models over dense and categorical inputs.

DLRM combines vectors with scalar products (Naumov et al., arXiv 1906.00091). DLRM-DCNv2
combines them with low-rank cross layers (Wang et al., arXiv 2008.13535). MLPerf
Training has used DLRM-DCNv2 since round 3.0, as `recommendation_v2/torchrec_dlrm` in
github.com/mlcommons/training.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tpu_embedding import initializers
from tpu_embedding.argument_checks import invalid
from tpu_embedding.config import FeatureConfig
from tpu_embedding.nn.embedding import TPUEmbedding
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.recommenders.feature_interactions import DotInteraction, FeatureCross
from tpu_embedding.tools.train.models.click import (
    MLP,
    Outputs,
    click_outputs,
    features_of_columns,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DLRMConfig:
    """Sizes for `DLRM`.

    Attributes:
      dim: dimension of every table and of the bottom MLP output.
      bottom_sizes: widths of the hidden layers in the MLP for dense inputs.
      top_sizes: widths of the hidden layers in the MLP after the interactions.
      initial_deviation: standard deviation of the initial table values, above 0.
    """

    dim: int
    bottom_sizes: tuple[int, ...]
    top_sizes: tuple[int, ...]
    initial_deviation: float

    def __post_init__(self):
        if not self.initial_deviation > 0:
            field, value = "DLRMConfig.initial_deviation", self.initial_deviation
            reason = "Zero rows have zero gradients, so the tables would never train."
            raise invalid(field, "be positive", value, reason)

    def feature_config(self, data: Any) -> dict[str, FeatureConfig]:
        return features_of_columns(
            data.vocabulary_sizes,
            self.dim,
            initializer=initializers.normal(self.initial_deviation),
        )

    def build(self, data: Any, plan: EmbeddingPlan, *, rngs: nnx.Rngs) -> "DLRM":
        return DLRM(self, data.num_dense, plan, rngs=rngs)


class _TwoMLPs(nnx.Module):
    """A click model: `logit = top(combine(bottom(dense), activations))`."""

    def __init__(
        self, config: Any, num_dense: int, plan: EmbeddingPlan, *, rngs: nnx.Rngs
    ):
        self.embedding = TPUEmbedding(None, plan=plan, rngs=rngs)
        sizes = (*config.bottom_sizes, config.dim)
        self.bottom = MLP(num_dense, sizes, last_activation=True, rngs=rngs)
        num_inputs = self._init_combination(config, 1 + len(plan.features), rngs)
        sizes = (*config.top_sizes, 1)
        self.top = MLP(num_inputs, sizes, last_activation=False, rngs=rngs)

    def _init_combination(self, config: Any, num_vectors: int, rngs: nnx.Rngs) -> int:
        """Creates layers for `_combine`, and computes its output width."""
        raise NotImplementedError

    def _combine(self, vectors: list[jax.Array]) -> Float[Array, "batch inputs"]:
        """Combines the bottom MLP output and activations, each `[batch, dim]`."""
        raise NotImplementedError

    def __call__(self, features: dict[str, Any], dense: jax.Array | None) -> Outputs:
        assert dense is not None
        activations = self.embedding(features)
        # `jit` sorts dict keys. Sorting here makes the order the same without `jit`.
        vectors = [self.bottom(dense), *(activations[k] for k in sorted(activations))]
        return click_outputs(self.top(self._combine(vectors))[:, 0])


class DLRM(_TwoMLPs):
    """The DLRM click model.

    `logit = top([bottom(dense), interaction(bottom(dense), activations)])`
    """

    def _init_combination(self, config: Any, num_vectors: int, rngs: nnx.Rngs) -> int:
        del rngs
        return config.dim + num_vectors * (num_vectors - 1) // 2

    def _combine(self, vectors: list[jax.Array]) -> Float[Array, "batch inputs"]:
        return jnp.concatenate([vectors[0], DotInteraction()(vectors)], axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DLRMDCNv2Config:
    """Sizes for `DLRMDCNv2`.

    Attributes:
      dim: dimension of every table and of the bottom MLP output. A feature with several
        ids sums their rows.
      bottom_sizes: widths of the hidden layers in the MLP for dense inputs.
      top_sizes: widths of the hidden layers in the MLP after the cross layers.
      num_cross_layers: number of cross layers.
      cross_rank: rank of the matrix in each cross layer. It is typically at most a
        quarter of the layer width, which is `(1 + features) * dim`.
    """

    dim: int
    bottom_sizes: tuple[int, ...]
    top_sizes: tuple[int, ...]
    num_cross_layers: int
    cross_rank: int

    def feature_config(self, data: Any) -> dict[str, FeatureConfig]:
        features = {}
        for name, size in data.vocabulary_sizes.items():
            # TorchRec's default initializer.
            limit = 1 / math.sqrt(size)
            initializer = initializers.uniform(-limit, limit)
            options = {"initializer": initializer, "combiner": "sum"}
            features |= features_of_columns({name: size}, self.dim, **options)
        return features

    def build(self, data: Any, plan: EmbeddingPlan, *, rngs: nnx.Rngs) -> "DLRMDCNv2":
        return DLRMDCNv2(self, data.num_dense, plan, rngs=rngs)


class DLRMDCNv2(_TwoMLPs):
    """The DCNv2 click model: `logit = top(cross([bottom(dense), activations]))`."""

    def _init_combination(self, config: Any, num_vectors: int, rngs: nnx.Rngs) -> int:

        num_inputs = num_vectors * config.dim
        keys = jax.random.split(rngs.params(), config.num_cross_layers)
        self.cross = _make_layers(keys, num_inputs, config.cross_rank)
        return num_inputs

    def _combine(self, vectors: list[jax.Array]) -> Float[Array, "batch inputs"]:

        return cross_all(self.cross, jnp.concatenate(vectors, axis=1))


@nnx.vmap(in_axes=(0, None, None), out_axes=0)
def _make_layers(key: jax.Array, num_inputs: int, rank: int) -> FeatureCross:
    """Makes one layer per key, with parameters stacked along the first axis."""
    return FeatureCross(num_inputs, rank, rngs=nnx.Rngs(key))


def cross_all(
    layers: FeatureCross, first: Float[Array, "batch inputs"]
) -> Float[Array, "batch inputs"]:
    # Not unrolled, because XLA:TPU would take 6 s to compile each layer.
    @nnx.scan(in_axes=(nnx.Carry, 0, None), out_axes=nnx.Carry)
    def cross(crossed, layer, first):
        return layer(first, crossed)

    return cross(first, layers, first)
