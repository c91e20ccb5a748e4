"""Running sums, and values held until the next, of long arrays of integers."""

from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

_BLOCK: Final = 128
"""Numbers of a block, the lanes of a TPU's register."""

_TERMS_PER_TURN: Final = 8
"""Numbers of each block that a turn of the loop adds."""


def running_sum(values: Int[Array, " n"]) -> Int[Array, " n"]:
    """Returns `jnp.cumsum(values)`, int32, within blocks first and then over these.

    All blocks at once, number by number in a loop. XLA:TPU takes 40 s to compile the
    plain one of 900,000 numbers, and some 10 s where it lays the windows of its own
    blocks across the registers; this takes 1 s everywhere.
    """
    return _scan(values.astype(jnp.int32), jnp.add, 0)


def forward_fill(values: Int[Array, " n"]) -> Int[Array, " n"]:
    """Replaces each negative number by the last one before it that is not negative.

    Negative numbers at the beginning become -1. int32, as in `running_sum`.
    """
    return _scan(
        values.astype(jnp.int32),
        lambda before, value: jnp.where(value < 0, before, value),
        -1,
    )


def _scan(
    values: Int[Array, " n"], combine: Callable[[Array, Array], Array], neutral: int
) -> Int[Array, " n"]:
    """Combines each number with all before it; `neutral` changes nothing."""
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
        unroll=_TERMS_PER_TURN,
    )
    of_blocks = _scan(totals, combine, neutral)
    before = jnp.pad(of_blocks[:-1], (1, 0), constant_values=neutral)
    return combine(before[:, None], within.T).reshape(-1)[:num_values]
