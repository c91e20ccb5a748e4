"""The dense part of MLPerf Training's `dlrm_v4_hstu`: a click model over histories.

It reads rows of tables and has no embedding layer. See Zhai et al., "Actions Speak
Louder than Words: Trillion-Parameter Sequential Transducers for Generative
Recommendations" (ICML 2024).

The candidate follows the last event of the history directly. So all tokens of a sample
are adjacent, and padding follows them. The content of a token depends on its item
alone. So the MLPs of the content run once per unique item, and one expansion places the
results.
"""

import dataclasses
import math
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hstu_layers import (
    SECONDS_PER_SQUARE,
    DropoutKeys,
    HSTUSizes,
    NormalizedSwishMLP,
    Remat,
    SequenceLengths,
    STULayer,
    SwishMLP,
    Tokens,
    dropout,
    in_micro_batches,
    layer_norm,
    xavier_normal,
    xavier_uniform,
)
from jaxtyping import Array, Float, Int, Key

import tpu_embedding as te


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples:
    """Rows, indices and times of some samples.

    Attributes:
      numbers: number of each sample in the batch, on which its dropout depends.
      contextual: one row per contextual feature and sample.
      history: unique item of each event, from the earliest to the latest; padding
        follows.
      lengths: number of events of each history, from 0 to the width of `history`.
      candidate: unique item of each candidate.
      actions: bits of the action of each event in the history.
      times: time of each event in the history, in seconds.
      query_times: time of each candidate, in seconds.
    """

    numbers: Int[Array, " batch"]
    contextual: Float[Array, "batch contextual dim"]
    history: Int[Array, "batch events"]
    lengths: Int[Array, " batch"]
    candidate: Int[Array, " batch"]
    actions: Int[Array, "batch events"]
    times: Int[Array, "batch events"]
    query_times: Int[Array, " batch"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class HSTUInputs:
    """The samples of a batch, and the unique rows that they index.

    Attributes:
      items: row of each unique item.
      artists: row of the artist of each unique item.
      albums: row of the album of each unique item.
      samples: the samples.
    """

    items: Float[Array, "unique dim"]
    artists: Float[Array, "unique dim"]
    albums: Float[Array, "unique dim"]
    samples: Samples


def append_candidate(
    history: Int[Array, "batch events"],
    candidate: Int[Array, " batch"],
    lengths: Int[Array, " batch"],
) -> Int[Array, "batch events_and_candidate"]:
    """Returns the history with the candidate after its last event.

    Example:
      >>> history = jnp.array([[7, 8], [7, -1]])
      >>> append_candidate(history, jnp.array([4, 5]), jnp.array([2, 1])).tolist()
      [[7, 8, 4], [7, 5, 0]]
    """
    events = jnp.pad(history, ((0, 0), (0, 1)))
    is_candidate = jnp.arange(events.shape[1])[None, :] == lengths[:, None]
    return jnp.where(is_candidate, candidate[:, None], events)


def longest_sequence(
    history_lengths: Int[Array, " batch"], num_contextual: int
) -> Int[Array, ""]:
    """Returns the benchmark's `N`: tokens of the longest sample of the global batch.

    Args:
      history_lengths: lengths of all histories of the step, over all micro-batches.
      num_contextual: number of contextual tokens.
    """
    return jnp.max(history_lengths) + num_contextual + 1


NUM_ACTION_BITS: Final = 3
"""Bits of an action, from the lowest: listened, liked, skipped."""

ACTION_DIM: Final = 8
"""Dimension of the vector of each bit."""

ACTION_DEVIATION: Final = 0.1
"""Standard deviation of the initial vectors of actions."""


class TokenEncoder(nnx.Module):
    """Makes the tokens `[contextual tokens | history | candidate]`.

        event: content_mlp(item) + additional_mlp([artist, album]) + action_mlp(action)
        contextual token c: row_c @ contextual.kernel_c + contextual.bias_c

    The candidate is also an event, with an action of its own.
    """

    def __init__(self, sizes: HSTUSizes, *, rngs: nnx.Rngs):
        dim, options = sizes.dim, {"kernel_init": xavier_normal, "rngs": rngs}
        options["dtype"] = jnp.dtype(sizes.dtype)
        self.content_mlp, self.additional_mlp, self.action_mlp = (
            NormalizedSwishMLP(num_inputs, sizes.token_hidden_size, dim, **options)
            for num_inputs in (dim, 2 * dim, NUM_ACTION_BITS * ACTION_DIM)
        )
        self.action = ActionEncoder(rngs=rngs)
        self.contextual = ContextualLinear(sizes, rngs=rngs)

    def content(self, inputs: HSTUInputs) -> Float[Array, "unique dim"]:
        """Returns the content of each unique item, in the compute dtype."""
        artists_and_albums = jnp.concatenate([inputs.artists, inputs.albums], axis=1)
        return self.content_mlp(inputs.items) + self.additional_mlp(artists_and_albums)

    def __call__(
        self, content: Float[Array, "unique dim"], samples: Samples
    ) -> Float[Array, "batch length dim"]:
        """Returns the tokens, in the compute dtype; zero at padding.

        Args:
          content: content of each unique item.
          samples: the samples.
        """
        index = append_candidate(samples.history, samples.candidate, samples.lengths)
        actions = self.action_mlp(self.action.encodings())
        # A product with a matrix of zeros and ones: its derivative by the few encodings
        # is also a matrix product, which adds up in float32.
        one_hot = jax.nn.one_hot(
            self.action.index(samples.actions, samples.lengths),
            len(actions),
            dtype=actions.dtype,
        )
        tokens = te.functional.expand(content, index, None) + jnp.einsum(
            "bla,ad->bld", one_hot, actions, precision=jax.lax.Precision.HIGHEST
        )
        is_event = jnp.arange(index.shape[1])[None, :] <= samples.lengths[:, None]
        tokens = jnp.where(is_event[:, :, None], tokens, jnp.zeros_like(tokens))
        return jnp.concatenate([self.contextual(samples.contextual), tokens], axis=1)


class ActionEncoder(nnx.Module):
    """Encodes the bits of an action by the vectors of those that are set.

    There are `2 ** NUM_ACTION_BITS` actions, and the one of a candidate, which is
    unknown and has a vector of its own.
    """

    def __init__(self, *, rngs: nnx.Rngs):
        self.table, self.target = (
            nnx.Param(ACTION_DEVIATION * jax.random.normal(rngs.params(), shape))
            for shape in (
                (NUM_ACTION_BITS, ACTION_DIM),
                (NUM_ACTION_BITS * ACTION_DIM,),
            )
        )

    def encodings(self) -> Float[Array, "actions encoding"]:
        """Returns the encodings of all actions, and then the candidate's."""
        actions = np.arange(2**NUM_ACTION_BITS)[:, None]
        is_set = (actions >> np.arange(NUM_ACTION_BITS)) & 1
        vectors = is_set[:, :, None] * self.table[...][None]
        known = vectors.reshape(len(actions), NUM_ACTION_BITS * ACTION_DIM)
        return jnp.concatenate([known, self.target[...][None]])

    def index(
        self, actions: Int[Array, "batch events"], lengths: Int[Array, " batch"]
    ) -> Int[Array, "batch events_and_candidate"]:
        """Returns the encoding of each event, and of the candidate after the last one.

        Args:
          actions: bits of each event's action; unknown bits are ignored.
          lengths: number of events of each sample.
        """
        num_actions = 2**NUM_ACTION_BITS
        candidate = jnp.full(lengths.shape, num_actions, actions.dtype)
        return append_candidate(actions & (num_actions - 1), candidate, lengths)


class ContextualLinear(nnx.Module):
    """One linear layer per contextual feature."""

    def __init__(self, sizes: HSTUSizes, *, rngs: nnx.Rngs):
        dim, num_contextual = sizes.dim, sizes.num_contextual
        normal = jax.random.normal(rngs.params(), (num_contextual, dim, dim))
        self.kernel = nnx.Param(normal * (2 / (dim + dim)) ** 0.5)
        self.bias = nnx.Param(jnp.zeros((num_contextual, dim)))
        self.dtype = jnp.dtype(sizes.dtype)

    def __call__(
        self, rows: Float[Array, "batch contextual dim"]
    ) -> Float[Array, "batch contextual dim"]:
        """Returns one token per row, in the compute dtype."""
        rows, kernel, bias = (
            x.astype(self.dtype) for x in (rows, self.kernel[...], self.bias[...])
        )
        return jnp.einsum("bcd,cde->bce", rows, kernel) + bias[None]


class PositionEncoder(nnx.Module):
    """Returns `sqrt(dim) * token + position_table[position] + time_table[bucket]`.

    The position of a contextual token is its index. Candidates have the position
    `num_contextual`, the event before them the next one, and so on; events that are too
    far away share the last row. The bucket holds the time between the token and the
    candidates; see `time_buckets`.
    """

    def __init__(self, sizes: HSTUSizes, *, rngs: nnx.Rngs):
        dim, positions, buckets = sizes.dim, sizes.num_positions, sizes.num_time_buckets
        self.position_table = nnx.Param(_uniform(rngs, (positions, dim), positions))
        # The last bucket holds all greater ages, and does not count in the limit.
        self.time_table = nnx.Param(_uniform(rngs, (buckets + 1, dim), buckets))
        self.num_contextual = sizes.num_contextual
        self.block_size, self.dtype = sizes.block_size, jnp.dtype(sizes.dtype)

    def __call__(
        self,
        tokens: Tokens,
        lengths: SequenceLengths,
        times: Int[Array, "batch length"],
        query_times: Int[Array, " batch"],
    ) -> Tokens:
        """Returns the encoded tokens in the compute dtype; finite at padding.

        Args:
          tokens: one vector per token.
          lengths: lengths of the sequences.
          times: time of each token, in seconds; 0 for contextual tokens.
          query_times: time of each sample's candidates, in seconds.
        """
        buckets = time_buckets(
            query_times[:, None] - times, self.time_table.shape[0] - 1
        )
        rows = self._rows(lengths.shared, buckets)
        return (math.sqrt(tokens.shape[2]) * tokens + rows).astype(self.dtype)

    def _rows(
        self, shared: Int[Array, " batch"], buckets: Int[Array, "batch length"]
    ) -> Tokens:
        """Returns the sum of both rows of each token.

        Blocks of tokens go one after the other. So derivatives by the tables add up in
        float32 without a float32 array of all tokens.
        """
        batch, length = buckets.shape
        size = min(self.block_size, length)
        num_blocks = -(-length // size)
        padding = ((0, 0), (0, num_blocks * size - length))
        blocks = jnp.pad(buckets, padding).reshape(batch, num_blocks, size)
        descending, first = self._descending_positions(num_blocks * size)
        contextual = self.position_table[...][: self.num_contextual]
        time_table = self.time_table[...]

        @jax.checkpoint
        def rows_of_block(inputs: tuple[Array, Array]) -> Array:
            block, buckets = inputs
            start = block * size

            def window(shared: Array) -> Array:
                return jax.lax.dynamic_slice_in_dim(
                    descending, first - shared + start, size
                )

            positions = jax.vmap(window)(shared)
            place = start + jnp.arange(size)
            own = jnp.take(contextual, place, axis=0, mode="fill", fill_value=0)
            is_contextual = place < self.num_contextual
            positions = jnp.where(is_contextual[None, :, None], own[None], positions)
            # A product with a matrix of zeros and ones: its derivative by the table is
            # also a matrix product. The derivative of a gather adds row after row.
            one_hot = jax.nn.one_hot(buckets, len(time_table), dtype=self.dtype)
            times = jnp.einsum(
                "blt,td->bld",
                one_hot,
                time_table.astype(self.dtype),
                precision=jax.lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            )
            return (positions + times).astype(self.dtype)

        inputs = (jnp.arange(num_blocks), jnp.swapaxes(blocks, 0, 1))
        rows = jnp.swapaxes(jax.lax.map(rows_of_block, inputs), 0, 1)
        return rows.reshape(batch, num_blocks * size, -1)[:, :length]

    def _descending_positions(
        self, length: int
    ) -> tuple[Float[Array, "places dim"], int]:
        """Returns rows that each sample reads a window of, and the index of the first.

        Token `i` reads row `first - shared + i`, unless it is a contextual one.
        Positions descend by 1 per token. So the tokens of a block read rows that follow
        each other, and the derivative adds whole blocks of rows.
        """
        rows = jnp.flip(self.position_table[...][self.num_contextual :], axis=0)
        before = max(0, length - (len(rows) - 1))
        rows = jnp.pad(rows, ((before, length - 1), (0, 0)), mode="edge")
        return rows, before + self.position_table.shape[0] - self.num_contextual - 1


def time_buckets(
    seconds: Int[Array, "*shape"], num_buckets: int
) -> Int[Array, "*shape"]:
    """Returns the largest `k` with `60 * k ** 2 <= seconds`, from 0 to `num_buckets`.

    A float32 square root is off by one near a limit; integers correct it.

    Args:
      seconds: ages; negative ones are in bucket 0.
      num_buckets: largest bucket, at most `MAX_TIME_BUCKETS`.

    Example:
      >>> time_buckets(jnp.array([-5, 0, 59, 60, 239, 240, 10**6]), 100).tolist()
      [0, 0, 0, 1, 1, 2, 100]
    """
    ages = jnp.maximum(seconds, 0)
    root = jnp.sqrt(ages.astype(jnp.float32) / SECONDS_PER_SQUARE)
    bucket = jnp.minimum(root, num_buckets).astype(ages.dtype)
    bucket -= SECONDS_PER_SQUARE * bucket * bucket > ages
    bucket += SECONDS_PER_SQUARE * (bucket + 1) * (bucket + 1) <= ages
    return jnp.minimum(bucket, num_buckets)


def _uniform(rngs: nnx.Rngs, shape: tuple[int, int], count: int) -> jax.Array:
    limit = count**-0.5
    return jax.random.uniform(rngs.params(), shape, minval=-limit, maxval=limit)


CLOCKS: Final = ((3600, 24), (86400, 7))
"""Unit in seconds, and units per turn, of the hour of the day and day of the week."""

PI: Final = 3.14
"""The benchmark's approximation of pi."""


class HSTU(nnx.Module):
    """Predicts the click on a candidate from a user's history.

        tokens = position_encoder([contextual | history | candidate])
        user = user_encoder(candidate's token after all layers)
        logit = head(user * item_mlp([item, artist, album]))

    The candidate follows the history directly, so padding always comes after it. What
    runs once per sample, after the layers, is computed in float32.

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
        rows = [te.functional.expand(rows, index, None)[:, 0] for rows in tables]
        return self.item_mlp(jnp.concatenate(rows, axis=1))

    def score(
        self, users: Float[Array, "batch dim"], items: Float[Array, "batch dim"]
    ) -> Float[Array, " batch"]:
        """Returns the logit of each pair of a user and an item."""
        return self.head(users * items)[:, 0]

    def _dropout_keys(
        self, dropout_key: Key[Array, ""] | None, samples: Samples
    ) -> list[DropoutKeys | None]:
        """Returns keys for the encoded tokens and each layer, or a None for each."""
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
