"""The dense part of MLPerf Training's `dlrm_v4_hstu`: a click model over histories.

It reads rows of tables and has no embedding layer. See Zhai et al., "Actions Speak
Louder than Words: Trillion-Parameter Sequential Transducers for Generative
Recommendations" (ICML 2024).
"""

import dataclasses
from typing import Final, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tpu_embedding.tools.train.models.hstu.hstu_inputs import (
    Expand,
    HSTUInputs,
    append_candidate,
)
from tpu_embedding.tools.train.models.hstu.position_encoder import (
    MAX_TIME_BUCKETS,
    PositionEncoder,
)
from tpu_embedding.tools.train.models.hstu.silu_attention import (
    DEFAULT_BLOCK_SIZE,
    SequenceLengths,
)
from tpu_embedding.tools.train.models.hstu.stu_layer import (
    ATTENTION_OUTPUT,
    STULayer,
    Tokens,
    dropout,
)
from tpu_embedding.tools.train.models.hstu.swish_mlp import (
    NormalizedSwishMLP,
    SwishMLP,
    layer_norm,
    xavier_normal,
    xavier_uniform,
)
from tpu_embedding.tools.train.models.hstu.token_encoder import TokenEncoder
from tpu_embedding.tools.train.models.model import check_sizes

CLOCKS: Final = ((3600, 24), (86400, 7))
"""Unit in seconds, and units per turn, of the hour of the day and day of the week."""

PI: Final = 3.14
"""The benchmark's approximation of pi."""


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
    dtype: Literal["float32", "bfloat16"] = "bfloat16"

    def __post_init__(self):
        floats = ("input_dropout", "dropout")
        fields = {field.name for field in dataclasses.fields(self)}
        check_sizes(
            "HSTUSizes",
            **{
                name: getattr(self, name)
                for name in sorted(fields - {*floats, "dtype"})
            },
        )
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
        for name in floats:
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"HSTUSizes.{name} must be at least 0 and less than 1, got "
                    f"{getattr(self, name)!r}."
                )
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(
                f'HSTUSizes.dtype must be "float32" or "bfloat16", got {self.dtype!r}.'
            )


