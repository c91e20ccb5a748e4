"""Running sums and forward fills of long integer arrays."""

from collections.abc import Callable
from typing import Final

import jax
import jax.export
import jax.numpy as jnp
from jaxtyping import Array, Int

_BLOCK: Final = 128
"""Numbers of a block: the lanes of a TPU's vector register."""

_UNROLL: Final = 8
"""Numbers of each block that one iteration of the loop adds."""


def running_sum(values: Int[Array, " n"]) -> Int[Array, " n"]:
    """Returns `jnp.cumsum(values)` as int32.

    XLA:TPU takes 10 to 40 s to compile `jnp.cumsum` of 900,000 numbers. This one takes
    1 s. It sums within blocks first, all blocks at once, and then over the blocks. A
    symbolic size, which a program for serving has, cannot be cut into blocks.
    """
    if jax.export.is_symbolic_dim(values.shape[0]):
        return jnp.cumsum(values, dtype=jnp.int32)
    return _scan(values.astype(jnp.int32), jnp.add, 0)


def forward_fill(values: Int[Array, " n"]) -> Int[Array, " n"]:
    """Replaces each negative number by the last number before it that is not negative.

    Negative numbers at the beginning become -1. The result is int32.
    """
    return _scan(
        values.astype(jnp.int32),
        lambda before, value: jnp.where(value < 0, before, value),
        -1,
    )


def _scan(
    values: Int[Array, " n"], combine: Callable[[Array, Array], Array], neutral: int
) -> Int[Array, " n"]:
    """Combines each number with all numbers before it.

    Args:
      values: the numbers.
      combine: an associative function.
      neutral: neutral element of the operation.
    """
    num_values = values.shape[0]
    if num_values <= _BLOCK:
        return jax.lax.associative_scan(combine, combine(jnp.int32(neutral), values))
    num_blocks = -(-num_values // _BLOCK)
    padded = jnp.pad(
        values, (0, num_blocks * _BLOCK - num_values), constant_values=neutral
    )

    def add(so_far, terms):
        so_far = combine(so_far, terms)
        return so_far, so_far

    totals, within = jax.lax.scan(
        add,
        jnp.full((num_blocks,), neutral, jnp.int32),
        padded.reshape(num_blocks, _BLOCK).T,
        unroll=_UNROLL,
    )
    block_results = _scan(totals, combine, neutral)
    before = jnp.pad(block_results[:-1], (1, 0), constant_values=neutral)
    return combine(before[:, None], within.T).reshape(-1)[:num_values]
