"""A two-tower model, which scores a user and an item with a scalar product.

Other items in the batch serve as negatives. See Yi et al., "Sampling-Bias-Corrected
Neural Modeling for Large Corpus Item Recommendations" (RecSys 2019).
"""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tpu_embedding.config import FeatureConfig
from tpu_embedding.nn.embedding import TPUEmbedding
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.recommenders.ranking_losses import in_batch_softmax
from tpu_embedding.tools.train.models.click import MLP, Outputs, features_of_columns

USER_FEATURES: Final = ("user", "history", "country", "device")
ITEM_FEATURES: Final = ("item", "category")
CONTEXT_FEATURES: Final = ("country", "device", "category")

SQUARED_NORM_EPSILON: Final = 1e-12
"""Added to squared norms, so that zero vectors have finite results and gradients."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoTowerConfig:
    """Hyperparameters for `TwoTower`.

    Attributes:
      dim: dimension of the user and item tables.
      context_dim: dimension of the small tables: country, device and category.
      hidden_sizes: widths of the hidden layers in each tower.
      output_dim: dimension of the user and item vectors.
      temperature: positive number that divides the cosines. Scores are in the range
        from `-1 / temperature` to `1 / temperature`.
    """

    dim: int
    context_dim: int
    hidden_sizes: tuple[int, ...]
    output_dim: int
    temperature: float

    def feature_config(self, data: Any) -> dict[str, FeatureConfig]:
        """Makes one feature per column; "item" and "history" share a table."""
        features = {}
        for name, size in data.vocabulary_sizes.items():
            features |= features_of_columns({name: size}, self.dim_of(name))
        features["history"] = features["item"]
        return {name: features[name] for name in (*USER_FEATURES, *ITEM_FEATURES)}

    def dim_of(self, feature: str) -> int:
        return self.context_dim if feature in CONTEXT_FEATURES else self.dim

    def build(self, data: Any, plan: EmbeddingPlan, *, rngs: nnx.Rngs) -> "TwoTower":
        del data
        return TwoTower(self, plan, rngs=rngs)


class TwoTower(nnx.Module):
    """Scores pairs: `score(user, item) = <user vector, item vector> / temperature`.

    Each tower is an MLP, whose outputs are scaled to norm 1.
    """

    def __init__(self, config: TwoTowerConfig, plan: EmbeddingPlan, *, rngs: nnx.Rngs):
        self.embedding = TPUEmbedding(None, plan=plan, rngs=rngs)
        self.temperature = config.temperature
        sizes = (*config.hidden_sizes, config.output_dim)
        self.user_tower, self.item_tower = (
            MLP(
                sum(map(config.dim_of, names)),
                sizes,
                last_activation=False,
                # This activation is smooth. Near 0, a ReLU would turn rounding
                # differences into different gradients.
                activation=nnx.silu,
                rngs=rngs,
            )
            for names in (USER_FEATURES, ITEM_FEATURES)
        )

    def __call__(self, features: dict[str, Any], dense: jax.Array | None) -> Outputs:
        """Scores and ranks the items in the batch for each user.

        `dense`, `[batch, 1]`, has the logarithm of the probability that a sample
        contains the item.
        """
        assert dense is not None
        activations = self.embedding(features)
        users, items = (
            _normalize(tower(jnp.concatenate([activations[k] for k in names], axis=1)))
            for tower, names in (
                (self.user_tower, USER_FEATURES),
                (self.item_tower, ITEM_FEATURES),
            )
        )
        # Dividing the users is cheaper than dividing the `[batch, batch]` scores.
        log_softmax, ranks = in_batch_softmax(
            users / self.temperature, items, dense[:, 0]
        )
        return Outputs(scores=log_softmax, predictions=ranks)


def _normalize(vectors: Float[Array, "batch dim"]) -> Float[Array, "batch dim"]:
    """Scales vectors to norm 1; zero vectors stay zero."""
    squared_norms = jnp.sum(jnp.square(vectors), axis=1, keepdims=True)
    return vectors * jax.lax.rsqrt(squared_norms + SQUARED_NORM_EPSILON)
