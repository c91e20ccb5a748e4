"""Random bits of table elements, counted by row and column.

The bits of an element depend on the key, the row and the column. No order of rows, and
no number of devices, changes them. `jax.random` counts elements of a whole array
instead: a device that owns every eighth row would have to compute all of them.

The generator is Threefry-2x32 with 20 rounds, as `jax.random` has it, in integers. So
the bits are equal on every platform.
"""

import functools
from typing import Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

_ROTATIONS: Final = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY: Final = 0x1BD11BDA
"""Constant of the key schedule. Source: Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", 2011."""


def key_words(key: jax.Array) -> UInt32[Array, " 2"]:
    """Returns the two words of a Threefry key that stands for a key of any kind.

    Args:
      key: typed key, or the words of one. A Threefry key stands for itself; the words
        of a longer key are hashed.
    """
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    data = jax.random.key_data(key) if is_typed else key
    words = jnp.pad(data.reshape(-1), (0, data.size % 2)).reshape(-1, 2)
    first, second = words[0]
    for low, high in words[1:]:
        first, second = threefry(first, second, low, high)
    return jnp.stack([first, second])


@functools.partial(jax.jit, static_argnames="dim")
def row_bits(
    key: jax.Array, row_ids: Int[Array, " rows"], dim: int
) -> UInt32[Array, "rows dim"]:
    """Returns 32 random bits for each element of some rows.

    Args:
      key: random key of the table.
      row_ids: rows of the table, at least 0.
      dim: columns of the table. Tables of another `dim` have other bits.
    """
    first, second = key_words(key)
    half = -(-dim // 2)
    rows = jax.lax.broadcast_in_dim(
        row_ids.astype(jnp.uint32), (row_ids.shape[0], half), (0,)
    )
    columns = jax.lax.broadcasted_iota(jnp.uint32, rows.shape, 1)
    # One block of the generator has two words, for a column of either half.
    return jnp.concatenate(threefry(first, second, rows, columns), axis=1)[:, :dim]


def threefry(
    first_key: UInt32[Array, ""],
    second_key: UInt32[Array, ""],
    first: UInt32[Array, "*shape"],
    second: UInt32[Array, "*shape"],
) -> tuple[UInt32[Array, "*shape"], UInt32[Array, "*shape"]]:
    """Encrypts pairs of words with Threefry-2x32.

    The rounds are written out, so that XLA fuses them. `jax.random` rolls them into a
    loop on CPUs, which writes each round to memory.
    """
    keys = (first_key, second_key, first_key ^ second_key ^ jnp.uint32(_PARITY))
    first, second = first + keys[0], second + keys[1]
    for i in range(5):
        for rotation in _ROTATIONS[i % 2]:
            first = first + second
            left = second << jnp.uint32(rotation)
            second = first ^ (left | (second >> jnp.uint32(32 - rotation)))
        first = first + keys[(i + 1) % 3]
        second = second + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return first, second
