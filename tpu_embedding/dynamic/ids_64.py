"""Ids of 64 bits as pairs of words, which JAX can hold."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.types import IdArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ids64:
    """Ids of 64 bits, for dynamic tables. It stands wherever an array of ids may stand.

    JAX has no integers of 64 bits by default, so each id is two words. Signed and
    unsigned integers of equal bits are one id. `prepare` makes it of int64 and uint64
    arrays. The id with all bits set, `2**64 - 1` or -1, means "no id".

    Attributes:
      high: uint32, the upper words of the ids.
      low: uint32, the lower words; of the shape of `high`.
    """

    high: IdArray
    low: IdArray

    @classmethod
    def of_array(cls, ids: Any) -> "Ids64":
        """Makes the words of an integer array, NumPy or JAX.

        Args:
          ids: integers of any shape. Negative ones of 32 bits are extended to 64.

        Raises:
          TypeError: if they are no integers.

        Example:
          >>> Ids64.of_array(np.array([5, 2**40 + 1])).high.tolist()
          [0, 256]
        """
        xp: Any = jnp if isinstance(ids, jax.Array) else np
        ids = xp.asarray(ids)
        if not xp.issubdtype(ids.dtype, np.integer):
            raise TypeError(f"Ids64.of_array takes integers, got dtype {ids.dtype}.")
        if ids.dtype.itemsize == 8:
            low, high = ids & 0xFFFFFFFF, ids >> 32
        else:
            low = ids
            high = xp.where(ids < 0, -1, 0).astype(np.int32)
        return cls(high=high.astype(np.uint32), low=low.astype(np.uint32))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array of ids."""
        return self.high.shape

    @property
    def ndim(self) -> int:
        """Number of its axes."""
        return self.high.ndim

    @property
    def dtype(self) -> np.dtype:
        """Type that holds the ids whole: uint64."""
        return np.dtype(np.uint64)

    def to_numpy(self) -> np.ndarray:
        """Returns the ids as NumPy uint64."""
        high, low = (np.asarray(x, np.uint64) for x in (self.high, self.low))
        return (high << np.uint64(32)) | low


def truncated_ids(found: str, feature: FeaturePlan) -> TypeError:
    """Returns the error for integers that may be the lower halves of ids.

    Args:
      found: form of the integers.
      feature: feature of a dynamic table.
    """
    return TypeError(
        f"Feature {feature.name!r} of a table with a te.Dynamic vocabulary must hold "
        f"Ids64, got {found}. JAX keeps only the lower half of an int64, so pass the "
        "ids through prepare first, as NumPy arrays, or through "
        "te.functional.Ids64.of_array before jit. If they never had more than 32 bits, "
        "give np.asarray(ids) to prepare."
    )
