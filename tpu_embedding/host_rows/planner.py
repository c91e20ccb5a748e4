"""Decides which rows a shard caches, in which slots, and when they change.

A `Planner` plans batches in training order, before the devices run them. A plan takes
time proportional to the batch's unique rows. Each shard has its own planner, and
planners run in threads.
"""

from typing import Final, NamedTuple

import numpy as np

UNFINISHED_BATCHES: Final = 3
"""When a batch is planned, it and the two batches before it may still be untrained."""

# A prototype with 8 slots per victim fetched 3,394 rows per batch of zipf ids. An exact
# LRU fetched 3,403 rows.
_SLOTS_PER_VICTIM: Final = 8
_FEWEST_SLOTS: Final = 64
"""Minimum number of slots to choose victims from."""
_NEVER: Final = np.iinfo(np.int32).max
"""A stamp that sorts after every batch."""


class CacheTooSmallError(Exception):
    """The `num_rows` rows that must stay don't fit in the shard's slots."""

    def __init__(self, num_rows: int):
        super().__init__(f"{num_rows} rows do not fit in the cache")
        self.num_rows = num_rows


class BatchPlan(NamedTuple):
    """Changes to a shard's cache before a batch's step."""

    batch: int
    fetched: np.ndarray  # Local rows that enter.
    slots: np.ndarray
    evicted: np.ndarray  # The row that leaves each slot, -1 if the slot was empty.
    # Latest batch that evicted a fetched row, or -1. The store has the row's latest
    # values only after that batch's evicted rows are written.
    wait_for: int
    num_rows: int  # Unique rows in the batch.
    undo: "_Undo"


class _Undo(NamedTuple):
    """The planner state before a plan, except for stamps."""

    used: np.ndarray  # Slots of the batch's rows that were already cached.
    users: np.ndarray
    left: np.ndarray  # Previous `place` of the fetched rows.
    slot_users: np.ndarray  # Previous `user` of the fetched rows' slots.
    hand: int
    num_filled: int


