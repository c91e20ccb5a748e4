"""The interface of a model to the training loop, and a click model.

The click model is an MLP that maps activations to a logit.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tpu_embedding.config import FeatureConfig, TableConfig
from tpu_embedding.nn.embedding import TPUEmbedding
from tpu_embedding.plan.plan import EmbeddingPlan


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClickModelConfig:
    """Sizes of `ClickModel`.

    Attributes:
      dim: dimension of every table. The rows of a feature with several ids are
        averaged.
      hidden_sizes: widths of the MLP's hidden layers.
    """

    dim: int
    hidden_sizes: tuple[int, ...]

    def feature_config(self, data: Any) -> dict[str, FeatureConfig]:
        """Returns one feature per column of the data set, each with its own table."""
        return features_of_columns(data.vocabulary_sizes, self.dim)

    def build(self, data: Any, plan: EmbeddingPlan, *, rngs: nnx.Rngs) -> "ClickModel":
        """Returns the model with initial parameters."""
        del data
        return ClickModel(self, plan, rngs=rngs)


class ClickModel(nnx.Module):
    """A click model: `logit = MLP(activations)`."""

    def __init__(
        self, config: ClickModelConfig, plan: EmbeddingPlan, *, rngs: nnx.Rngs
    ):
        """Makes the model; see `ClickModelConfig.build`."""
        self.embedding = TPUEmbedding(None, plan=plan, rngs=rngs)
        self.mlp = MLP(
            len(plan.features) * config.dim,
            (*config.hidden_sizes, 1),
            last_activation=False,
            # A smooth activation: near 0, a ReLU turns rounding into different
            # gradients, and runs on different devices would diverge.
            activation=nnx.silu,
            rngs=rngs,
        )

    def __call__(self, features: dict[str, Any], dense: Any) -> Outputs:
        """Returns each sample's logit and probability; it has no dense inputs."""
        del dense
        activations = self.embedding(features)
        inputs = [activations[name] for name in sorted(activations)]
        return click_outputs(self.mlp(jnp.concatenate(inputs, axis=1))[:, 0])
