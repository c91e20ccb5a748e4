"""The model interface of the training loop, and a click model.

docs/guides/own_model.md shows how to write your own model.
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
    """Model outputs for the samples in a batch.

    If your model predicts clicks, `click_outputs` makes the outputs from logits.

    Attributes:
      scores: inputs to the loss. They are logits `[batch]` or `[batch, classes]`,
        unclipped ratings, or log-softmax values.
      predictions: inputs to the metrics. They are probabilities, ratings clipped to
        their valid range, or `te.metrics.Ranks`.

    Example:
      >>> ratings = jnp.array([3.5, 5.5])
      >>> outputs = Outputs(scores=ratings, predictions=jnp.clip(ratings, 1, 5))
      >>> outputs.predictions.tolist()
      [3.5, 5.0]
    """

    scores: Array
    predictions: Any


class ModelConfig(Protocol):
    """Model hyperparameters, with methods that build the model.

    `RunConfig.model` has this type. A model config is a frozen dataclass, whose fields
    you can change with `--set`.

    `feature_config` is called first, and the plan is made from its result. The plan can
    thus be printed, and compared with a checkpoint's plan, before `build` allocates
    anything.

    If your model needs features that differ from the data set's, add this method to the
    config. It runs on the host. `sizes` and `samples` are as in `prepare_features`::

        def with_inputs(self, batch: Batch, plan, sizes=None, *, samples) -> Batch
    """

    def feature_config(self, data: Any) -> dict[str, FeatureConfig]:
        """Defines the features of the embedding layer.

        Args:
          data: data set that `RunConfig.data` opened.

        Returns:
          A dict from feature name to config. `Batch.features` uses the same names.
        """
        ...

    def build(self, data: Any, plan: EmbeddingPlan, *, rngs: nnx.Rngs) -> nnx.Module:
        """Creates the model with initial parameters.

        Args:
          data: data set that `RunConfig.data` opened.
          plan: plan for the embedding layer. Your model creates the layer with
            `TPUEmbedding(None, plan=plan, rngs=rngs)`.
          rngs: random streams for the initial parameters.

        Returns:
          An `nnx.Module` whose `__call__(features, dense)` returns `Outputs`.
          `features` are the prepared features. `dense` has the float32 dense inputs. It
          is None if the batch has none.
        """
        ...


class MLP(nnx.Module):
    """Linear layers with an activation function between them.

    With `last_activation`, an activation also follows the last layer.

    Example:
      >>> mlp = MLP(8, (16, 1), last_activation=False, rngs=nnx.Rngs(0))
      >>> mlp(jnp.ones((4, 8))).shape
      (4, 1)
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
        """Initializes layers: by He's rule before an activation, else by LeCun's."""
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
        """Applies the layers; the result is `[batch, layer_sizes[-1]]`."""
        return self.layers(inputs)


def click_outputs(logits: Float[Array, " batch"]) -> Outputs:
    """Makes click model outputs from logits.

    Args:
      logits: float32 `[batch]`, the click logits.

    Example:
      >>> click_outputs(jax.numpy.zeros(2)).predictions.tolist()
      [0.5, 0.5]
    """
    return Outputs(scores=logits, predictions=jax.nn.sigmoid(logits))


def features_of_columns(
    vocabulary_sizes: Mapping[str, int], dim: int, **options: Any
) -> dict[str, FeatureConfig]:
    """Makes one feature per data set column, each with its own table."""
    options = {"combiner": "mean"} | options
    return {
        name: FeatureConfig(
            table=TableConfig(vocabulary_size=size, dim=dim, name=name, **options)
        )
        for name, size in vocabulary_sizes.items()
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClickModelConfig:
    """Sizes for `ClickModel`.

    Attributes:
      dim: dimension of every table. A feature with several ids averages their rows.
      hidden_sizes: widths of the hidden layers in the MLP.
    """

    dim: int
    hidden_sizes: tuple[int, ...]

    def feature_config(self, data: Any) -> dict[str, FeatureConfig]:
        return features_of_columns(data.vocabulary_sizes, self.dim)

    def build(self, data: Any, plan: EmbeddingPlan, *, rngs: nnx.Rngs) -> "ClickModel":
        del data
        return ClickModel(self, plan, rngs=rngs)


class ClickModel(nnx.Module):
    """A click model: `logit = MLP(activations)`."""

    def __init__(
        self, config: ClickModelConfig, plan: EmbeddingPlan, *, rngs: nnx.Rngs
    ):
        self.embedding = TPUEmbedding(None, plan=plan, rngs=rngs)
        self.mlp = MLP(
            len(plan.features) * config.dim,
            (*config.hidden_sizes, 1),
            last_activation=False,
            # This activation is smooth. Near 0, a ReLU would turn rounding differences
            # into different gradients, and runs on different devices would diverge.
            activation=nnx.silu,
            rngs=rngs,
        )

    def __call__(self, features: dict[str, Any], dense: Any) -> Outputs:
        del dense
        activations = self.embedding(features)
        # `jit` sorts dict keys. Sorting here makes the order the same without `jit`.
        inputs = [activations[name] for name in sorted(activations)]
        return click_outputs(self.mlp(jnp.concatenate(inputs, axis=1))[:, 0])
