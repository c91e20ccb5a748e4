"""Dynamic tables: any 64-bit id, admitted, aged and evicted within the compiled step.

A `TableConfig` whose `vocabulary_size` is a `Dynamic` has room for `capacity` rows. Its
ids need not be known beforehand: `insert_ids` of an optimizer gives each new id a row,
and takes rows back from ids that are no longer used. Two ids never share a row.
"""

import dataclasses
from typing import Any, Final, Literal

from tpu_embedding.argument_checks import by_name, describe_value
from tpu_embedding.field_checks import convert_ints, is_int, raise_all

__all__ = [
    "AdmitAfter",
    "Dynamic",
    "LeastFrequentlyUsed",
    "LeastRecentlyUsed",
    "TimeToLive",
]

SLOTS_PER_BUCKET: Final = 64
"""Places for ids that share a hash, in one line of 128 lanes."""

MAX_CAPACITY: Final = 2**31 - 2**21
"""Largest capacity: row numbers are int32, and shards round up."""

_MAX_CLOCK: Final = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class LeastRecentlyUsed:
    """Evicts the id that was used longest ago. Ids of the same step stay.

    Example:
      >>> LeastRecentlyUsed()
      LeastRecentlyUsed()
    """


@dataclasses.dataclass(frozen=True)
class TimeToLive:
    """Evicts an id that was not used for more than `ttl`, the oldest first.

    An expired id keeps its row until a new id needs the place, and lives on if it comes
    back before.

    Attributes:
      ttl: steps, or units of the `now` that `insert_ids` is given; 1 to 2**32 - 1.

    Example:
      >>> TimeToLive(7 * 24).ttl
      168
    """

    ttl: int

    def __post_init__(self):
        convert_ints(self, "ttl")
        raise_all(list(_int_problems(self, "ttl", 1, _MAX_CLOCK)))


@dataclasses.dataclass(frozen=True)
class LeastFrequentlyUsed:
    """Evicts the id that was used in the fewest steps; among these, the oldest.

    Attributes:
      half_life: steps, or units of `now`, after which an unused id counts half as much;
        None: counts stay. 1 to 2**32 - 1.

    Example:
      >>> LeastFrequentlyUsed(half_life=1000).half_life
      1000
    """

    half_life: int | None = None

    def __post_init__(self):
        convert_ints(self, "half_life")
        if self.half_life is not None:
            raise_all(list(_int_problems(self, "half_life", 1, _MAX_CLOCK)))


@dataclasses.dataclass(frozen=True)
class AdmitAfter:
    """Admits an id when `count` calls of `insert_ids` saw it; rarer ids get no row.

    Counts lie in a sketch of 8 bytes per row. Ids that share its counters may be
    admitted early. So that few are, counts are halved again and again: those of a
    bucket each time that `16 * (count - 1)` unknown ids were counted in it, a quarter
    of its places for each count. Of ids that come once, less than 1 % are admitted by
    `AdmitAfter(3)`, and 4 % by `AdmitAfter(2)`.

    Attributes:
      count: calls, this one included, 1 to 255; a step usually has one.
      window: steps, or units of `now`; counts also start anew at each multiple of it,
        so an id that is seen before and after one is admitted later. None: they are
        only halved. 1 to 2**32 - 1.

    Example:
      >>> AdmitAfter(3, window=10_000).count
      3
    """

    count: int
    window: int | None = None

    def __post_init__(self):
        convert_ints(self, "count", "window")
        problems = list(_int_problems(self, "count", 1, 255))
        if self.window is not None:
            problems += _int_problems(self, "window", 1, _MAX_CLOCK)
        raise_all(problems)

    @property
    def ids_per_halving(self) -> int:
        """Unknown ids of a bucket, one for each call, between two halvings."""
        return SLOTS_PER_BUCKET // 4 * max(1, self.count - 1)


Eviction = LeastRecentlyUsed | TimeToLive | LeastFrequentlyUsed


@by_name
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dynamic:
    """The vocabulary of a table whose ids come and go: any integers of 64 bits.

    Each id belongs to one bucket of 64 places. If all are taken, an id of this bucket
    is evicted, or the new id gets no row. So choose a capacity of 1.33 times the ids in
    use: fewer than 0.1 % of them find no place. `print(plan)` shows the shares.

    Attributes:
      capacity: number of rows, rounded up to a multiple of 64; 1 to 2**31 - 2**21.
      evict: whose row a new id takes in a full bucket: `LeastRecentlyUsed`,
        `TimeToLive` or `LeastFrequentlyUsed`. None: no one's.
      admit: which unknown ids get a row: `AdmitAfter`. None: all.
      default_row: row that ids without a row read. `"none"`: they contribute nothing,
        like ids outside a static table. `"learned"`: one row, which they share and
        train together.

    Example:
      >>> import tpu_embedding as te
      >>> users = te.Dynamic(capacity=1_000_000, evict=te.dynamic.TimeToLive(30))
      >>> te.TableConfig(vocabulary_size=users, dim=32, name="user").max_rows
      1000000
    """

    capacity: int
    evict: Eviction | None = LeastRecentlyUsed()
    admit: AdmitAfter | None = None
    default_row: Literal["none", "learned"] = "none"

    def __post_init__(self):
        convert_ints(self, "capacity")
        raise_all(list(self._problems()))

    def _problems(self):
        yield from _int_problems(self, "capacity", 1, MAX_CAPACITY)
        for field, kinds in (
            ("evict", (LeastRecentlyUsed, TimeToLive, LeastFrequentlyUsed)),
            ("admit", (AdmitAfter,)),
        ):
            value = getattr(self, field)
            if not (value is None or isinstance(value, kinds)):
                names = " or a ".join(f"te.dynamic.{k.__name__}" for k in kinds)
                yield (
                    f"Dynamic.{field} must be None or a {names}, got "
                    f"{describe_value(value)}"
                )
        if self.default_row not in ("none", "learned"):
            yield (
                "Dynamic.default_row must be 'none' or 'learned', got "
                f"{self.default_row!r}"
            )

    @property
    def num_buckets(self) -> int:
        """Buckets of the table, on any number of devices."""
        return -(-self.capacity // SLOTS_PER_BUCKET)

    @property
    def num_places(self) -> int:
        """Rows for ids: the capacity, rounded up to whole buckets."""
        return self.num_buckets * SLOTS_PER_BUCKET

    @property
    def policy(self) -> tuple[Any, ...]:
        """Policies, which are equal in tables that share a stack."""
        return self.evict, self.admit, self.default_row


def _int_problems(owner: Any, field: str, low: int, high: int):
    value = getattr(owner, field)
    if not is_int(value) or not low <= value <= high:
        yield (
            f"{type(owner).__name__}.{field} must be an int from {low} to {high}, got "
            f"{value!r}"
        )
