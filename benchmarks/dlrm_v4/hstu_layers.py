"""Layers of HSTU: gated attention with silu scores, MLPs, and their sizes.

Scores of the attention are added up as they are, without a softmax. So blocks of
queries and keys need no running maximum, and no array `[length, length]` exists. "STU"
is short for sequential transduction unit; see Zhai et al., "Actions Speak Louder than
Words" (ICML 2024), section 3.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

Tokens = Float[Array, "batch length dim"]
DropoutKeys = Key[Array, " batch"]


DEFAULT_BLOCK_SIZE: Final = 512
"""Queries, and keys, per block."""

DEFAULT_MICRO_BATCH_SIZE: Final = 32
"""Samples of a device that are computed at a time."""

SECONDS_PER_SQUARE: Final = 60
"""Bucket `k` of ages starts at an age of `60 * k ** 2` seconds."""

MAX_TIME_BUCKETS: Final = math.isqrt((2**31 - 1) // SECONDS_PER_SQUARE) - 1
"""Limit of `num_time_buckets`; the age of the next bucket must be an int32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HSTUSizes:
    """Sizes of `HSTU`.

    Attributes:
      dim: dimension of rows and tokens.
      num_layers: number of STU layers.
      num_heads: number of heads of each layer.
      head_dim: dimension of queries, keys and values of a head.
      token_hidden_size: width of the hidden layers of the MLPs of tokens.
      item_hidden_size: width of the hidden layers of the candidate's MLP and the head.
      num_contextual: number of contextual tokens.
      num_positions: rows of the table of positions; more than `num_contextual`. Tokens
        that are further away share the last row.
      num_time_buckets: largest bucket of ages. Bucket `k` starts at `60 * k ** 2`
        seconds.
      input_dropout: dropout rate of the encoded tokens.
      dropout: dropout rate in each layer.
      block_size: tokens per block of attention.
      micro_batch_size: largest number of samples that a device computes at a time.
        Results do not depend on it, up to rounding: tables are looked up and updated
        once per step, and gradients cover the whole batch. Fewer samples take
        less memory.
      dtype: dtype in which tokens are computed. Parameters are float32.
    """

    dim: int
    num_layers: int
    num_heads: int
    head_dim: int
    token_hidden_size: int
    item_hidden_size: int
    num_contextual: int
    num_positions: int
    num_time_buckets: int
    input_dropout: float
    dropout: float
    block_size: int = DEFAULT_BLOCK_SIZE
    micro_batch_size: int = DEFAULT_MICRO_BATCH_SIZE
    dtype: Literal["float32", "bfloat16"] = "bfloat16"

    def __post_init__(self):
        if self.num_positions <= self.num_contextual:
            raise ValueError(
                "HSTUSizes.num_positions must exceed num_contextual, got "
                f"{self.num_positions} and {self.num_contextual}."
            )
        if self.num_time_buckets > MAX_TIME_BUCKETS:
            raise ValueError(
                f"HSTUSizes.num_time_buckets must be at most {MAX_TIME_BUCKETS}, got "
                f"{self.num_time_buckets}."
            )


EPSILON = 1e-5
"""Epsilon of all layer normalizations outside of STU layers."""

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
    diagonal and beyond the longest sample are skipped. The backward pass computes the
    scores of each block again.

    Args:
      queries: one vector per token and head; finite also at padding.
      keys: one vector per token and head; finite also at padding.
      values: one vector per token and head; finite also at padding.
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


STU_EPSILON: Final = 1e-6
"""Epsilon of both layer normalizations of a layer."""

ATTENTION_OUTPUT: Final = "attention_output"
"""Name of the attention's output for policies of `jax.checkpoint`."""


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
          x: one vector per token; finite also at padding.
          lengths: lengths of the sequences, and the attention's divisor.
          dropout_keys: random key of each sample's dropout, or None without dropout.
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
          x: one vector per token; finite also at padding.
          lengths: lengths of the sequences, and the attention's divisor.
          dropout_keys: random key of each sample's dropout, or None without dropout.
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
    """Sets values to zero at random, and divides all other values by `1 - rate`.

    Args:
      x: one array per sample.
      rate: probability of zero, at least 0 and less than 1.
      keys: random key of each sample, so that its dropout depends on no other sample.
        None returns `x`.
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


_POLICY: Final = jax.checkpoint_policies.save_only_these_names(ATTENTION_OUTPUT)

Remat = Callable[[Callable[..., Array]], Callable[..., Array]]


def in_micro_batches(
    function: Callable[[Any, Remat], Float[Array, "samples ..."]],
    samples: Any,
    size: int,
) -> Float[Array, "batch ..."]:
    """Returns the function's results, computed for at most `size` samples at a time.

    There are as few micro-batches as possible, of equal size; zeros fill up the last
    one. The backward pass computes each of them again, except for outputs of attention.
    With one micro-batch it computes one layer at a time again, which takes less memory.
    Derivatives by arrays that the function closes over add up in the dtype of these.

    Args:
      function: maps arrays of some samples, and a wrapper for each of its layers, to an
        array of their results. The result of a sample must depend on no other sample,
        and be finite for zeros.
      samples: pytree of arrays `[batch, ...]`.
      size: largest number of samples at a time.
    """
    batch = jax.tree.leaves(samples)[0].shape[0]
    count = max(1, -(-batch // size))
    if count == 1:
        return function(samples, functools.partial(jax.checkpoint, policy=_POLICY))
    missing = -batch % count

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1)))
        return x.reshape(count, -1, *x.shape[1:])

    remat = jax.checkpoint(
        lambda part: function(part, lambda layer: layer),
        policy=_POLICY,
        prevent_cse=False,  # a loop separates both passes
    )
    results = jax.lax.map(remat, jax.tree.map(split, samples))
    return results.reshape(batch + missing, *results.shape[2:])[:batch]
