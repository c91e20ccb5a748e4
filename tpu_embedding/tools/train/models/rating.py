"""A rating model for MovieLens: matrix factorisation with side features and history."""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx

from tpu_embedding import initializers
from tpu_embedding.combiners import Combiner
from tpu_embedding.config import FeatureConfig, TableConfig
from tpu_embedding.nn.embedding import TPUEmbedding
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.tools.train.models.model import Outputs, check_sizes

LOWEST_RATING: Final = 1.0
HIGHEST_RATING: Final = 5.0

COMBINERS: Final[dict[str, Combiner]] = {"genres": "mean", "history": "sqrtn"}
"""Combiners of the features with several ids.

"sqrtn" gives a long history more weight than "mean" does."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RatingModelConfig:
    """Hyperparameters of `RatingModel`.

    Attributes:
      dim: dimension of every table. Column 0 of a row is its bias.
      initial_deviation: standard deviation of the tables' initial values.
      l2: weight, in a sample's loss, of the squared norms of its activations. A row is
        thus regularised in proportion to its use. Unlike weight decay, this leaves
        untouched rows unchanged.
    """

    dim: int
    initial_deviation: float
    l2: float

    def __post_init__(self):
        check_sizes("RatingModelConfig", dim=self.dim)
        problems = [
            f"RatingModelConfig.{name} must not be negative, got {value!r}"
            for name, value in (
                ("initial_deviation", self.initial_deviation),
                ("l2", self.l2),
            )
            if not value >= 0
        ]
        if problems:
            raise ValueError("; ".join(problems) + ".")

    def feature_config(self, data: Any) -> dict[str, FeatureConfig]:
        """Returns one feature per column of the data set, each with its own table."""
        initializer = initializers.normal(self.initial_deviation)
        valences = {"history": data.max_history}
        return {
            name: FeatureConfig(
                table=TableConfig(
                    vocabulary_size=size,
                    dim=self.dim,
                    initializer=initializer,
                    combiner=COMBINERS.get(name, "sum"),
                    name=name,
                ),
                expected_valence=valences.get(name),
            )
            for name, size in data.vocabulary_sizes.items()
        }

    def build(self, data: Any, plan: EmbeddingPlan, *, rngs: nnx.Rngs) -> "RatingModel":
        """Returns the model with initial parameters."""
        return RatingModel(self, data.mean_rating, plan, rngs=rngs)


class RatingModel(nnx.Module):
    """Predicts a rating from biases and one scalar product.

    The activations of a sample give

        u = user + age + gender + occupation + history
        m = movie + genres
        rating = mean rating + bias + u[0] + m[0] + <u[1:], m[1:]>

    This is SVD++ of Koren, "Factorization Meets the Neighborhood" (KDD 2008), with
    attributes of user and movie. The implicit history consists of (movie, rating)
    pairs instead of movies.
    """

    def __init__(
        self,
        config: RatingModelConfig,
        mean_rating: float,
        plan: EmbeddingPlan,
        *,
        rngs: nnx.Rngs,
    ):
        self.embedding = TPUEmbedding(None, plan=plan, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(()))
        self.mean_rating = mean_rating
        self.l2 = config.l2

    def __call__(self, features: dict[str, Any], dense: jax.Array | None) -> Outputs:
        """Returns ratings, unclipped as scores and clipped to [1, 5] as predictions."""
        del dense
        a = self.embedding(features)
        about_user = a["age"] + a["gender"] + a["occupation"]
        user = a["user"] + a["history"] + about_user
        movie = a["movie"] + a["genres"]
        scores = (
            self.mean_rating
            + self.bias[...]
            + user[:, 0]
            + movie[:, 0]
            + jnp.sum(user[:, 1:] * movie[:, 1:], axis=1)
        )
        parts = (a["user"], a["movie"], a["history"], a["genres"], about_user)
        squared_norms = jnp.zeros_like(scores)
        for part in parts:
            squared_norms += jnp.sum(jnp.square(part), axis=1)
        return Outputs(
            scores=scores,
            predictions=jnp.clip(scores, LOWEST_RATING, HIGHEST_RATING),
            penalty=self.l2 * squared_norms,
        )
