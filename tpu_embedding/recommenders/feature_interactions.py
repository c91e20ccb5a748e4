"""Layers from DLRM and DCN-v2 that combine the features in each sample."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from tpu_embedding.argument_checks import check_type, invalid
from tpu_embedding.nn.embedding import RNGS

Vectors = Sequence[Float[Array, "batch dim"]] | Float[Array, "batch vectors dim"]
"""One vector per feature and sample: arrays in a list, or one stacked array."""


class DotInteraction(nnx.Module):
    """Scalar products between all pairs of vectors in a sample.

    The layer has no parameters. For vectors `v_0, v_1, ...`, the result is
    `[v_1 v_0, v_2 v_0, v_2 v_1, v_3 v_0, ...]`. This is the lower triangle of the
    product matrix, row by row, as in TensorFlow Recommenders and Keras Recommenders.
    See Naumov et al., "Deep Learning Recommendation Model for Personalization and
    Recommendation Systems", arXiv 1906.00091.

    Attributes:
      self_interaction: if True, includes the product of each vector with itself.

    Example:
      >>> vectors = [jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 4.0]]), jnp.ones((1, 2))]
      >>> DotInteraction()(vectors).tolist()
      [[11.0, 3.0, 7.0]]
    """

    def __init__(self, *, self_interaction: bool = False):
        self.self_interaction = self_interaction

    def __call__(self, vectors: Vectors) -> Float[Array, "batch pairs"]:
        """Multiplies all pairs.

        Args:
          vectors: `n` arrays `[batch, dim]`, or one array `[batch, n, dim]`.

        Returns:
          `[batch, n * (n - 1) / 2]`, or `n * (n + 1) / 2` with `self_interaction`.

        Raises:
          TypeError: if the vectors are a dict.
          ValueError: if the arrays differ in shape, or have the wrong axes.
        """
        if isinstance(vectors, Mapping):
            fix = "Write list(activations.values())."
            raise invalid(
                "DotInteraction: vectors", "be a list", vectors, fix, TypeError
            )
        if not isinstance(vectors, jax.Array | np.ndarray):
            if len(shapes := list(dict.fromkeys(map(jnp.shape, vectors)))) != 1:
                rule = "be arrays of one shape [batch, dim]"
                fix = "Project them to one dim with a linear layer."
                raise invalid("DotInteraction: vectors", rule, shapes, fix)
            vectors = jnp.stack(vectors, axis=1)
        if vectors.ndim != 3:
            rule = "be arrays [batch, dim], or one array [batch, vectors, dim]"
            raise invalid("DotInteraction: vectors", rule, vectors)
        products = jnp.einsum("bid,bjd->bij", vectors, vectors)
        diagonal = 0 if self.self_interaction else -1
        rows, columns = np.tril_indices(vectors.shape[1], k=diagonal)
        return products[:, rows, columns]


class FeatureCross(nnx.Module):
    """A cross layer from DCN-v2: `x_next = x_0 * (W x + b + diag_scale * x) + x`.

    `x_0` is the input to the first layer in a stack. `x` is the input to this layer.
    `*` multiplies elementwise. So layer `n` forms products of up to `n + 1` inputs.
    `W` is a full matrix, or `W = U V` with low rank. See Wang et al., "DCN V2: Improved
    Deep & Cross Network", arXiv 2008.13535, equations 1 and 2. Names follow Keras
    Recommenders, and initial weights follow TorchRec.

    Attributes:
      down: linear layer for `V`, without bias; None if `W` is full.
      up: linear layer for `U` and `b`, or for `W` and `b` if `W` is full.

    Example:
      >>> cross = FeatureCross(6, projection_dim=2, rngs=nnx.Rngs(0))
      >>> first = jnp.ones((4, 6))
      >>> cross(first, cross(first)).shape
      (4, 6)
    """

    def __init__(
        self,
        num_inputs: int,
        projection_dim: int | None = None,
        *,
        diag_scale: float = 0.0,
        rngs: nnx.Rngs,
    ):
        """Initializes matrices with Glorot's normal distribution, and biases with 0.

        Args:
          num_inputs: input width.
          projection_dim: rank of `W`, at least 1. By default, `W` is a full matrix. In
            the paper, rank `num_inputs / 4` is as accurate as a full matrix.
          diag_scale: number added to the diagonal of `W`, at least 0. It stabilizes
            training, especially at low ranks.
          rngs: stream `params` provides the keys.

        Raises:
          TypeError: if `rngs` is not `nnx.Rngs`.
          ValueError: if `projection_dim` or `diag_scale` is too small.
        """
        line = "te.nn.FeatureCross(num_inputs, rngs=nnx.Rngs(0))"
        check_type("te.nn.FeatureCross: rngs", RNGS, rngs, line)
        if projection_dim is not None and projection_dim < 1:
            rule = "be at least 1, or None for a full matrix"
            raise invalid("FeatureCross: projection_dim", rule, projection_dim)
        if diag_scale < 0:
            raise invalid("FeatureCross: diag_scale", "be at least 0", diag_scale)
        options: Any = {"kernel_init": nnx.initializers.glorot_normal(), "rngs": rngs}
        self.diag_scale = diag_scale
        self.down = (
            nnx.Linear(num_inputs, projection_dim, use_bias=False, **options)
            if projection_dim is not None
            else None
        )
        self.up = nnx.Linear(projection_dim or num_inputs, num_inputs, **options)

    def __call__(
        self,
        first: Float[Array, "*batch inputs"],
        crossed: Float[Array, "*batch inputs"] | None = None,
    ) -> Float[Array, "*batch inputs"]:
        """Computes `x_next`.

        Args:
          first: `x_0`.
          crossed: `x`, the previous output. Defaults to `x_0`, for the first layer.

        Raises:
          ValueError: if the last axis is not `num_inputs` wide.
        """
        if crossed is None:
            crossed = first
        width = self.up.out_features
        # Widths of 1 would broadcast without an error.
        if (width, width) != (first.shape[-1], crossed.shape[-1]):
            shapes = [first.shape, crossed.shape]
            raise invalid("FeatureCross: inputs", f"be num_inputs={width} wide", shapes)
        output = self.up(crossed if self.down is None else self.down(crossed))
        if self.diag_scale:
            output = output + self.diag_scale * crossed
        return first * output + crossed
