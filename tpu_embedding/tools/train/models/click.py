"""The interface of a model to the training loop, and a click model.

The click model is an MLP that maps activations and numbers to a logit.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tpu_embedding import initializers
from tpu_embedding.config import FeatureConfig, TableConfig
from tpu_embedding.nn.embedding import TPUEmbedding
from tpu_embedding.plan.plan import EmbeddingPlan
from tpu_embedding.recommenders.feature_interactions import DotInteraction
from tpu_embedding.tools.data.csv_clicks import signed_log


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Outputs:
    """A model's outputs for the samples of a batch.

    `click_outputs` makes them from logits.

    Attributes:
      scores: inputs of the loss: logits `[batch]` or `[batch, classes]`, unclipped
        ratings, or log-softmax values.
      predictions: inputs of the metrics: probabilities, ratings clipped to their valid
        range, or `te.metrics.Ranks`.
    """

    scores: Array
    predictions: Any


class ModelConfig(Protocol):
    """Hyperparameters of a model, and how to build it: the type of `RunConfig.model`.

    A model config is a frozen dataclass, whose fields `--set` can change.

    `feature_config` is called first, and the plan is made from its result. The plan can
    thus be printed, and compared with a checkpoint's plan, before `build` allocates
    anything.

    If a model's features differ from the features of the data set, the config can have
    one more method. It runs on the host, with `sizes` and `samples` as in
    `prepare_features`::

        def with_inputs(self, batch: Batch, plan, sizes=None, *, samples) -> Batch
    """

    def feature_config(self, data: Any) -> dict[str, FeatureConfig]:
        """Returns the features of the model's embedding layer.

        Args:
          data: data set that the config's source opened.

        Returns:
          A dict of feature name to config. `Batch.features` uses the same names.
        """
        ...

    def build(self, data: Any, plan: EmbeddingPlan, *, rngs: nnx.Rngs) -> nnx.Module:
        """Returns the model with initial parameters.

        Args:
          data: data set that the config's source opened.
          plan: plan of the embedding layer. The model creates the layer with
            `TPUEmbedding(None, plan=plan, rngs=rngs)`.
          rngs: random streams for the initial parameters.

        Returns:
          An `nnx.Module` whose `__call__(features, dense)` returns `Outputs`.
          `features` are the prepared features of a batch. `dense` are the batch's
          float32 dense inputs, or None if there are none.
        """
        ...


class MLP(nnx.Module):
    """Linear layers with an activation function between them.

    With `last_activation`, an activation also follows the last layer.
    """

    def __init__(
        self,
        num_inputs: int,
        layer_sizes: tuple[int, ...],
        *,
        last_activation: bool,
        activation: Callable[[jax.Array], jax.Array] = nnx.relu,
        rngs: nnx.Rngs,
    ):
        """Uses He initialisation before an activation, and LeCun otherwise."""
        layers: list[Any] = []
        for index, size in enumerate(layer_sizes):
            is_activated = last_activation or index + 1 < len(layer_sizes)
            initializer = nnx.initializers.lecun_normal()
            if is_activated:
                initializer = nnx.initializers.he_normal()
            linear = nnx.Linear(num_inputs, size, kernel_init=initializer, rngs=rngs)
            layers += [linear, activation] if is_activated else [linear]
            num_inputs = size
        self.layers = nnx.Sequential(*layers)

    def __call__(self, inputs: Float[Array, "batch inputs"]) -> jax.Array:
        """Returns the last layer's output, `[batch, layer_sizes[-1]]`."""
        return self.layers(inputs)


def click_outputs(logits: Float[Array, " batch"]) -> Outputs:
    """Returns the outputs of a click model.

    Args:
      logits: float32 `[batch]`, the logit of a click.

    Example:
      >>> click_outputs(jax.numpy.zeros(2)).predictions.tolist()
      [0.5, 0.5]
    """
    return Outputs(scores=logits, predictions=jax.nn.sigmoid(logits))


def features_of_columns(
    vocabulary_sizes: Mapping[str, int], dim: int, **options: Any
) -> dict[str, FeatureConfig]:
    """Returns one feature per column of a data set, each with its own table.

    Args:
      vocabulary_sizes: number of rows of each table, by column name.
      dim: dimension of every table.
      **options: further fields of every `TableConfig`. `combiner` defaults to `"mean"`.
    """
    options = {"combiner": "mean"} | options
    return {
        name: FeatureConfig(
            table=TableConfig(vocabulary_size=size, dim=dim, name=name, **options)
        )
        for name, size in vocabulary_sizes.items()
    }


MAX_DEVIATIONS: Final = 5.0
"""Limit that numbers are clipped to, in standard deviations from the mean."""

