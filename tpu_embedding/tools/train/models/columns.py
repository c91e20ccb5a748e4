"""A click model for the columns of any file: categories, lists and numbers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tpu_embedding import initializers
from tpu_embedding.config import FeatureConfig
from tpu_embedding.nn.embedding import TPUEmbedding
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.tools.data.csv_clicks import signed_log
from tpu_embedding.tools.train.models.model import (
    MLP,
    Outputs,
    click_outputs,
    features_of_columns,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColumnsModelConfig:
    """Sizes of `ColumnsModel`.

    Attributes:
      dim: dimension of every table. A list takes the mean of its rows.
      hidden_sizes: widths of the MLP's hidden layers.
      initial_deviation: standard deviation of the tables' initial values.
    """

    dim: int
    hidden_sizes: tuple[int, ...]
    initial_deviation: float = 0.01

    def feature_config(self, data: Any) -> dict[str, FeatureConfig]:
        """Returns one feature per column of the data set, each with its own table."""
        return features_of_columns(
            data.vocabulary_sizes,
            self.dim,
            initializer=initializers.normal(self.initial_deviation),
        )

    def build(
        self, data: Any, plan: EmbeddingPlan, *, rngs: nnx.Rngs
    ) -> "ColumnsModel":
        """Returns the model with initial parameters."""
        return ColumnsModel(self, data.number_scales, plan, rngs=rngs)


class ColumnsModel(nnx.Module):
    """DLRM's scalar products of rows, and an MLP, for any number of columns.

    `logit = MLP([rows, products of each pair of rows, numbers])`

    A number `x` enters as `(signed_log(x) - mean) / deviation`, 0 if it is missing, and
    a missing one is marked by an input of its own. The model keeps means and
    deviations, so it is served the numbers as they stand in the file.
    """

    def __init__(
        self,
        config: ColumnsModelConfig,
        number_scales: dict[str, tuple[float, float]],
        plan: EmbeddingPlan,
        *,
        rngs: nnx.Rngs,
    ):
        self.embedding = TPUEmbedding(None, plan=plan, rngs=rngs)
        self.number_names = tuple(sorted(number_scales))
        scales = [number_scales[name] for name in self.number_names]
        self.scales = nnx.BatchStat(jnp.asarray(scales, jnp.float32).reshape(-1, 2))
        num_tables = len(plan.features)
        num_products = num_tables * (num_tables - 1) // 2
        self.mlp = MLP(
            num_tables * config.dim + num_products + 2 * len(scales),
            (*config.hidden_sizes, 1),
            last_activation=False,
            activation=nnx.silu,
            rngs=rngs,
        )

    def __call__(
        self, features: dict[str, Any], dense: dict[str, jax.Array] | None
    ) -> Outputs:
        """Returns the logit and the probability of a click for each sample.

        Args:
          features: inputs of the tables, by column.
          dense: numbers `[batch]` by column, NaN where one is missing.
        """
        activations = self.embedding(features)
        rows = jnp.stack([activations[name] for name in sorted(activations)], axis=1)
        products = jnp.einsum("bid,bjd->bij", rows, rows)
        pairs = np.tril_indices(rows.shape[1], k=-1)
        inputs = [rows.reshape(len(rows), -1), products[:, pairs[0], pairs[1]]]
        if dense is not None:
            values = jnp.stack([dense[name] for name in self.number_names], axis=1)
            is_missing = jnp.isnan(values)
            mean, deviation = self.scales.get_value().T
            scaled = (signed_log(values, jnp) - mean) / deviation
            inputs += [jnp.where(is_missing, 0, scaled), is_missing.astype(rows.dtype)]
        return click_outputs(self.mlp(jnp.concatenate(inputs, axis=1))[:, 0])
