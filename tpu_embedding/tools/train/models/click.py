"""A click model: an MLP over activations and numbers gives a logit."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx

from tpu_embedding import initializers
from tpu_embedding.config import FeatureConfig
from tpu_embedding.nn.embedding import TPUEmbedding
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.recommenders.interactions import DotInteraction
from tpu_embedding.tools.data.csv_clicks import signed_log
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
      interactions: `"products"` gives the MLP the scalar product of each pair of
        activations, too, as DLRM does; `"none"` does not.
      initial_deviation: standard deviation of the tables' initial values; None is the
        default of `TableConfig`.
    """

    dim: int
    hidden_sizes: tuple[int, ...]
    interactions: Literal["none", "products"] = "none"
    initial_deviation: float | None = None

    def feature_config(self, data: Any) -> dict[str, FeatureConfig]:
        """Returns one feature per column of the data set, each with its own table."""
        options: dict[str, Any] = {}
        if self.initial_deviation is not None:
            options["initializer"] = initializers.normal(self.initial_deviation)
        return features_of_columns(data.vocabulary_sizes, self.dim, **options)

    def build(self, data: Any, plan: EmbeddingPlan, *, rngs: nnx.Rngs) -> "ClickModel":
        """Returns the model with initial parameters.

        Args:
          data: data set. If its dense inputs are a dict of numbers, it has
            `number_scales`, mean and standard deviation of each.
          plan: plan of the tables.
          rngs: random streams.
        """
        scales = getattr(data, "number_scales", {})
        return ClickModel(self, plan, scales, rngs=rngs)


class ClickModel(nnx.Module):
    """A click model: `logit = MLP([activations, products, numbers])`.

    A number `x` enters as `(signed_log(x) - mean) / deviation`, or 0 if it is missing;
    another input says that it is. The model keeps means and deviations, so it is served
    the numbers as they stand in the data.
    """

    def __init__(
        self,
        config: ClickModelConfig,
        plan: EmbeddingPlan,
        number_scales: Mapping[str, tuple[float, float]],
        *,
        rngs: nnx.Rngs,
    ):
        self.embedding = TPUEmbedding(None, plan=plan, rngs=rngs)
        self.number_names = tuple(sorted(number_scales))
        if number_scales:
            scales = [number_scales[name] for name in self.number_names]
            self.scales = nnx.BatchStat(jnp.asarray(scales, jnp.float32))
        self.has_products = config.interactions == "products"
        num_tables = len(plan.features)
        num_inputs = num_tables * config.dim + 2 * len(number_scales)
        if self.has_products:
            num_inputs += num_tables * (num_tables - 1) // 2
        self.mlp = MLP(
            num_inputs,
            (*config.hidden_sizes, 1),
            last_activation=False,
            # A smooth activation, because a ReLU turns rounding of inputs near 0 into
            # different gradients, and runs on different devices would diverge.
            activation=nnx.silu,
            rngs=rngs,
        )

    def __call__(self, features: dict[str, Any], dense: Any) -> Outputs:
        """Returns the logit and the probability of a click for each sample.

        Args:
          features: inputs of the tables.
          dense: numbers `[batch]` by name, NaN where one is missing; or None.
        """
        activations = self.embedding(features)
        rows = [activations[name] for name in sorted(activations)]
        inputs = [*rows]
        if self.has_products:
            inputs.append(DotInteraction()(rows))
        if self.number_names:
            numbers = jnp.stack([dense[name] for name in self.number_names], axis=1)
            is_missing = jnp.isnan(numbers)
            mean, deviation = self.scales.get_value().T[:, None]
            scaled = (signed_log(numbers, jnp) - mean) / deviation
            inputs += [jnp.where(is_missing, 0, scaled), is_missing.astype(jnp.float32)]
        return click_outputs(self.mlp(jnp.concatenate(inputs, axis=1))[:, 0])
