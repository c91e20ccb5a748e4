"""Ids of dynamic tables on the host: uint64 until the last step, then two words.

Ids of other tables are int32, so the dtype of checked ids tells the two apart.
"""

import dataclasses
from typing import Any, Final

import numpy as np

from tpu_embedding.inputs.fingerprints import encode, farmhash64
from tpu_embedding.plan.features import FeaturePlan
from tpu_embedding.types import (
    PADDING_ROW_ID,
    DenseIds,
    Ids64,
    RowIds,
    ShardedRaggedIds,
    UniqueIds,
)

NO_WIDE_ID: Final = np.uint64(2**64 - 1)
"""Marks a place without an id among uint64 ids."""


def padding_of(dtype: np.dtype) -> np.generic:
    """Returns what marks a place without an id among checked ids of this dtype."""
    return NO_WIDE_ID if dtype == np.uint64 else np.int32(PADDING_ROW_ID)


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
    if isinstance(ids, Ids64):
        return ids.to_numpy()
    if isinstance(ids, DenseIds) and isinstance(ids.ids, Ids64):
        return dataclasses.replace(ids, ids=ids.ids.to_numpy())
    return ids


def fingerprints_of(strings: np.ndarray) -> np.ndarray:
    """Returns FarmHash64 of strings, uint64 of the same shape.

    Two strings of 2**32 have equal ones with a probability near 1/2.

    Raises:
      TypeError: if an element is neither str nor bytes.
    """
    words = farmhash64(encode(strings.ravel())).reshape(strings.shape)
    # One string in 2**64 would be no id.
    return np.where(words == NO_WIDE_ID, NO_WIDE_ID - np.uint64(1), words)


def refuse_masked(ids: Any, feature: FeaturePlan) -> None:
    """Refuses masked places of a dynamic feature: no integer of its ids is free.

    Raises:
      TypeError: if a place is masked.
    """
    # A masked array has an attribute `ids` of its own.
    parts = (ids, getattr(ids, "ids", None), getattr(ids, "values", None))
    if any(isinstance(x, np.ma.MaskedArray) and np.ma.is_masked(x) for x in parts):
        raise TypeError(
            f"Ids of feature {feature.name!r}, whose table is dynamic, must have no "
            "masked places, got a masked array; give te.RaggedIds, or int32 ids with "
            f"{PADDING_ROW_ID} in unused places."
        )


def check_wide(
    ids: np.ndarray, holds_padding: bool, feature: FeaturePlan, where: str
) -> np.ndarray:
    """Returns the ids as uint64; places without an id hold `NO_WIDE_ID`.

    Args:
      ids: integers of any dtype. Negative ones are extended to 64 bits.
      holds_padding: True if `PADDING_ROW_ID` marks places among int32 ids.
      feature: says what becomes of the id with all bits set, which is reserved.
      where: name of a place, for errors.

    Raises:
      ValueError: if an id is the reserved one and the feature's policy is `"error"`.
    """
    # Narrow types such as int4 are none of NumPy's, so they pass through int64.
    wide = ids if ids.dtype == np.uint64 else ids.astype(np.int64).view(np.uint64)
    is_reserved = wide == NO_WIDE_ID
    if feature.config.out_of_range_ids == "error" and is_reserved.any():
        place = tuple(int(i) for i in np.argwhere(is_reserved)[0])
        raise ValueError(
            f"Ids of feature {feature.name!r} must not be 2**64 - 1 (-1 if signed), "
            f"which means 'no id' in a dynamic table, got {ids[place]} at {where} "
            f"{place}, and {int(is_reserved.sum())} such ids in all. Give it another "
            "id, or set FeatureConfig.out_of_range_ids to 'drop'."
        )
    if holds_padding and ids.dtype == np.int32:
        return np.where(ids == PADDING_ROW_ID, NO_WIDE_ID, wide)
    return wide.copy()


def with_words(ids: Any) -> Any:
    """Returns a prepared feature with `Ids64` in place of its uint64 array."""
    if isinstance(ids, DenseIds | UniqueIds):
        return dataclasses.replace(ids, ids=Ids64.of_array(ids.ids))
    if isinstance(ids, ShardedRaggedIds):
        return dataclasses.replace(ids, values=Ids64.of_array(ids.values))
    return Ids64.of_array(ids)
