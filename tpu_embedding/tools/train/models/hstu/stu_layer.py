"""The STU layer: a transducer layer with gated attention and without an MLP.

"STU" is short for sequential transduction unit; see Zhai et al., "Actions Speak Louder
than Words" (ICML 2024), section 3.
"""

import functools
from typing import Final

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Key

from tpu_embedding.tools.train.models.hstu.hstu_sizes import HSTUSizes
from tpu_embedding.tools.train.models.hstu.silu_attention import (
    SequenceLengths,
    silu_attention,
)
from tpu_embedding.tools.train.models.hstu.swish_mlp import layer_norm, xavier_uniform

STU_EPSILON: Final = 1e-6
"""Epsilon of both layer normalizations of a layer."""

ATTENTION_OUTPUT: Final = "attention_output"
"""Name of the attention's output for policies of `jax.checkpoint`."""

Tokens = Float[Array, "batch length dim"]
DropoutKeys = Key[Array, " batch"]


class STULayer(nnx.Module):
    """A layer with `num_heads` heads of attention, of dimension `head_dim` each.

        u, v, q, k = uvqk(norm_in(x))
        o = silu_attention(q, k, v)
        x_next = x + out(dropout([silu(u), o, silu(u) * norm_out(o)]))

    Each of the four parts of `uvqk` holds head after head.
    """

    def __init__(self, sizes: HSTUSizes, *, rngs: nnx.Rngs):
        dim, dtype = sizes.dim, jnp.dtype(sizes.dtype)
        self.num_heads, self.head_dim = sizes.num_heads, sizes.head_dim
        self.dropout_rate, self.block_size = sizes.dropout, sizes.block_size
        width = sizes.num_heads * sizes.head_dim
        self.norm_in = layer_norm(dim, epsilon=STU_EPSILON, dtype=dtype, rngs=rngs)
        self.uvqk = nnx.Linear(
            dim, 4 * width, kernel_init=xavier_uniform, dtype=dtype, rngs=rngs
        )
        self.norm_out = layer_norm(width, epsilon=STU_EPSILON, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(
            3 * width,
            dim,
            use_bias=False,
            kernel_init=xavier_uniform,
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(
        self,
        x: Tokens,
        lengths: SequenceLengths,
        dropout_keys: DropoutKeys | None = None,
    ) -> Tokens:
        """Returns the next vector of each token.

        Args:
          x: one vector per token; finite at padding, too.
          lengths: lengths of the sequences, and the attention's divisor.
          dropout_keys: random key of each sample's dropout; None: no dropout.
        """
        u, v, q, k = jnp.split(self.uvqk(self.norm_in(x)), 4, axis=-1)
        heads = (*x.shape[:2], self.num_heads, self.head_dim)
        q, k, v = (part.reshape(heads) for part in (q, k, v))
        o = silu_attention(q, k, v, lengths, block_size=self.block_size)
        o = checkpoint_name(o.reshape(u.shape), ATTENTION_OUTPUT)
        return self._gate(x, u, o, dropout_keys)

    def candidate(
        self,
        x: Tokens,
        lengths: SequenceLengths,
        dropout_keys: DropoutKeys | None = None,
    ) -> Float[Array, "batch dim"]:
        """Returns the next vector of each sample's only candidate.

        It equals the row `lengths.shared` of the whole layer's result. No key or value
        of another token is computed: with `y = norm_in(x)`, score and sum are

            <q, Wk y_j + bk> = <Wk^T q, y_j> + <q, bk>
            sum over j of s_j (Wv y_j + bv) = Wv (sum of s_j y_j) + (sum of s_j) bv

        Args:
          x: one vector per token; finite at padding, too.
          lengths: lengths of the sequences, and the attention's divisor.
          dropout_keys: random key of each sample's dropout; None: no dropout.
        """
        y = self.norm_in(x)
        x, y_candidate = (_candidate_row(rows, lengths) for rows in (x, y))
        u, _, q, _ = jnp.split(self.uvqk(y_candidate), 4, axis=-1)
        (value_kernel, value_bias), (key_kernel, key_bias) = self._values_and_keys()
        q = q.reshape(-1, self.num_heads, self.head_dim)
        wq = jnp.einsum("bhd,chd->bhc", q, key_kernel)
        scores = _float32_product("bhc,blc->bhl", wq, y)
        scores += _float32_product("bhd,hd->bh", q, key_bias)[:, :, None]
        weights = jax.nn.silu(scores * self.head_dim**-0.5) / lengths.normalizer
        is_visible = jnp.arange(y.shape[1])[None, :] <= lengths.shared[:, None]
        weights = jnp.where(is_visible[:, None, :], weights, 0.0)
        sums = _float32_product("bhl,blc->bhc", weights.astype(y.dtype), y)
        o = _float32_product("bhc,chd->bhd", sums.astype(y.dtype), value_kernel)
        o += jnp.sum(weights, axis=2, keepdims=True) * value_bias[None]
        return self._gate(x, u, o.reshape(u.shape).astype(u.dtype), dropout_keys)

    def _values_and_keys(self) -> list[tuple[Array, Array]]:
        """Returns kernels `[dim, heads, head_dim]` and biases of values and keys."""
        assert self.uvqk.bias is not None
        shape = (4, self.num_heads, self.head_dim)
        kernel = self.uvqk.kernel[...].astype(self.uvqk.dtype).reshape(-1, *shape)
        bias = self.uvqk.bias[...].astype(self.uvqk.dtype).reshape(shape)
        return [(kernel[:, part], bias[part]) for part in (1, 3)]

    def _gate(
        self,
        x: Float[Array, "*tokens dim"],
        u: Float[Array, "*tokens width"],
        o: Float[Array, "*tokens width"],
        dropout_keys: DropoutKeys | None,
    ) -> Float[Array, "*tokens dim"]:
        """Returns `x` plus the projection of the gated attention outputs."""
        u = jax.nn.silu(u)
        gated = jnp.concatenate([u, o, u * self.norm_out(o)], axis=-1)
        return x + self.out(dropout(gated, self.dropout_rate, dropout_keys))


def dropout(
    x: Float[Array, "batch ..."], rate: float, keys: DropoutKeys | None
) -> Float[Array, "batch ..."]:
    """Sets values to zero at random, and divides the others by `1 - rate`.

    Args:
      x: one array per sample.
      rate: probability of zero, at least 0 and less than 1.
      keys: random key of each sample, so that its dropout depends on no other sample;
        None: returns `x`.
    """
    if keys is None or rate == 0:
        return x
    draw = functools.partial(jax.random.bernoulli, p=1 - rate, shape=x.shape[1:])
    kept = jax.vmap(draw)(keys)
    return jnp.where(kept, x / (1 - rate), jnp.zeros_like(x))


def _candidate_row(rows: Tokens, lengths: SequenceLengths) -> Array:
    places = lengths.shared[:, None, None]
    return jnp.take_along_axis(rows, places, axis=1, mode="clip")[:, 0]


def _float32_product(subscripts: str, a: Array, b: Array) -> Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)
