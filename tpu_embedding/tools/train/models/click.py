"""A click model: an MLP over the concatenated activations returns one logit."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tpu_embedding.config import FeatureConfig
from tpu_embedding.nn.embedding import TPUEmbedding
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.tools.train.models.model import (
    MLP,
    Outputs,
    click_outputs,
    features_of_columns,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClickModelConfig:
    """Sizes of `ClickModel`.

    Attributes:
      dim: dimension of every table. A feature with several ids takes the mean of
        their rows.
      hidden_sizes: widths of the MLP's hidden layers.
    """

    dim: int
    hidden_sizes: tuple[int, ...]

    def feature_config(self, data: Any) -> dict[str, FeatureConfig]:
        """Returns one feature per column of the data set, each with its own table."""
        return features_of_columns(data.vocabulary_sizes, self.dim)

    def build(self, data: Any, plan: EmbeddingPlan, *, rngs: nnx.Rngs) -> "ClickModel":
        """Returns the model with initial parameters."""
        return ClickModel(self, plan, rngs=rngs)


class ClickModel(nnx.Module):
    """A click model: `logit = MLP(concatenated activations)`."""

    def __init__(
        self,
        config: ClickModelConfig,
        plan: EmbeddingPlan,
        *,
        rngs: nnx.Rngs,
    ):
        self.embedding = TPUEmbedding(None, plan=plan, rngs=rngs)
        self.mlp = MLP(
            config.dim * len(plan.features),
            (*config.hidden_sizes, 1),
            last_activation=False,
            # A smooth activation, because a ReLU turns rounding of inputs near 0 into
            # different gradients, and runs on different devices would diverge.
            activation=nnx.silu,
            rngs=rngs,
        )

    def __call__(self, features: dict[str, Any], dense: jax.Array | None) -> Outputs:
        """Returns the logit and the probability of a click for each sample."""
        del dense
        activations = self.embedding(features)
        inputs = jnp.concatenate([activations[k] for k in sorted(activations)], axis=1)
        return click_outputs(self.mlp(inputs)[:, 0])
