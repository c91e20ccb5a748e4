"""Adds the places and the ages of tokens to their vectors."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from tpu_embedding.tools.train.models.hstu.hstu_sizes import (
    SECONDS_PER_SQUARE,
    HSTUSizes,
)
from tpu_embedding.tools.train.models.hstu.silu_attention import SequenceLengths

Tokens = Float[Array, "batch length dim"]


class PositionEncoder(nnx.Module):
    """Returns `sqrt(dim) * token + position_table[position] + time_table[bucket]`.

    The position of a contextual token is its place. Of the others, candidates have
    position `num_contextual`, the event in front of them the next one, and so on;
    events that are too far away share the last row. The bucket is that of the time
    between the token and the candidates; see `time_buckets`.
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
            # a matrix product, too, where that of a gather adds row after row.
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
        """Returns rows of which each sample reads a window, and a place among them.

        Row `first - shared + i` is that of token `i`, if it is not a contextual one.
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

    A float32 square root is off by one near a limit; integers put that right.

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
