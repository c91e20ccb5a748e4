"""Two towers: users and items as vectors, whose scalar product says who takes what.

Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
Recommendations" (RecSys 2019): the items of a batch are each other's negatives, and
scores are corrected for how often an item is met as one.
"""

import dataclasses
import math
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tpu_embedding.config import FeatureConfig, TableConfig
from tpu_embedding.nn.embedding import TPUEmbedding
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.training.models.model import MLP, Outputs, check_sizes

USER_FEATURES: Final = ("user", "history", "country", "device")
ITEM_FEATURES: Final = ("item", "category")
CONTEXT_FEATURES: Final = ("country", "device", "category")

LEAST_SQUARED_NORM: Final = 1e-12
"""Keeps the direction of a zero vector, and its derivative, finite."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoTowerConfig:
    """Hyperparameters of `TwoTower`.

    Attributes:
      dim: of the tables of users and items.
      context_dim: of the small tables: country and device of a user, category of an
        item.
      hidden_sizes: hidden layers of each tower.
      output_dim: of the vectors of users and items.
      temperature: that cosines are divided by, so that scores lie within
        `1 / temperature` of 0.
    """

    dim: int
    context_dim: int
    hidden_sizes: tuple[int, ...]
    output_dim: int
    temperature: float

    def __post_init__(self):
        check_sizes(
            "TwoTowerConfig",
            dim=self.dim,
            context_dim=self.context_dim,
            hidden_sizes=self.hidden_sizes,
            output_dim=self.output_dim,
        )
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(
                "TwoTowerConfig.temperature must be positive and finite, got "
                f"{self.temperature!r}."
            )

    def feature_config(self, data: Any) -> dict[str, FeatureConfig]:
        """Returns the features; "item" and "history" share a table."""
        tables = {
            name: TableConfig(
                vocabulary_size=size,
                dim=self.dim_of(name),
                combiner="mean",
                name=name,
            )
            for name, size in data.vocabulary_sizes.items()
        }
        tables["history"] = tables["item"]
        return {
            name: FeatureConfig(table=tables[name])
            for name in (*USER_FEATURES, *ITEM_FEATURES)
        }

    def dim_of(self, feature: str) -> int:
        """Returns the dim of a feature's table."""
        return self.context_dim if feature in CONTEXT_FEATURES else self.dim

    def build(self, data: Any, plan: EmbeddingPlan, *, rngs: nnx.Rngs) -> "TwoTower":
        """Returns the model."""
        del data
        return TwoTower(self, plan, rngs=rngs)


class TwoTower(nnx.Module):
    """`score(user, item) = <user vector, item vector> / temperature`, both of norm 1.

    The user's vector is an MLP of the rows of the user, of its context and of the mean
    of its history; the item's is one of the rows of the item and its category.
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
                # Smooth: under a ReLU, rounding decides for inputs near 0.
                activation=nnx.silu,
                rngs=rngs,
            )
            for names in (USER_FEATURES, ITEM_FEATURES)
        )

    def __call__(self, features: dict[str, Any], dense: jax.Array | None) -> Outputs:
        """Returns what `in_batch_softmax` says of each sample's own item.

        Args:
          features: of `USER_FEATURES` and `ITEM_FEATURES`.
          dense: `[batch, 1]`, the natural logarithm of the probability that a sample
            has the item.

        Returns:
          `scores`, the logarithm of the softmax, and `predictions`, the item's rank.
        """
        assert dense is not None
        activations = self.embedding(features)
        users, items = (
            _unit(tower(jnp.concatenate([activations[k] for k in names], axis=1)))
            for tower, names in (
                (self.user_tower, USER_FEATURES),
                (self.item_tower, ITEM_FEATURES),
            )
        )
        log_softmax, ranks = in_batch_softmax(
            users / self.temperature, items, dense[:, 0]
        )
        return Outputs(
            scores=log_softmax, predictions=ranks, penalty=jnp.zeros_like(ranks)
        )


def in_batch_softmax(
    users: Float[Array, "batch dim"],
    items: Float[Array, "batch dim"],
    log_probabilities: Float[Array, " batch"],
) -> tuple[Float[Array, " batch"], Float[Array, " batch"]]:
    """Returns how each user's own item fares against all items of the batch. Global.

    With the probability `q_j` of item `j` to be in a sample (Yi et al., equation 5),

        s_ij = <users_i, items_j> - log q_j
        log_softmax_i = s_ii - log(sum over j of exp(s_ij))

    A popular item is met often as a negative; without the correction it would be
    scored down for that. At the best scores, `<users_i, items_j>` is the logarithm of
    the probability that user `i` takes item `j`, up to a number for each user.

    Args:
      users: vectors that samples ask with.
      items: vectors of the samples' items; samples of weight 0 are candidates, too.
      log_probabilities: `log q`, natural.

    Returns:
      `log_softmax`, at most 0, and the item's rank: how many candidates score higher
      by `s`, 0 to `batch - 1`.

    Example:
      >>> users = jnp.array([[1.0, 0.0], [0.0, 0.0]])
      >>> items = jnp.array([[0.0, 1.0], [1.0, 0.0]])
      >>> log_softmax, ranks = in_batch_softmax(users, items, jnp.zeros(2))
      >>> [round(x, 4) for x in jnp.exp(log_softmax).tolist()], ranks.tolist()
      ([0.2689, 0.5], [1.0, 0.0])
    """
    scores = users @ items.T - log_probabilities[None, :]
    own = jnp.diagonal(scores)
    log_softmax = own - jax.nn.logsumexp(scores, axis=1)
    ranks = jnp.sum(scores > own[:, None], axis=1)
    return log_softmax, ranks.astype(jnp.float32)


def _unit(vectors: Float[Array, "batch dim"]) -> Float[Array, "batch dim"]:
    squared_norms = jnp.sum(jnp.square(vectors), axis=1, keepdims=True)
    return vectors * jax.lax.rsqrt(squared_norms + LEAST_SQUARED_NORM)
