"""Attention with silu scores in place of a softmax, over blocks of queries and keys.

Scores are added up as they are. So blocks need no running maximum, and no array
`[length, length]` exists. See Zhai et al., "Actions Speak Louder than Words" (ICML
2024), section 3.
"""

import dataclasses
import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

DEFAULT_BLOCK_SIZE: Final = 512
"""Queries, and keys, per block."""

Heads = Float[Array, "batch length heads head_dim"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceLengths:
    """Lengths of the token sequences of a batch.

    The tokens of a sample come first; padding follows. The last tokens of a sample may
    be candidates, which only see themselves and the shared tokens.

    Attributes:
      tokens: number of tokens of each sample, candidates included.
      shared: number of tokens of each sample in front of its candidates.
      normalizer: divisor `N` of the scores, positive. All samples of a step must have
        the same one, on every device and in every micro-batch. Otherwise results depend
        on the way the batch is split.
    """

    tokens: Int[Array, " batch"]
    shared: Int[Array, " batch"]
    normalizer: Int[Array, ""]


def silu_attention(
    queries: Heads,
    keys: Heads,
    values: Heads,
    lengths: SequenceLengths,
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
) -> Heads:
    """Returns sums of values, weighted by the silu of the scores.

        output_i = sum over visible j of silu(<q_i, k_j> / sqrt(head_dim)) / N * v_j

    Token `i` sees itself and the shared tokens in front of it. Blocks above the
    diagonal and behind the longest sample are skipped. The backward pass computes the
    scores of each block again.

    Args:
      queries: one vector per token and head; finite at padding, too.
      keys: one vector per token and head; finite at padding, too.
      values: one vector per token and head; finite at padding, too.
      lengths: lengths of the sequences, and `N`.
      block_size: number of queries, and of keys, per block. Results do not depend on
        it, up to rounding.

    Returns:
      Outputs in the dtype of the queries; at padding, finite without a meaning.
    """
    length = queries.shape[1]
    block_size = min(block_size, length)
    widths = ((0, 0), (0, -length % block_size), (0, 0), (0, 0))
    q, k, v = (jnp.pad(x, widths) for x in (queries, keys, values))
    return _attention(block_size, q, k, v, lengths)[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    block_size: int, q: Heads, k: Heads, v: Heads, lengths: SequenceLengths
) -> Heads:
    """Returns the outputs; the length is a multiple of the block size."""
    block = functools.partial(_block, size=block_size)

    def attend(i: Array, outputs: Heads) -> Heads:
        def add_keys(j: Array, total: Heads) -> Heads:
            scores = _scores(block(q, i), block(k, j))
            weights = _factors(i, j, block_size, lengths) * jax.nn.silu(scores)
            return total + _product("bhqk,bkhd->bqhd", weights, block(v, j))

        total = jnp.zeros_like(block(q, i), dtype=jnp.float32)
        return _with_block(outputs, i, lax.fori_loop(0, i + 1, add_keys, total))

    num_blocks = _num_blocks(lengths, block_size)
    return lax.fori_loop(0, num_blocks, attend, jnp.zeros_like(q))


def _attention_forward(
    block_size: int, q: Heads, k: Heads, v: Heads, lengths: SequenceLengths
) -> tuple[Heads, tuple[Heads, Heads, Heads, SequenceLengths]]:
    return _attention(block_size, q, k, v, lengths), (q, k, v, lengths)


def _attention_backward(
    block_size: int,
    residuals: tuple[Heads, Heads, Heads, SequenceLengths],
    d_outputs: Heads,
) -> tuple[Heads, Heads, Heads, None]:
    """Returns the derivatives by queries, keys and values.

    Those by queries add up in the compute dtype, one addition per block of keys: a
    float32 array of all tokens would take twice the memory of the queries.
    """
    q, k, v, lengths = residuals
    block = functools.partial(_block, size=block_size)
    num_blocks = _num_blocks(lengths, block_size)
    scale = _scale(q)

    def differentiate_keys(j: Array, gradients: Any) -> Any:
        def add_queries(i: Array, gradients: Any) -> Any:
            dq, dk_j, dv_j = gradients
            scores = _scores(block(q, i), block(k, j))
            factors = _factors(i, j, block_size, lengths)
            sigmoid = jax.nn.sigmoid(scores)
            slopes = scale * sigmoid * (1 + scores * (1 - sigmoid))
            do_i = block(d_outputs, i)
            d_weights = _product("bqhd,bkhd->bhqk", do_i, block(v, j))
            d_products = factors * slopes * d_weights
            dq_i = block(dq, i) + _product("bhqk,bkhd->bqhd", d_products, block(k, j))
            return (
                _with_block(dq, i, dq_i),
                dk_j + _product("bhqk,bqhd->bkhd", d_products, block(q, i)),
                dv_j + _product("bhqk,bqhd->bkhd", factors * scores * sigmoid, do_i),
            )

        dq, dk, dv = gradients
        zeros = jnp.zeros_like(block(k, j), dtype=jnp.float32)
        dq, dk_j, dv_j = lax.fori_loop(j, num_blocks, add_queries, (dq, zeros, zeros))
        return dq, _with_block(dk, j, dk_j), _with_block(dv, j, dv_j)

    zeros = tuple(jnp.zeros_like(x) for x in (q, k, v))
    return *lax.fori_loop(0, num_blocks, differentiate_keys, zeros), None


_attention.defvjp(_attention_forward, _attention_backward)


def _num_blocks(lengths: SequenceLengths, block_size: int) -> Array:
    """Returns the number of blocks up to the end of the longest sample."""
    return -(-jnp.max(lengths.tokens) // block_size)


def _block(x: Heads, index: Array, size: int) -> Heads:
    return lax.dynamic_slice_in_dim(x, index * size, size, axis=1)


def _with_block(x: Heads, index: Array, block: Heads) -> Heads:
    start = index * block.shape[1]
    return lax.dynamic_update_slice_in_dim(x, block.astype(x.dtype), start, axis=1)


def _scale(q: Heads) -> float:
    return q.shape[-1] ** -0.5


def _scores(q: Heads, k: Heads) -> Float[Array, "batch heads queries keys"]:
    return _scale(q) * _product("bqhd,bkhd->bhqk", q, k)


def _product(subscripts: str, a: Array, b: Array) -> Array:
    """Returns a float32 sum of products, whose factors have the dtype of `b`."""
    return jnp.einsum(
        subscripts, a.astype(b.dtype), b, preferred_element_type=jnp.float32
    )


def _factors(
    i: Array, j: Array, block_size: int, lengths: SequenceLengths
) -> Float[Array, "batch 1 queries keys"]:
    """Returns `1 / N` where a query of block `i` sees a key of block `j`, else 0."""
    places = jnp.arange(block_size)
    query = i * block_size + places[None, None, :, None]
    key = j * block_size + places[None, None, None, :]
    is_shared = key < lengths.shared[:, None, None, None]
    is_visible = (key == query) | ((key < query) & is_shared)
    return jnp.where(is_visible, 1 / lengths.normalizer.astype(jnp.float32), 0.0)
