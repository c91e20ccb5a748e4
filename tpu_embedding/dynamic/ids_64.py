"""64-bit ids as pairs of 32-bit words.

A directory stores mixed ids. Their words look random, which spreads ids over buckets.
The mixing, a four-round Feistel network, is invertible, so each pair stands for exactly
one id.
"""

import dataclasses
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.rows.narrow_rows import mix_bits
from tpu_embedding.types import IdArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ids64:
    """64-bit ids for dynamic tables. Pass them wherever ids can be an array.

    JAX has no 64-bit integers by default, so each id is two words. Signed and unsigned
    integers with equal bits are the same id. `prepare` makes `Ids64` if you pass int64
    or uint64 arrays. The id with all bits set (`2**64 - 1`, or -1 if signed) means "no
    id".

    Attributes:
      high: uint32, upper words.
      low: uint32, lower words, same shape as `high`.

    Example:
      >>> ids = Ids64.of_array(np.array([5, 2**40]))
      >>> ids.to_numpy().tolist()
      [5, 1099511627776]
    """

    high: IdArray
    low: IdArray

    @classmethod
    def of_array(cls, ids: Any) -> "Ids64":
        """Splits a NumPy or JAX integer array into words.

        Args:
          ids: integers of any shape. Narrower negative integers are sign-extended.

        Raises:
          TypeError: if the ids are not integers.

        Example:
          >>> Ids64.of_array(np.array([5, 2**40 + 1])).high.tolist()
          [0, 256]
        """
        xp: Any = jnp if isinstance(ids, jax.Array) else np
        ids = xp.asarray(ids)
        if not xp.issubdtype(ids.dtype, np.integer):
            raise TypeError(f"Ids64.of_array needs integers, got dtype {ids.dtype}.")
        if ids.dtype.itemsize == 8:
            # On signed ids, the arithmetic shift keeps the sign bits in the upper word.
            low, high = ids & 0xFFFFFFFF, ids >> 32
        else:
            low = ids
            high = xp.where(ids < 0, -1, 0).astype(np.int32)
        return cls(high=high.astype(np.uint32), low=low.astype(np.uint32))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the id array."""
        return self.high.shape

    @property
    def ndim(self) -> int:
        """Number of axes of the id array."""
        return self.high.ndim

    @property
    def dtype(self) -> np.dtype:
        """Type of whole ids: uint64."""
        return np.dtype(np.uint64)

    def to_numpy(self) -> np.ndarray:
        """Joins the words into NumPy uint64 ids."""
        high, low = (np.asarray(x, np.uint64) for x in (self.high, self.low))
        return (high << np.uint64(32)) | low


def truncated_ids(form: str, feature: FeaturePlan) -> TypeError:
    return TypeError(
        f"Feature {feature.name!r} of a te.Dynamic table must hold Ids64, got {form}: "
        "JAX keeps only the lower half of an int64. Pass NumPy ids through prepare, or "
        "te.functional.Ids64.of_array, before jit. JAX ids that never had more than 32 "
        "bits go into prepare as np.asarray(ids)."
    )


_ROUND_KEYS: Final = (0x9E3779B9, 0x7F4A7C15, 0xF39CC060, 0x5CEDC834)
"""Key of each mixing round, from the golden ratio's fraction."""

NO_ID: Final = np.uint32(0xFFFFFFFF)
"""Value of both words of "no id", before and after mixing."""


def mix_ids(high: Any, low: Any) -> tuple[Any, Any]:
    """Mixes NumPy or JAX ids into two uint32 words. "No id" is mapped to itself.

    Example:
      >>> words = mix_ids(np.uint32([0]), np.uint32([7]))
      >>> [word.tolist() for word in unmix_ids(*words)]
      [[0], [7]]
    """
    return _exchange(*_forward(high, low))


def unmix_ids(first: Any, second: Any) -> tuple[Any, Any]:
    """Inverts `mix_ids`: maps mixed words to `(high, low)`."""
    high, low = _exchange(first, second)
    for key in reversed(_ROUND_KEYS):
        high, low = low ^ mix_bits(high ^ np.uint32(key)), high
    return high, low


def _forward(high: Any, low: Any) -> tuple[Any, Any]:
    for key in _ROUND_KEYS:
        high, low = low, high ^ mix_bits(low ^ np.uint32(key))
    return high, low


def _exchange(first: Any, second: Any) -> tuple[Any, Any]:
    # Swaps "no id" with its image under the network, so that mixing maps "no id" to
    # itself. The swap is its own inverse, so `unmix_ids` also uses it.
    is_none = (first == NO_ID) & (second == NO_ID)
    is_image = (first == _IMAGE[0]) & (second == _IMAGE[1])
    xp = jnp if isinstance(first, jax.Array) else np
    return (
        xp.where(is_none, _IMAGE[0], xp.where(is_image, NO_ID, first)),
        xp.where(is_none, _IMAGE[1], xp.where(is_image, NO_ID, second)),
    )


def multiply_high(words: Any, factor: int) -> Any:
    """Maps uint32 words to `words * factor >> 32`, a monotonic function.

    Results are below `factor`, which must be below 2**31.
    """
    # Multiplies 16-bit halves, because JAX has no 64-bit product by default.
    word_low, word_high = words & np.uint32(0xFFFF), words >> np.uint32(16)
    low, high = np.uint32(factor & 0xFFFF), np.uint32(factor >> 16)
    middle = word_high * low + ((word_low * low) >> np.uint32(16))
    # No sum overflows: the product of two 16-bit numbers plus two more such numbers
    # fits in 32 bits.
    carried = (middle & np.uint32(0xFFFF)) + word_low * high
    upper = word_high * high + (middle >> np.uint32(16)) + (carried >> np.uint32(16))
    return upper.astype(np.int32)


_IMAGE: Final = tuple(
    word[0] for word in _forward(np.array([NO_ID]), np.array([NO_ID]))
)
"""Words that the mixing network makes from "no id"."""