MAX_PAIRED: Final = 64
"""Maximum number of activations that enter the MLP separately and in pairs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClickModelConfig:
    """Sizes of `ClickModel`.

    Attributes:
      dim: dimension of every table. The rows of a feature with several ids are
        averaged.
      hidden_sizes: widths of the MLP's hidden layers.
      interactions: `"products"` also feeds the scalar product of each pair of
        activations to the MLP, as DLRM does; `"none"` does not. With more than
        `MAX_PAIRED` activations, their sum and the sum of the pairs' elementwise
        products are used instead.
      initial_deviation: standard deviation of the tables' initial values. By default,
        `TableConfig` chooses the initializer.
    """

    dim: int
    hidden_sizes: tuple[int, ...]
    interactions: Literal["none", "products"] = "none"
    initial_deviation: float | None = None

    def feature_config(self, data: Any) -> dict[str, FeatureConfig]:
        """Returns one feature per column of the data set, each with its own table.

        A feature that joins several columns is a sequence with one row per column; the
        data set gives its length in `sequence_lengths`.
        """
        options: dict[str, Any] = {}
        if self.initial_deviation is not None:
            options["initializer"] = initializers.normal(self.initial_deviation)
        features = features_of_columns(data.vocabulary_sizes, self.dim, **options)
        for name, length in getattr(data, "sequence_lengths", {}).items():
            features[name] = dataclasses.replace(
                features[name], max_sequence_length=length
            )
        return features

    def build(self, data: Any, plan: EmbeddingPlan, *, rngs: nnx.Rngs) -> "ClickModel":
        """Returns the model with initial parameters.

        Args:
          data: data set. If its dense inputs are a dict of numbers, it has
            `number_scales`: for each number, mean and standard deviation of its
            logarithm, then of the number itself. It may also have `num_classes`, or
            `label_scale` for a regression.
          plan: plan of the tables.
          rngs: random streams for the initial parameters.
        """
        return ClickModel(self, data, plan, rngs=rngs)


class ClickModel(nnx.Module):
    """A click model: `logit = MLP([activations, products, numbers])`.

    Many activations enter as sums; see `ClickModelConfig.interactions`.

    A number `x` enters twice as `(f(x) - mean) / deviation`: with the logarithm
    `f(x) = signed_log(x)`, and with `f(x) = x`, clipped to `MAX_DEVIATIONS`. Logarithms
    without the numbers themselves would lose small differences. If a number is missing,
    its two inputs are 0, and a third input is 1 instead of 0. The model stores means
    and deviations, so a server passes the numbers as they are in the data.

    With classes, the scores are logits `[batch, classes]`. With a label scale, they are
    `mean + deviation * MLP(...)`, in the label's units.
    """

    def __init__(
        self,
        config: ClickModelConfig,
        data: Any,
        plan: EmbeddingPlan,
        *,
        rngs: nnx.Rngs,
    ):
        """Makes the model; see `ClickModelConfig.build`."""
        number_scales = getattr(data, "number_scales", {})
        num_classes = getattr(data, "num_classes", None)
        label_scale = getattr(data, "label_scale", None)
        self.embedding = TPUEmbedding(None, plan=plan, rngs=rngs)
        self.number_names = tuple(sorted(number_scales))
        if number_scales:
            scales = [number_scales[name] for name in self.number_names]
            self.scales = nnx.BatchStat(jnp.asarray(scales, jnp.float32))
        self.has_classes = num_classes is not None
        self.has_label_scale = label_scale is not None
        if label_scale is not None:
            self.label_scale = nnx.BatchStat(jnp.asarray(label_scale, jnp.float32))
        self.has_products = config.interactions == "products"
        lengths = [feature.config.max_sequence_length for feature in plan.features]
        self.num_rows = num_rows = sum(max(1, length) for length in lengths)
        self.has_pairs = num_rows <= MAX_PAIRED
        num_inputs = (num_rows if self.has_pairs else 1) * config.dim
        num_inputs += 3 * len(number_scales)
        if self.has_products:
            num_pairs = num_rows * (num_rows - 1) // 2
            num_inputs += num_pairs if self.has_pairs else config.dim
        self.mlp = MLP(
            num_inputs,
            (*config.hidden_sizes, num_classes or 1),
            last_activation=False,
            # A smooth activation: near 0, a ReLU turns rounding into different
            # gradients, and runs on different devices would diverge.
            activation=nnx.silu,
            rngs=rngs,
        )

    def __call__(self, features: dict[str, Any], dense: Any) -> Outputs:
        """Returns each sample's outputs: for clicks, a logit and a probability.

        Args:
          features: inputs of the tables.
          dense: numbers `[batch]` by name, NaN where missing; None if there are none.
        """
        activations = self.embedding(features)
        by_feature = [activations[name] for name in sorted(activations)]
        by_feature = [x if x.ndim == 3 else x[:, None] for x in by_feature]
        rows = jnp.concatenate(by_feature, axis=1)
        inputs = [rows.reshape(rows.shape[0], -1)]
        if not self.has_pairs:
            inputs = [rows.sum(axis=1)]
        if self.has_products and self.has_pairs:
            inputs.append(DotInteraction()(list(jnp.moveaxis(rows, 1, 0))))
        elif self.has_products:
            # The sum over pairs is (square of the sum - sum of the squares) / 2.
            # Dividing by the number of rows keeps the first steps small.
            pairs = inputs[0] ** 2 - (rows**2).sum(axis=1)
            inputs.append(pairs / (2 * self.num_rows))
        if self.number_names:
            numbers = jnp.stack([dense[name] for name in self.number_names], axis=1)
            is_missing = jnp.isnan(numbers)
            scales = self.scales.get_value().T[:, None]
            logs = (signed_log(numbers, jnp) - scales[0]) / scales[1]
            scaled = (numbers - scales[2]) / scales[3]
            scaled = jnp.clip(scaled, -MAX_DEVIATIONS, MAX_DEVIATIONS)
            inputs += [jnp.where(is_missing, 0, x) for x in (logs, scaled)]
            inputs.append(is_missing.astype(jnp.float32))
        scores = self.mlp(jnp.concatenate(inputs, axis=1))
        if self.has_classes:
            return Outputs(scores=scores, predictions=jax.nn.softmax(scores))
        if self.has_label_scale:
            mean, deviation = self.label_scale.get_value()
            values = mean + deviation * scores[:, 0]
            return Outputs(scores=values, predictions=values)
        return click_outputs(scores[:, 0])