class HSTU(nnx.Module):
    """Predicts the click on a candidate from a user's history.

        tokens = position_encoder([contextual | history | candidate])
        user = user_encoder(candidate's token after all layers)
        logit = head(user * item_mlp([item, artist, album]))

    The candidate follows the history directly, so that padding is always behind it.
    What runs once per sample, behind the layers, is computed in float32. Dropout needs
    a random stream `dropout` and runs until `eval()` is called.
    """

    def __init__(self, sizes: HSTUSizes, *, rngs: nnx.Rngs):
        dim, dtype = sizes.dim, jnp.dtype(sizes.dtype)
        self.sizes = sizes
        self.token_encoder = TokenEncoder(
            dim,
            hidden_size=sizes.token_hidden_size,
            num_contextual=sizes.num_contextual,
            dtype=dtype,
            rngs=rngs,
        )
        self.position_encoder = PositionEncoder(
            dim,
            num_positions=sizes.num_positions,
            num_time_buckets=sizes.num_time_buckets,
            num_contextual=sizes.num_contextual,
            block_size=sizes.block_size,
            dtype=dtype,
            rngs=rngs,
        )
        self.layers = nnx.List(
            STULayer(
                dim,
                num_heads=sizes.num_heads,
                head_dim=sizes.head_dim,
                dropout_rate=sizes.dropout,
                block_size=sizes.block_size,
                dtype=dtype,
                rngs=rngs,
            )
            for _ in range(sizes.num_layers)
        )
        self.user_encoder = UserEncoder(dim, rngs=rngs)
        self.item_mlp = NormalizedSwishMLP(
            3 * dim, sizes.item_hidden_size, dim, kernel_init=xavier_uniform, rngs=rngs
        )
        self.head = SwishMLP(
            dim, sizes.item_hidden_size, 1, kernel_init=xavier_uniform, rngs=rngs
        )
        self.deterministic = False
        has_dropout = sizes.input_dropout > 0 or sizes.dropout > 0
        self.dropout_stream = nnx.data(rngs["dropout"].fork() if has_dropout else None)

    def __call__(
        self, inputs: HSTUInputs, expand: Expand, *, normalizer: Int[Array, ""]
    ) -> Float[Array, " batch"]:
        """Returns the logit of a click on each candidate, in float32.

        Args:
          inputs: rows, indices and times of the batch.
          expand: places values of unique items in their samples.
          normalizer: divisor of the attention's scores; see `longest_sequence`.
        """
        return self.score(
            self.users(inputs, expand, normalizer), self.items(inputs, expand)
        )

    def users(
        self, inputs: HSTUInputs, expand: Expand, normalizer: Int[Array, ""]
    ) -> Float[Array, "batch dim"]:
        """Returns the vector of each user in view of its candidate."""
        keys = self._dropout_keys()
        lengths = self.sequence_lengths(inputs, normalizer)
        x = self.encode(self.token_encoder(inputs, expand), inputs, lengths)
        x = dropout(x, self.sizes.input_dropout, keys.pop())
        for layer in list(self.layers)[:-1]:
            x = _all_tokens(layer, x, lengths, keys.pop())
        candidate = _candidate(self.layers[-1], x, lengths, keys.pop())
        return self.user_encoder(candidate, inputs.query_times)

    def sequence_lengths(
        self, inputs: HSTUInputs, normalizer: Int[Array, ""]
    ) -> SequenceLengths:
        """Returns the lengths of the sequences of tokens."""
        shared = self.sizes.num_contextual + inputs.lengths
        return SequenceLengths(tokens=shared + 1, shared=shared, normalizer=normalizer)

    def encode(
        self, tokens: Tokens, inputs: HSTUInputs, lengths: SequenceLengths
    ) -> Tokens:
        """Adds the places and ages of the tokens."""
        times = append_candidate(inputs.times, inputs.query_times, inputs.lengths)
        times = jnp.pad(times, ((0, 0), (self.sizes.num_contextual, 0)))
        return self.position_encoder(tokens, lengths, times, inputs.query_times)

    def items(self, inputs: HSTUInputs, expand: Expand) -> Float[Array, "batch dim"]:
        """Returns the vector of each candidate."""
        index = inputs.candidate[:, None]
        tables = (inputs.items, inputs.artists, inputs.albums)
        rows = [expand(rows, index)[:, 0] for rows in tables]
        return self.item_mlp(jnp.concatenate(rows, axis=1))

    def score(
        self, users: Float[Array, "batch dim"], items: Float[Array, "batch dim"]
    ) -> Float[Array, " batch"]:
        """Returns the logit of each pair of a user and an item."""
        return self.head(users * items)[:, 0]

    def _dropout_keys(self) -> list[jax.Array | None]:
        """Returns the keys of the encoded tokens and all layers; None: no dropout."""
        num_keys = 1 + self.sizes.num_layers
        if self.deterministic or self.dropout_stream is None:
            return [None] * num_keys
        return list(jax.random.split(self.dropout_stream(), num_keys))


class UserEncoder(nnx.Module):
    """Combines the candidate's token with the time of the day and the week.

    `norm(dense([token, cos(hour), sin(hour), cos(day), sin(day)]))`
    """

    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        self.dense = nnx.Linear(
            dim + 2 * len(CLOCKS), dim, kernel_init=xavier_normal, rngs=rngs
        )
        self.norm = layer_norm(dim, dtype=jnp.dtype("float32"), rngs=rngs)

    def __call__(
        self, tokens: Float[Array, "batch dim"], times: Int[Array, " batch"]
    ) -> Float[Array, "batch dim"]:
        """Returns one vector per token and time, in float32."""
        features = []
        for unit, period in CLOCKS:
            hand = (times // unit % period).astype(jnp.float32)
            angle = hand / period * (2 * PI)
            features += [jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]]
        tokens = tokens.astype(jnp.float32)
        return self.norm(self.dense(jnp.concatenate([tokens, *features], axis=1)))


# The backward pass computes a layer again from its input and the attention's output.
_remat = nnx.remat(
    policy=jax.checkpoint_policies.save_only_these_names(ATTENTION_OUTPUT)
)


@_remat
def _all_tokens(
    layer: STULayer, x: Tokens, lengths: SequenceLengths, key: jax.Array | None
) -> Tokens:
    return layer(x, lengths, key)


@_remat
def _candidate(
    layer: STULayer, x: Tokens, lengths: SequenceLengths, key: jax.Array | None
) -> Float[Array, "batch dim"]:
    return layer.candidate(x, lengths, key)
