"""The dense part of MLPerf Training's `dlrm_v4_hstu`: a click model over histories.

It reads rows of tables and has no embedding layer. See Zhai et al., "Actions Speak
Louder than Words: Trillion-Parameter Sequential Transducers for Generative
Recommendations" (ICML 2024).
"""

from typing import Final

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from tpu_embedding.recommenders.unique_ids import expand
from tpu_embedding.tools.train.models.hstu.hstu_inputs import (
    HSTUInputs,
    Samples,
    append_candidate,
)
from tpu_embedding.tools.train.models.hstu.hstu_sizes import HSTUSizes
from tpu_embedding.tools.train.models.hstu.micro_batches import Remat, in_micro_batches
from tpu_embedding.tools.train.models.hstu.position_encoder import PositionEncoder
from tpu_embedding.tools.train.models.hstu.silu_attention import SequenceLengths
from tpu_embedding.tools.train.models.hstu.stu_layer import (
    DropoutKeys,
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

CLOCKS: Final = ((3600, 24), (86400, 7))
"""Unit in seconds, and units per turn, of the hour of the day and day of the week."""

PI: Final = 3.14
"""The benchmark's approximation of pi."""


class HSTU(nnx.Module):
    """Predicts the click on a candidate from a user's history.

        tokens = position_encoder([contextual | history | candidate])
        user = user_encoder(candidate's token after all layers)
        logit = head(user * item_mlp([item, artist, album]))

    The candidate follows the history directly, so that padding is always behind it.
    What runs once per sample, behind the layers, is computed in float32.

    Tokens and layers run for `HSTUSizes.micro_batch_size` samples at a time, and their
    backward pass computes them again. Dropout needs a random stream `dropout` and runs
    until `eval()` is called. Each sample has its own random key, so its dropout depends
    on no split of the batch, neither over devices nor into micro-batches.
    """

    def __init__(self, sizes: HSTUSizes, *, rngs: nnx.Rngs):
        dim, self.sizes = sizes.dim, sizes
        self.token_encoder = TokenEncoder(sizes, rngs=rngs)
        self.position_encoder = PositionEncoder(sizes, rngs=rngs)
        self.layers = nnx.List(
            STULayer(sizes, rngs=rngs) for _ in range(sizes.num_layers)
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
        self,
        inputs: HSTUInputs,
        *,
        normalizer: Int[Array, ""],
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, " batch"]:
        """Returns the logit of a click on each candidate, in float32.

        Args:
          inputs: rows, indices and times of the batch.
          normalizer: divisor of the attention's scores; see `longest_sequence`.
          dropout_key: key of the step, from `dropout_key`.
        """
        users = self.users(inputs, normalizer, dropout_key)
        return self.score(users, self.items(inputs))

    def dropout_key(self) -> Key[Array, ""] | None:
        """Draws the random key of a step; None without dropout, as after `eval()`."""
        if self.deterministic or self.dropout_stream is None:
            return None
        return self.dropout_stream()

    def users(
        self,
        inputs: HSTUInputs,
        normalizer: Int[Array, ""],
        dropout_key: Key[Array, ""] | None = None,
    ) -> Float[Array, "batch dim"]:
        """Returns the vector of each user in view of its candidate."""
        # In float32, the gradients of several micro-batches add up without a loss.
        content = self.token_encoder.content(inputs).astype(jnp.float32)

        def candidates(samples: Samples, remat: Remat) -> Float[Array, "samples dim"]:
            keys = self._dropout_keys(dropout_key, samples)
            lengths = self.sequence_lengths(samples, normalizer)
            tokens = self.token_encoder(content.astype(self.sizes.dtype), samples)
            x = self.encode(tokens, samples, lengths)
            x = dropout(x, self.sizes.input_dropout, keys.pop())
            *layers, last_layer = self.layers
            for layer in layers:
                x = remat(layer.__call__)(x, lengths, keys.pop())
            return remat(last_layer.candidate)(x, lengths, keys.pop())

        tokens = in_micro_batches(
            candidates, inputs.samples, self.sizes.micro_batch_size
        )
        return self.user_encoder(tokens, inputs.samples.query_times)

    def sequence_lengths(
        self, samples: Samples, normalizer: Int[Array, ""]
    ) -> SequenceLengths:
        """Returns the lengths of the sequences of tokens."""
        shared = self.sizes.num_contextual + samples.lengths
        return SequenceLengths(tokens=shared + 1, shared=shared, normalizer=normalizer)

    def encode(
        self, tokens: Tokens, samples: Samples, lengths: SequenceLengths
    ) -> Tokens:
        """Adds the places and ages of the tokens."""
        times = append_candidate(samples.times, samples.query_times, samples.lengths)
        times = jnp.pad(times, ((0, 0), (self.sizes.num_contextual, 0)))
        return self.position_encoder(tokens, lengths, times, samples.query_times)

    def items(self, inputs: HSTUInputs) -> Float[Array, "batch dim"]:
        """Returns the vector of each candidate."""
        index = inputs.samples.candidate[:, None]
        tables = (inputs.items, inputs.artists, inputs.albums)
        rows = [expand(rows, index, None)[:, 0] for rows in tables]
        return self.item_mlp(jnp.concatenate(rows, axis=1))

    def score(
        self, users: Float[Array, "batch dim"], items: Float[Array, "batch dim"]
    ) -> Float[Array, " batch"]:
        """Returns the logit of each pair of a user and an item."""
        return self.head(users * items)[:, 0]

    def _dropout_keys(
        self, dropout_key: Key[Array, ""] | None, samples: Samples
    ) -> list[DropoutKeys | None]:
        """Returns keys for the encoded tokens and for each layer; None: no dropout."""
        num_uses = 1 + self.sizes.num_layers
        if dropout_key is None:
            return [None] * num_uses

        def split(number: Array) -> Key[Array, " uses"]:
            return jax.random.split(jax.random.fold_in(dropout_key, number), num_uses)

        return list(jnp.swapaxes(jax.vmap(split)(samples.numbers), 0, 1))


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
