import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hstu_layers import SequenceLengths, silu_attention

from tests.tiers import quick_cases

HEAD_DIM = 4


def dense_attention(q, k, v, lengths):
    """Returns the outputs by one array of all pairs of tokens."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(HEAD_DIM)
    query, key = np.indices(scores.shape[2:])
    is_shared = key[None] < np.asarray(lengths.shared)[:, None, None]
    is_visible = (query == key)[None] | (key < query)[None] & is_shared
    weights = jnp.where(is_visible[:, None], jax.nn.silu(scores), 0) / 50
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


@pytest.mark.parametrize("block_size", quick_cases([5, 512], "5"))
def test_blocks_add_up_to_dense_attention(block_size):
    length = 23
    shape = (4, 3, length, 2, HEAD_DIM)
    arrays = np.random.default_rng(0).normal(size=shape)
    q, k, v, cotangent = jnp.asarray(arrays, jnp.float32)
    lengths = SequenceLengths(
        tokens=jnp.array([23, 1, 9]),
        shared=jnp.array([21, 0, 7]),
        normalizer=jnp.asarray(50),
    )
    is_token = np.arange(length) < np.asarray(lengths.tokens)[:, None]
    cotangent = cotangent * is_token[:, :, None, None]

    def blocks(q, k, v):
        return silu_attention(q, k, v, lengths, block_size=block_size)

    def dense(q, k, v):
        return dense_attention(q, k, v, lengths)

    outputs, pull_back = jax.vjp(jax.jit(blocks), q, k, v)
    wanted, pull_dense_back = jax.vjp(dense, q, k, v)
    # Tolerance: float32 sums of up to 23 numbers below 1, in another order.
    close = dict(rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(outputs[is_token], wanted[is_token], **close)
    gradients = zip(pull_back(cotangent), pull_dense_back(cotangent), strict=True)
    for got, want in gradients:
        np.testing.assert_allclose(got, want, **close)
