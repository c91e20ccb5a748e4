"""Running sums of long arrays of integers."""

from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

_BLOCK: Final = 128
"""Numbers of a block, the lanes of a TPU's register."""

_TERMS_PER_TURN: Final = 8
"""Numbers of each block that a turn of the loop adds."""


def running_sum(values: Int[Array, " n"]) -> Int[Array, " n"]:
    """Returns `jnp.cumsum(values)`, within blocks first and then over these.

    All blocks at once, number by number in a loop. XLA:TPU takes 40 s to compile the
    plain one of 900,000 numbers, and some 10 s where it lays the windows of its own
    blocks across the registers; this takes 1 s everywhere.
    """
    num_values = values.shape[0]
    num_blocks = -(-num_values // _BLOCK)
    if num_blocks <= 1:
        places = jnp.arange(num_values)
        is_before = places[None, :] <= places[:, None]
        return jnp.where(is_before, values, 0).sum(axis=1, dtype=jnp.int32)
    padded = jnp.pad(values, (0, num_blocks * _BLOCK - num_values))

    def add(sums, terms):
        sums = sums + terms
        return sums, sums

    totals, within = jax.lax.scan(
        add,
        jnp.zeros((num_blocks,), jnp.int32),
        padded.reshape(num_blocks, _BLOCK).T.astype(jnp.int32),
        unroll=_TERMS_PER_TURN,
    )
    before = running_sum(totals) - totals
    return (within.T + before[:, None]).reshape(-1)[:num_values]
