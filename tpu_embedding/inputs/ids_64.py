"""Ids of dynamic tables on the host: uint64 until the last step, then two words.

Ids of other tables are int32, so the dtype of checked ids tells the two apart.
"""

from collections.abc import Iterator
from typing import Any, Final

import jax
import numpy as np

from tpu_embedding.inputs.containers import is_integer
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.types import (
    PADDING_ROW_ID,
    DenseIds,
    Ids64,
    RowIds,
    ids_of,
    with_ids,
)

NO_ID_64: Final = np.uint64(2**64 - 1)
"""Marks a position without an id among uint64 ids."""

_PARTS: Final = (list, tuple, np.ndarray, jax.Array)


def padding_of(dtype: np.dtype) -> np.generic:
    """Returns what marks a position without an id among checked ids of this dtype."""
    return NO_ID_64 if dtype == np.uint64 else np.int32(PADDING_ROW_ID)


def join_words(ids: Any, feature: FeaturePlan) -> Any:
    """Returns ids that are words already as uint64; all others as they are.

    Raises:
      TypeError: if the rows of the feature's ids are known already.
    """
    if isinstance(ids, RowIds):
        raise TypeError(
            f"Feature {feature.name!r} holds RowIds, whose rows are known already; "
            "prepare takes ids."
        )
    words = ids.ids if isinstance(ids, DenseIds) else ids
    return with_ids(ids, words.to_numpy()) if isinstance(words, Ids64) else ids


def refuse_unreadable(ids: Any, feature: FeaturePlan) -> None:
    """Refuses arrays of JAX that may hold only the lower halves of ids.

    Raises:
      TypeError: if there is one.
    """
    for array in _arrays_in(ids):
        is_of_jax = isinstance(array, jax.Array)
        if is_of_jax and is_integer(array.dtype) and array.dtype.itemsize < 8:
            raise truncated_ids(f"a JAX array of {array.dtype}", feature)


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


def _arrays_in(ids: Any) -> Iterator[Any]:
    """Yields the arrays of ids in a container."""
    if isinstance(ids, list | tuple):
        # One look at each type is much faster than one at each item.
        if any(issubclass(x, _PARTS) for x in set(map(type, ids))):
            for part in ids:
                yield from _arrays_in(part)
        return
    yield ids
    for name in ("ids", "values"):
        part = getattr(ids, name, None)
        if part is not None:
            yield from _arrays_in(part)


def check_ids_64(
    ids: np.ndarray, holds_padding: bool, feature: FeaturePlan, where: str
) -> np.ndarray:
    """Returns the ids as uint64; positions without an id hold `NO_ID_64`.

    Args:
      ids: integers of any dtype. Negative ones are extended to 64 bits.
      holds_padding: True if `PADDING_ROW_ID` marks positions among int32 ids.
      feature: says what becomes of the id with all bits set, which is reserved.
      where: name of a position, for errors.

    Raises:
      ValueError: if an id is the reserved one and the feature's policy is `"error"`.
    """
    # Types such as int4 are none of NumPy's, so they pass through int64.
    as_uint64 = ids if ids.dtype == np.uint64 else ids.astype(np.int64).view(np.uint64)
    is_reserved = as_uint64 == NO_ID_64
    if feature.config.out_of_range_ids == "error" and is_reserved.any():
        position = tuple(int(i) for i in np.argwhere(is_reserved)[0])
        raise ValueError(
            f"Ids of feature {feature.name!r} must not be 2**64 - 1 (-1 if signed), "
            f"which means 'no id' in a dynamic table, got {ids[position]} at "
            f"{where} {position}, and {int(is_reserved.sum())} such ids in all. Give "
            "it another id, or set FeatureConfig.out_of_range_ids to 'drop'."
        )
    if holds_padding and ids.dtype == np.int32:
        return np.where(ids == PADDING_ROW_ID, NO_ID_64, as_uint64)
    return as_uint64.copy()


def with_words(ids: Any) -> Any:
    """Returns a prepared feature with `Ids64` in place of its uint64 array."""
    return with_ids(ids, Ids64.of_array(ids_of(ids)))
