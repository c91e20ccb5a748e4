"""Interactions of features: known values, and NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import tpu_embedding as te
from tests.rejections import rejects

VECTORS = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)


@pytest.mark.parametrize("self_interaction", [False, True])
def test_dot_interaction_is_all_pairs_once(self_interaction):
    layer = te.nn.DotInteraction(self_interaction=self_interaction)
    wanted = [
        [v[i] @ v[j] for i in range(4) for j in range(i + self_interaction)]
        for v in VECTORS
    ]
    for vectors in (VECTORS, list(VECTORS.swapaxes(0, 1))):
        # Sums of three products in another order.
        np.testing.assert_allclose(layer(vectors), wanted, rtol=1e-5, atol=1e-6)


def test_dot_interaction_rejects_other_axes():
    with rejects(field="vectors", value=np.ones((4, 2))):
        te.nn.DotInteraction()([np.ones(4), np.ones(4)])


@pytest.mark.parametrize("rank", [None, 2])
def test_feature_cross_follows_its_equation(rank):
    cross = te.nn.FeatureCross(3, rank, diag_scale=0.5, rngs=nnx.Rngs(0))
    cross.up.bias[...] = jnp.array([0.1, -0.2, 0.3])
    first, crossed = VECTORS[0], VECTORS[1]
    kernel = np.asarray(cross.up.kernel)
    if rank is not None:
        assert cross.down.kernel.shape == (3, 2)
        kernel = np.asarray(cross.down.kernel) @ kernel
    inner = crossed @ kernel + np.asarray(cross.up.bias) + 0.5 * crossed
    # Sums of three products in another order.
    wanted = first * inner + crossed
    np.testing.assert_allclose(cross(first, crossed), wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(cross(first), cross(first, first))


@pytest.mark.parametrize(
    "options", [{"projection_dim": 0}, {"diag_scale": -1.0}], ids=str
)
def test_feature_cross_rejects_wrong_sizes(options):
    with rejects(field=[*options][0]):
        te.nn.FeatureCross(3, **options, rngs=nnx.Rngs(0))
