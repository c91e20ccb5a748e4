"""Mixes 64-bit ids to pairs of words that look random, one to one.

A hash that can be undone keeps ids exact: equal words mean equal ids. The network is
that of Feistel with four rounds: each round replaces one word by its exclusive or with
a function of the other. All functions take NumPy or JAX arrays of uint32.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embedding.rows.narrow_rows import mix_bits

_ROUND_KEYS: Final = (0x9E3779B9, 0x7F4A7C15, 0xF39CC060, 0x5CEDC834)
"""Words of the fraction of the golden ratio."""

NO_ID: Final = np.uint32(0xFFFFFFFF)
"""Both words of a lane without an id, before and after mixing."""


def mix_ids(high: Any, low: Any) -> tuple[Any, Any]:
    """Returns the mixed words of ids, uint32 like the arguments; no id stays no id.

    Example:
      >>> words = mix_ids(np.uint32([0]), np.uint32([7]))
      >>> [word.tolist() for word in unmix_ids(*words)]
      [[0], [7]]
    """
    return _exchange(*_forward(high, low))


def unmix_ids(first: Any, second: Any) -> tuple[Any, Any]:
    """Returns the words `(high, low)` of mixed ids; the inverse of `mix_ids`."""
    high, low = _exchange(first, second)
    for key in reversed(_ROUND_KEYS):
        high, low = low ^ mix_bits(high ^ np.uint32(key)), high
    return high, low


def _forward(high: Any, low: Any) -> tuple[Any, Any]:
    for key in _ROUND_KEYS:
        high, low = low, high ^ mix_bits(low ^ np.uint32(key))
    return high, low


def _exchange(first: Any, second: Any) -> tuple[Any, Any]:
    """Exchanges "no id" and the words that the network makes of it."""
    is_none = (first == NO_ID) & (second == NO_ID)
    is_image = (first == _IMAGE[0]) & (second == _IMAGE[1])
    xp = jnp if isinstance(first, jax.Array) else np
    return (
        xp.where(is_none, _IMAGE[0], xp.where(is_image, NO_ID, first)),
        xp.where(is_none, _IMAGE[1], xp.where(is_image, NO_ID, second)),
    )


def multiply_high(words: Any, factor: int) -> Any:
    """Returns `words * factor >> 32`: a number below `factor` that rises with the word.

    Args:
      words: uint32.
      factor: below 2**31.
    """
    word_low, word_high = words & np.uint32(0xFFFF), words >> np.uint32(16)
    low, high = np.uint32(factor & 0xFFFF), np.uint32(factor >> 16)
    middle = word_high * low + ((word_low * low) >> np.uint32(16))
    # Neither sum reaches 2**32: a product of two 16-bit numbers leaves room for two.
    carried = (middle & np.uint32(0xFFFF)) + word_low * high
    upper = word_high * high + (middle >> np.uint32(16)) + (carried >> np.uint32(16))
    return upper.astype(np.int32)


_IMAGE: Final = tuple(
    word[0] for word in _forward(np.array([NO_ID]), np.array([NO_ID]))
)
"""The words that the network alone makes of "no id"."""
