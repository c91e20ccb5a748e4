"""Makes the tokens of a sequence: contextual ones, the history, and the candidate.

The content of a token depends on its item alone. So the MLPs of the content run once
per unique item, and one expansion places the results.
"""

from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from tpu_embedding.recommenders.unique_ids import expand
from tpu_embedding.tools.train.models.hstu.hstu_inputs import (
    HSTUInputs,
    Samples,
    append_candidate,
)
from tpu_embedding.tools.train.models.hstu.hstu_sizes import HSTUSizes
from tpu_embedding.tools.train.models.hstu.swish_mlp import (
    NormalizedSwishMLP,
    xavier_normal,
)

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

    The candidate is an event, too, with an action of its own.
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
        # is a matrix product, too, which adds up in float32.
        one_hot = jax.nn.one_hot(
            self.action.index(samples.actions, samples.lengths),
            len(actions),
            dtype=actions.dtype,
        )
        tokens = expand(content, index, None) + jnp.einsum(
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
        """Returns the encodings of all actions, and the candidate's behind them."""
        actions = np.arange(2**NUM_ACTION_BITS)[:, None]
        is_set = (actions >> np.arange(NUM_ACTION_BITS)) & 1
        vectors = is_set[:, :, None] * self.table[...][None]
        known = vectors.reshape(len(actions), NUM_ACTION_BITS * ACTION_DIM)
        return jnp.concatenate([known, self.target[...][None]])

    def index(
        self, actions: Int[Array, "batch events"], lengths: Int[Array, " batch"]
    ) -> Int[Array, "batch events_and_candidate"]:
        """Returns the encoding of each event, and of the candidate behind the last one.

        Args:
          actions: bits of each event's action; others than the known bits are ignored.
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
