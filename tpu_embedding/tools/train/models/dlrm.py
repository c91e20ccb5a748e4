"""DLRM: combines dense and categorical inputs by scalar products of their vectors.

Naumov et al., "Deep Learning Recommendation Model for Personalization and
Recommendation Systems", arXiv 1906.00091.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tpu_embedding import initializers
from tpu_embedding.config import FeatureConfig
from tpu_embedding.nn.embedding import TPUEmbedding
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.recommenders.interactions import DotInteraction
from tpu_embedding.tools.data.synthetic_criteo import NUM_DENSE
from tpu_embedding.tools.train.models.model import (
    MLP,
    Outputs,
    click_outputs,
    features_of_columns,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DLRMConfig:
    """Sizes of `DLRM`.

    Attributes:
      dim: dimension of every table and of the bottom MLP's output.
      bottom_sizes: widths of the hidden layers of the MLP over the dense inputs.
      top_sizes: widths of the hidden layers of the MLP over the interactions.
      initial_deviation: standard deviation of the tables' initial values; positive.
    """

    dim: int
    bottom_sizes: tuple[int, ...]
    top_sizes: tuple[int, ...]
    initial_deviation: float

    def __post_init__(self):
        if not self.initial_deviation > 0:
            raise ValueError(
                "DLRMConfig.initial_deviation must be positive, got "
                f"{self.initial_deviation!r}. Scalar products of zero rows have zero "
                "gradients, so the tables would never train."
            )

    def feature_config(self, data: Any) -> dict[str, FeatureConfig]:
        """Returns one feature per column of the data set, each with its own table."""
        return features_of_columns(
            data.vocabulary_sizes,
            self.dim,
            initializer=initializers.normal(self.initial_deviation),
        )

    def build(self, data: Any, plan: EmbeddingPlan, *, rngs: nnx.Rngs) -> "DLRM":
        """Returns the model with initial parameters."""
        return DLRM(self, plan, rngs=rngs)


class DLRM(nnx.Module):
    """The DLRM click model.

    `logit = top([bottom(dense), interaction(bottom(dense), activations)])`
    """

    def __init__(
        self,
        config: DLRMConfig,
        plan: EmbeddingPlan,
        *,
        rngs: nnx.Rngs,
    ):
        self.embedding = TPUEmbedding(None, plan=plan, rngs=rngs)
        self.bottom = MLP(
            NUM_DENSE,
            (*config.bottom_sizes, config.dim),
            last_activation=True,
            rngs=rngs,
        )
        self.interaction = DotInteraction()
        num_vectors = 1 + len(plan.features)
        self.top = MLP(
            config.dim + num_vectors * (num_vectors - 1) // 2,
            (*config.top_sizes, 1),
            last_activation=False,
            rngs=rngs,
        )

    def __call__(self, features: dict[str, Any], dense: jax.Array | None) -> Outputs:
        """Returns the logit and the probability of a click for each sample."""
        assert dense is not None
        activations = self.embedding(features)
        bottom = self.bottom(dense)
        vectors = [bottom, *(activations[name] for name in sorted(activations))]
        products = self.interaction(vectors)
        top = self.top(jnp.concatenate([bottom, products], axis=1))
        return click_outputs(top[:, 0])
