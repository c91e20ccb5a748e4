"""The ids of a dynamic table as an export holds them.

A program finds ids by their bucket, so beside its rows lie the lines of keys: the mixed
words of 64 ids per bucket, and the row of an id is `64 * bucket + place`. Files for
other readers hold the ids themselves, rising, and their rows in that order. A learned
default row is the last one of both.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from tpu_embedding.dynamic import SLOTS_PER_BUCKET
from tpu_embedding.functional.dynamic_ids import DynamicRows
from tpu_embedding.plan.dynamic_rows import DynamicTablePlan
from tpu_embedding.rows.id_directory import LINE_LANES
from tpu_embedding.rows.id_mixing import NO_ID, mix_ids
from tpu_embedding.types import Ids64


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredIds:
    """The ids of a dynamic table in an export.

    Attributes:
      tensor: the ids; see `lines_of_buckets` and `rising_ids`.
      places: int64 `[rows]`, row in the export of each row of the table; -1: none.
      num_rows: rows in the export.
      num_ids: ids that have rows.
    """

    tensor: np.ndarray
    places: np.ndarray
    num_rows: int
    num_ids: int


StoreIds = Callable[[DynamicRows, DynamicTablePlan], StoredIds]


def lines_of_buckets(found: DynamicRows, member: DynamicTablePlan) -> StoredIds:
    """Returns the lines of keys, uint32 `[buckets, 128]`; empty places are all ones."""
    lines = np.full((member.num_buckets, LINE_LANES), NO_ID, np.uint32)
    words = Ids64.of_array(found.ids)
    first, second = mix_ids(np.asarray(words.high), np.asarray(words.low))
    bucket, lane = np.divmod(found.natural_rows, SLOTS_PER_BUCKET)
    lines[bucket, lane], lines[bucket, lane + SLOTS_PER_BUCKET] = first, second
    return _stored(lines, found, found.natural_rows, member.dynamic.num_places, member)


def rising_ids(found: DynamicRows, member: DynamicTablePlan) -> StoredIds:
    """Returns the ids, uint64 `[ids]`, rising."""
    num_ids = len(found.ids)
    return _stored(found.ids, found, np.arange(num_ids), num_ids, member)


def _stored(
    tensor: np.ndarray,
    found: DynamicRows,
    places_of_ids: np.ndarray,
    num_places: int,
    member: DynamicTablePlan,
) -> StoredIds:
    places = np.full(member.table.num_rows, -1, np.int64)
    places[found.rows] = places_of_ids
    has_default = member.default_row is not None
    if has_default:
        places[member.default_row] = num_places
    return StoredIds(
        tensor=tensor,
        places=places,
        num_rows=num_places + has_default,
        num_ids=len(found.ids),
    )
