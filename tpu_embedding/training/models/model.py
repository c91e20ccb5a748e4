"""What the training loop asks of a model, and the part that several models share."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tpu_embedding.config import FeatureConfig
from tpu_embedding.plan.plan import EmbeddingPlan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Outputs:
    """What a model says about the samples of a batch.

    Attributes:
      scores: what the loss is computed from: logits, or ratings as they come out.
      predictions: what metrics are computed from: probabilities, or ratings cut to
        the range that they can have.
      penalty: regularisation, added to the loss of its sample.
    """

    scores: Float[Array, " batch"]
    predictions: Float[Array, " batch"]
    penalty: Float[Array, " batch"]


class ModelConfig(Protocol):
    """Hyperparameters of a model: a frozen dataclass that knows how to build it.

    The plan is made in between, from the features, so that it can be printed, and
    compared with a checkpoint's, before anything is allocated.
    """

    def feature_config(self, data: Any) -> dict[str, FeatureConfig]:
        """Returns the features of the model's layer, sized for a data set."""
        ...

    def build(self, data: Any, plan: EmbeddingPlan, *, rngs: nnx.Rngs) -> nnx.Module:
        """Returns the model, `(features, dense) -> Outputs`."""
        ...


class MLP(nnx.Module):
    """Linear layers with an activation after each but, if so asked, the last."""

    def __init__(
        self,
        num_inputs: int,
        layer_sizes: tuple[int, ...],
        *,
        last_activation: bool,
        activation: Callable[[jax.Array], jax.Array] = nnx.relu,
        rngs: nnx.Rngs,
    ):
        """Draws the weights: He's initialisation before an activation, else LeCun's."""
        layers: list[Any] = []
        for place, size in enumerate(layer_sizes):
            is_activated = last_activation or place + 1 < len(layer_sizes)
            initializer = (
                nnx.initializers.he_normal()
                if is_activated
                else nnx.initializers.lecun_normal()
            )
            layers.append(
                nnx.Linear(num_inputs, size, kernel_init=initializer, rngs=rngs)
            )
            if is_activated:
                layers.append(activation)
            num_inputs = size
        self.layers = nnx.Sequential(*layers)

    def __call__(self, inputs: Float[Array, "batch inputs"]) -> jax.Array:
        """Returns `[batch, layer_sizes[-1]]`."""
        return self.layers(inputs)


def click_outputs(logits: Float[Array, " batch"]) -> Outputs:
    """Returns the outputs of a click model without regularisation."""
    return Outputs(
        scores=logits,
        predictions=jax.nn.sigmoid(logits),
        penalty=jnp.zeros_like(logits),
    )


def check_sizes(owner: str, **sizes: int | tuple[int, ...]) -> None:
    """Refuses sizes that are no positive ints, all in one error."""
    problems = []
    for name, value in sizes.items():
        values = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(v, int) and v >= 1 for v in values):
            problems.append(f"{owner}.{name} must be positive, got {value!r}")
    if problems:
        raise ValueError("; ".join(problems) + ".")
