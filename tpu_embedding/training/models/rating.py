"""A rating model for MovieLens: factorisation with side features and history."""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
from flax import nnx

from tpu_embedding.config import Combiner, FeatureConfig, TableConfig
from tpu_embedding.nn.embedding import TPUEmbedding
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.training.models.model import Outputs, check_sizes

LOWEST_RATING: Final = 1.0
HIGHEST_RATING: Final = 5.0

COMBINERS: Final[dict[str, Combiner]] = {"genres": "mean", "history": "sqrtn"}
"""Of the features with several ids; "sqrtn" trusts a long history more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RatingModelConfig:
    """Hyperparameters of `RatingModel`.

    Attributes:
      dim: of every table; column 0 is the bias of its row.
      initial_deviation: standard deviation of the tables' first values.
      l2: weight of the squared norms of a sample's activations in its loss. Rows are
        so held back in proportion to how often they are used, and untouched rows,
        unlike under weight decay, need no update.
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
        """Returns a table for each feature of the data set."""
        initializer = jax.nn.initializers.normal(self.initial_deviation)
        valences = {"history": data.config.max_history}
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
        """Returns the model."""
        return RatingModel(self, data.mean_rating, plan, rngs=rngs)


class RatingModel(nnx.Module):
    """Biases and one scalar product.

    With the activations of a sample,

        u = user + age + gender + occupation + history
        m = movie + genres
        rating = mean rating + bias + u[0] + m[0] + <u[1:], m[1:]>

    SVD++ of Koren, "Factorization Meets the Neighborhood" (KDD 2008), whose implicit
    history is here one of (movie, rating) pairs, with attributes of user and movie.
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
        """Returns ratings as they come out, and cut to the range of ratings."""
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