class Planner:
    """Plans a shard's cache, batch by batch. Plans are the same on every machine.

    A missing row takes a slot that was never filled. If all slots were filled, it takes
    one of the next slots after a clock hand, and evicts the row with the oldest stamp
    (a sampled LRU). Rows that an unfinished batch uses are never evicted. In all
    methods, `rows` are sorted unique local rows, int32.

    Attributes:
      place: slot of each row, `-(t + 2)` if batch `t` evicted it, or -1 if it was never
        cached.
      row_of: row in each slot, or -1.
      stamp: last batch, planned or not, that is known to use the row in each slot.
      user: last planned batch that uses the row in each slot.
    """

    def __init__(self, num_rows: int, num_slots: int):
        self.place = np.empty(num_rows, np.int32)
        self.row_of, self.stamp, self.user = np.empty((3, num_slots), np.int32)
        self.reset(0)

    def reset(self, next_batch: int) -> None:
        """Empties the cache and removes pins. The store must be up to date."""
        self.next_batch = next_batch
        self.place.fill(-1)
        self.row_of.fill(-1)
        self.stamp.fill(-UNFINISHED_BATCHES)
        self.user.fill(-UNFINISHED_BATCHES)
        self._hand = self._num_filled = 0
        self._pinned: list[np.ndarray] = []

    def enter(self, batch: int, rows: np.ndarray) -> None:
        """Stamps cached rows with a batch that will be planned later."""
        self.stamp[_cached(self.place[rows])] = batch

    def plan(self, rows: np.ndarray) -> BatchPlan:
        """Plans the next batch.

        If the batch's rows don't fit together with the pinned rows and the rows of the
        two batches before it, this raises CacheTooSmallError and changes nothing.
        """
        assert not len(rows) or (rows[0] >= 0 and rows[-1] < len(self.place))
        batch = self.next_batch
        places = self.place[rows]
        pinned = [self.place[rows] for rows in self._pinned]
        used = _cached(np.concatenate([places, *pinned]) if pinned else places)
        fetched = np.compress(places < 0, rows).astype(np.intp)
        left, users = self.place[fetched], self.user[used]
        hand, num_filled = self._hand, self._num_filled

        self.user[used] = batch  # First, so that none of these rows is evicted.
        slots = self._take_slots(len(fetched), batch)
        if slots is None:
            in_use = int(np.count_nonzero(self.user > batch - UNFINISHED_BATCHES))
            self.user[used] = users
            raise CacheTooSmallError(in_use + len(fetched))
        evicted = self.row_of[slots].astype(np.intp)
        undo = _Undo(used, users, left, self.user[slots], hand, num_filled)
        # A later batch in the window may already have stamped these rows.
        self.stamp[used] = np.maximum(self.stamp[used], batch)
        self.place[np.compress(evicted >= 0, evicted)] = -(batch + 2)
        self.place[fetched] = slots
        self.row_of[slots] = fetched
        self.stamp[slots] = self.user[slots] = batch
        self.next_batch += 1
        return BatchPlan(
            batch=batch,
            fetched=fetched,
            slots=slots,
            evicted=evicted,
            # The latest eviction has the smallest place, `-(t + 2)`.
            wait_for=-2 - int(left.min(initial=-1)),
            num_rows=len(rows),
            undo=undo,
        )

    def undo(self, plan: BatchPlan) -> None:
        """Undoes the latest plan, whose exchanges never ran."""
        # Stamps don't change. They only rank victims, so a wrong stamp costs at most a
        # fetch.
        assert plan.batch == self.next_batch - 1
        undo, stayed = plan.undo, plan.evicted >= 0
        self.place[plan.fetched] = undo.left
        self.place[plan.evicted[stayed]] = plan.slots[stayed]
        self.row_of[plan.slots] = plan.evicted
        self.user[plan.slots] = undo.slot_users
        self.user[undo.used] = undo.users
        self._hand, self._num_filled = undo.hand, undo.num_filled
        self.next_batch = plan.batch

    def pin(self, rows: np.ndarray) -> None:
        """Protects a batch's cached rows from eviction until `unpin_all`."""
        self._pinned.append(rows)

    def unpin_all(self) -> None:
        self._pinned.clear()

    def _take_slots(self, count: int, batch: int) -> np.ndarray | None:
        """Finds slots for new rows, or returns None if too many rows must stay."""
        begin = self._num_filled
        end = min(begin + count, len(self.row_of))
        slots = np.arange(begin, end)
        if (need := count - len(slots)) > 0:
            victims = self._victims(need, begin, batch)
            if victims is None:
                return None
            slots = np.concatenate([slots, victims])
        self._num_filled = end  # Last, so that a failure changes nothing.
        return slots

    def _victims(self, need: int, num_filled: int, batch: int) -> np.ndarray | None:
        """Chooses slots to evict, or returns None if too few may be evicted."""
        users, stamps = self.user[:num_filled], self.stamp[:num_filled]
        hand = self._hand
        size = max(_FEWEST_SLOTS, _SLOTS_PER_VICTIM * need)
        while True:
            size = min(size, num_filled)
            stays = _ring(users, hand, size) > batch - UNFINISHED_BATCHES
            # `np.maximum` is several times faster than `np.where`.
            ages = np.maximum(_ring(stamps, hand, size), stays * np.int32(_NEVER))
            last = np.partition(ages, need - 1)[need - 1] if need <= size else _NEVER
            if last < _NEVER:
                break
            if size == num_filled:
                return None
            size *= 4
        is_victim = ages < last
        # Ties are broken by position, so that plans don't depend on how NumPy
        # partitions.
        ties = np.flatnonzero(ages == last)
        is_victim[ties[: need - np.count_nonzero(is_victim)]] = True
        self._hand = (hand + size) % num_filled
        return (np.flatnonzero(is_victim) + hand) % num_filled


def _cached(places: np.ndarray) -> np.ndarray:
    """Selects the places that are slots."""
    # `np.compress` is several times faster than indexing with a mask. NumPy would
    # convert other index types to `intp` at each use.
    return np.compress(places >= 0, places).astype(np.intp)


def _ring(values: np.ndarray, begin: int, size: int) -> np.ndarray:
    """Slices `size` values from `begin` on, wrapping around at the end."""
    if begin + size <= len(values):
        return values[begin : begin + size]
    return np.concatenate([values[begin:], values[: begin + size - len(values)]])
