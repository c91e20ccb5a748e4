"""Decides which rows of a shard are cached, in which slots, and when they change.

A `Planner` plans batches in training order, before the devices run them. It works on
row numbers only and needs no device. Planning time is proportional to the batch's
unique rows. The planners of a process's shards are independent, and run in threads.
"""

from typing import Final, NamedTuple

import numpy as np

UNFINISHED_BATCHES: Final = 3
"""When a batch is planned, it and the two batches before it may still be untrained."""

_SLOTS_PER_VICTIM: Final = 8
_FEWEST_SLOTS: Final = 64
"""Minimum number of slots to choose victims from."""
_NEVER: Final = np.iinfo(np.int32).max
"""A stamp that sorts after every batch."""


class CacheTooSmallError(Exception):
    """The rows that must stay don't fit in the shard's slots.

    Attributes:
      num_rows: how many rows must stay.
    """

    def __init__(self, num_rows: int):
        super().__init__(f"{num_rows} rows do not fit in the cache")
        self.num_rows = num_rows


class BatchPlan(NamedTuple):
    """The changes to a shard's cache before a batch's step.

    Attributes:
      batch: number of the batch.
      fetched: local rows that enter.
      slots: the slot of each of them.
      evicted: the row that leaves each slot, -1 if the slot was empty.
      wait_for: latest batch whose exchanges evicted one of the fetched rows. The store
        is up to date once that batch's evicted rows are written to it. -1 if the rows
        were never evicted.
      num_rows: unique rows of the batch.
      undo: previous state, for `Planner.undo`.
    """

    batch: int
    fetched: np.ndarray
    slots: np.ndarray
    evicted: np.ndarray
    wait_for: int
    num_rows: int
    undo: "_Undo"


class _Undo(NamedTuple):
    """The planner's state before a plan, except for stamps."""

    used: np.ndarray  # Slots of the batch's rows that were already cached.
    users: np.ndarray
    left: np.ndarray  # Previous `place` of the fetched rows.
    slot_users: np.ndarray  # Previous `user` of the fetched rows' slots.
    hand: int
    num_filled: int


class Planner:
    """Decides which rows of a shard are cached, batch by batch.

    A missing row gets a slot that was never filled. If there is none, the planner
    evicts a row that no unfinished batch uses: the row with the oldest stamp among the
    next slots after a clock hand (a sampled LRU). The same calls give the same plans on
    every machine.

    Args:
      num_rows: number of rows of the shard.
      num_slots: how many of them its device caches.

    Attributes:
      next_batch: number of the next batch to plan.
      place: int32 `[num_rows]`. The slot of a cached row, `-(t + 2)` for a row evicted
        by batch `t`, -1 for a row that was never cached.
      row_of: int32 `[num_slots]`, the row cached in each slot, or -1.
      stamp: last batch known to use the row in each slot, planned or not.
      user: last planned batch that uses the row in each slot.
    """

    def __init__(self, num_rows: int, num_slots: int):
        self.place = np.empty(num_rows, np.int32)
        self.row_of, self.stamp, self.user = np.empty((3, num_slots), np.int32)
        self.reset(0)

    def reset(self, next_batch: int) -> None:
        """Empties the cache and removes all pins. The store must be up to date."""
        self.next_batch = next_batch
        self.place.fill(-1)
        self.row_of.fill(-1)
        self.stamp.fill(-UNFINISHED_BATCHES)
        self.user.fill(-UNFINISHED_BATCHES)
        self._hand = self._num_filled = 0
        self._pinned: list[np.ndarray] = []

    def enter(self, batch: int, rows: np.ndarray) -> None:
        """Stamps the cached rows of a batch that will be planned later.

        Args:
          batch: number of the batch.
          rows: int32, the batch's sorted unique local rows.
        """
        self.stamp[_cached(self.place[rows])] = batch

    def plan(self, rows: np.ndarray) -> BatchPlan:
        """Plans the next batch.

        Args:
          rows: int32, the batch's sorted unique local rows.

        Raises:
          CacheTooSmallError: if the rows of this batch and the two before it, with the
            pinned rows, don't fit. The planner is then unchanged.
        """
        assert not len(rows) or (rows[0] >= 0 and rows[-1] < len(self.place))
        batch = self.next_batch
        places = self.place[rows]
        pinned = [self.place[rows] for rows in self._pinned]
        used = _cached(np.concatenate([places, *pinned]) if pinned else places)
        fetched = np.compress(places < 0, rows).astype(np.intp)
        left, users = self.place[fetched], self.user[used]
        hand, num_filled = self._hand, self._num_filled

        self.user[used] = batch
        slots = self._take_slots(len(fetched), batch)
        if slots is None:
            in_use = int(np.count_nonzero(self.user > batch - UNFINISHED_BATCHES))
            self.user[used] = users
            raise CacheTooSmallError(in_use + len(fetched))
        evicted = self.row_of[slots].astype(np.intp)
        undo = _Undo(used, users, left, self.user[slots], hand, num_filled)
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
            wait_for=-2 - int(left.min(initial=-1)),
            num_rows=len(rows),
            undo=undo,
        )

    def undo(self, plan: BatchPlan) -> None:
        """Undoes the latest plan, whose exchanges never ran.

        Restores the state before it, except stamps.
        """
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
        """Keeps a batch's cached rows in the cache until `unpin_all`.

        Args:
          rows: int32, sorted unique local rows. Rows that are not cached are ignored.
        """
        self._pinned.append(rows)

    def unpin_all(self) -> None:
        """Reverts all calls of `pin`."""
        self._pinned.clear()

    def _take_slots(self, count: int, batch: int) -> np.ndarray | None:
        """Finds slots for new rows, or returns `None` if too few rows may leave."""
        begin = self._num_filled
        end = min(begin + count, len(self.row_of))
        slots = np.arange(begin, end)
        if (need := count - len(slots)) > 0:
            victims = self._victims(need, begin, batch)
            if victims is None:
                return None
            slots = np.concatenate([slots, victims])
        self._num_filled = end
        return slots

    def _victims(self, need: int, num_filled: int, batch: int) -> np.ndarray | None:
        """Chooses slots to evict, or returns `None` if too few may be evicted."""
        users, stamps = self.user[:num_filled], self.stamp[:num_filled]
        hand = self._hand
        size = max(_FEWEST_SLOTS, _SLOTS_PER_VICTIM * need)
        while True:
            size = min(size, num_filled)
            stays = _ring(users, hand, size) > batch - UNFINISHED_BATCHES
            # Several times faster than `np.where`.
            ages = np.maximum(_ring(stamps, hand, size), stays * np.int32(_NEVER))
            last = np.partition(ages, need - 1)[need - 1] if need <= size else _NEVER
            if last < _NEVER:
                break
            if size == num_filled:
                return None
            size *= 4
        is_victim = ages < last
        ties = np.flatnonzero(ages == last)
        is_victim[ties[: need - np.count_nonzero(is_victim)]] = True
        self._hand = (hand + size) % num_filled
        return (np.flatnonzero(is_victim) + hand) % num_filled


def _cached(places: np.ndarray) -> np.ndarray:
    """Keeps the slots of rows that are cached.

    As `intp`, which NumPy would otherwise convert them to at each use.
    """
    # Several times faster than indexing with a mask.
    return np.compress(places >= 0, places).astype(np.intp)


def _ring(values: np.ndarray, begin: int, size: int) -> np.ndarray:
    """Reads `size` values from `begin` on, wrapping around at the end."""
    if begin + size <= len(values):
        return values[begin : begin + size]
    return np.concatenate([values[begin:], values[: begin + size - len(values)]])
