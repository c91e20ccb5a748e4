"""MLPs whose activation function is gated by a layer normalization."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

EPSILON = 1e-5
"""Epsilon of all layer normalizations but those of the STU layers."""

# JAX's `glorot_normal` draws from a truncated normal distribution.
xavier_normal = nnx.initializers.variance_scaling(1.0, "fan_avg", "normal")
xavier_uniform = nnx.initializers.glorot_uniform()


def layer_norm(
    dim: int, *, epsilon: float = EPSILON, dtype: DTypeLike, rngs: nnx.Rngs
) -> nnx.LayerNorm:
    """Returns a layer normalization with float32 statistics.

    The fast variance, a difference of two means, would lose small values to rounding.
    """
    return nnx.LayerNorm(
        dim, epsilon=epsilon, use_fast_variance=False, dtype=dtype, rngs=rngs
    )


class SwishMLP(nnx.Module):
    """Two linear layers: `dense2(h * sigmoid(norm1(h)))` with `h = dense1(x)`."""

    def __init__(
        self,
        num_inputs: int,
        hidden_size: int,
        num_outputs: int,
        *,
        kernel_init: nnx.Initializer,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.dense1, self.dense2 = (
            nnx.Linear(*sizes, kernel_init=kernel_init, dtype=dtype, rngs=rngs)
            for sizes in ((num_inputs, hidden_size), (hidden_size, num_outputs))
        )
        self.norm1 = layer_norm(hidden_size, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "... inputs"]) -> Float[Array, "... outputs"]:
        """Returns the output of the second layer, in the compute dtype."""
        hidden = self.dense1(x)
        return self.dense2(hidden * jax.nn.sigmoid(self.norm1(hidden)))


class NormalizedSwishMLP(SwishMLP):
    """A `SwishMLP` whose output is normalized: `norm2(dense2(...))`."""

    def __init__(
        self,
        num_inputs: int,
        hidden_size: int,
        num_outputs: int,
        *,
        dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        """Takes the arguments of `SwishMLP`."""
        sizes = (num_inputs, hidden_size, num_outputs)
        super().__init__(*sizes, dtype=dtype, rngs=rngs, **options)
        self.norm2 = layer_norm(num_outputs, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "... inputs"]) -> Float[Array, "... outputs"]:
        """Returns the normalized output, in the compute dtype."""
        return self.norm2(super().__call__(x))
