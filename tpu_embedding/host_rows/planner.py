"""Decides which rows of a stack are cached, in which slots, and when they change.

A `Planner` plans batches in training order, before the devices run them. It works on
row ids only and needs no device. Planning time is proportional to the batch's unique
rows.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from tpu_embedding.argument_checks import about
from tpu_embedding.rows.packed_rows import round_up
from tpu_embedding.types import PADDING_ROW_ID

UNFINISHED_BATCHES: Final = 3
"""When a batch is planned, it and the two batches before it may still be untrained."""

_SLOTS_PER_VICTIM: Final = 8
_FEWEST_SLOTS: Final = 64
"""Minimum number of slots to choose victims from."""
_NEVER: Final = np.iinfo(np.int32).max
"""A stamp that sorts after every batch."""


class Exchange(NamedTuple):
    """Rows that enter and leave the cache in one exchange, at most K per shard.

    All arrays are int32 `[num_shards, K]`, where K is `Planner.exchange_rows`.

    Attributes:
      slots: local slots that change; `PADDING_ROW_ID` at unused positions.
      fetched: local rows that enter; `PADDING_ROW_ID` at unused positions.
      evicted: local rows that leave; `PADDING_ROW_ID` where the slot was empty.
      fetched_rows: stack rows that enter; -1 at unused positions.
      evicted_rows: stack rows that leave; -1 where the slot was empty.
    """

    slots: np.ndarray
    fetched: np.ndarray
    evicted: np.ndarray
    fetched_rows: np.ndarray
    evicted_rows: np.ndarray


class _Undo(NamedTuple):
    """The planner's state before a plan, except for stamps."""

    used: np.ndarray  # Places of the batch's rows that were already cached.
    users: np.ndarray
    missing: np.ndarray  # Rows that the plan fetched.
    left: np.ndarray  # Previous `place` of the missing rows.
    taken: np.ndarray  # New `place` of the missing rows.
    taken_users: np.ndarray
    evicted: np.ndarray
    hands: np.ndarray
    num_filled: np.ndarray


class BatchPlan(NamedTuple):
    """The changes to the cache before a batch's step.

    Attributes:
      batch: number of the batch.
      exchanges: exchanges to run before the batch's step, in this order.
      wait_for: latest batch whose exchanges evicted one of the fetched rows. The store
        is up to date once that batch's evicted rows are written to it. -1 if the rows
        were never evicted.
      num_rows: unique rows of the batch.
      num_fetched: unique rows that were not cached.
      undo: previous state, for `Planner.undo`.
    """

    batch: int
    exchanges: list[Exchange]
    wait_for: int
    num_rows: int
    num_fetched: int
    undo: _Undo


class Planner:
    """Decides which rows of a stack are cached, batch by batch.

    Row `q` of the stack belongs to shard `q % num_shards`, and is cached in a slot of
    that shard. A missing row gets a slot that was never filled. If the shard has no
    such slot, the planner evicts a row that no unfinished batch uses: the row with the
    oldest stamp among the next slots after a clock hand (a sampled LRU). The same calls
    give the same plans on every machine.

    Args:
      num_rows: number of rows of the stack, over all shards.
      num_shards: number of devices that own the stack's rows.
      slots_per_shard: number of rows that a device caches.
      name: description of the stack and its tables, for error messages.

    Attributes:
      next_batch: number of the next batch to plan.
      exchange_rows: K, the number of rows per shard in an exchange. 0 until the first
        batch with rows sets it. K never changes afterwards, since each new size would
        recompile the exchange.
      place: int32 `[num_rows]`. `slot * num_shards + shard` for a cached row,
        `-(t + 2)` for a row evicted by batch `t`, -1 for a row that was never cached.
      row_of: int32 `[slots_per_shard * num_shards]`, the row cached at each place, or
        -1.
      stamp: last batch known to use the row at each place, planned or not.
      user: last planned batch that uses the row at each place.
    """

    def __init__(
        self,
        num_rows: int,
        num_shards: int,
        slots_per_shard: int,
        *,
        name: str = "the stack",
    ):
        self.num_shards, self.slots_per_shard = num_shards, slots_per_shard
        self.exchange_rows = 0
        self.place = np.empty(num_rows, np.int32)
        self.row_of, self.stamp, self.user = np.empty(
            (3, slots_per_shard * num_shards), np.int32
        )
        self._name = name
        self.reset(0)

    def reset(self, next_batch: int) -> None:
        """Empties the cache and removes all pins. The store must be up to date."""
        self.next_batch = next_batch
        self.place.fill(-1)
        self.row_of.fill(-1)
        self.stamp.fill(-UNFINISHED_BATCHES)
        self.user.fill(-UNFINISHED_BATCHES)
        self._hands = np.zeros(self.num_shards, np.int32)
        self._num_filled = np.zeros(self.num_shards, np.int32)
        self._pinned: list[np.ndarray] = []

    def enter(self, batch: int, rows: np.ndarray) -> None:
        """Stamps the cached rows of a batch that will be planned later.

        Args:
          batch: number of the batch.
          rows: int32, the batch's sorted unique stack rows.
        """
        places = self.place[rows]
        # `np.compress` is several times faster than indexing with a mask.
        self._stamp(np.compress(places >= 0, places), batch)

    def plan(self, rows: np.ndarray) -> BatchPlan:
        """Plans the next batch.

        Args:
          rows: int32, the batch's sorted unique stack rows.

        Raises:
          ValueError: if the rows of this batch and the two before it, with the pinned
            rows, don't fit in a shard's slots. The planner is then unchanged.
        """
        assert not len(rows) or (rows[0] >= 0 and rows[-1] < len(self.place))
        batch = self.next_batch
        places = self.place[rows]
        is_cached = places >= 0
        pinned = [self.place[rows] for rows in self._pinned]
        used = np.concatenate([places, *pinned])
        used = np.compress(used >= 0, used)
        missing, counts = self._by_shard(np.compress(~is_cached, rows))
        left, users = self.place[missing], self.user[used]
        hands, num_filled = self._hands.copy(), self._num_filled.copy()

        self.user[used] = batch
        try:
            taken = self._take_slots(counts, batch)
        except ValueError:
            self.user[used] = users
            self._hands, self._num_filled = hands, num_filled
            raise
        if not self.exchange_rows and len(rows):
            # Half the rows of the busiest shard: usually fewer rows are missing.
            most = int(self._by_shard(rows)[1].max())
            slots = round_up(self.slots_per_shard, 8)
            self.exchange_rows = min(round_up(-(-most // 2), 256), slots)
        evicted = self.row_of[taken]
        undo = _Undo(
            *(used, users, missing, left),
            *(taken, self.user[taken], evicted, hands, num_filled),
        )
        self._stamp(used, batch)
        self.place[np.compress(evicted >= 0, evicted)] = -(batch + 2)
        self.place[missing] = taken
        self.row_of[taken] = missing
        self.stamp[taken] = self.user[taken] = batch
        self.next_batch += 1
        return BatchPlan(
            batch=batch,
            exchanges=self._exchanges(counts, taken, missing, evicted),
            wait_for=-2 - int(left.min(initial=-1)),
            num_rows=len(rows),
            num_fetched=len(missing),
            undo=undo,
        )

    def undo(self, plans: Sequence[BatchPlan], last_executed: int) -> None:
        """Undoes the latest plans, whose exchanges never ran.

        Restores the earlier state, except stamps and `exchange_rows`.

        Args:
          plans: plans to undo, in planning order.
          last_executed: number of the batch before the first undone one.
        """
        for plan in reversed(plans):
            assert plan.batch == self.next_batch - 1
            undo = plan.undo
            stayed = undo.evicted >= 0
            self.place[undo.missing] = undo.left
            self.place[undo.evicted[stayed]] = undo.taken[stayed]
            self.row_of[undo.taken] = undo.evicted
            self.user[undo.taken] = undo.taken_users
            self.user[undo.used] = undo.users
            self._hands, self._num_filled = undo.hands, undo.num_filled
            self.next_batch = plan.batch
        assert self.next_batch == last_executed + 1

    def pin(self, rows: np.ndarray) -> None:
        """Keeps a batch's cached rows in the cache until `unpin`.

        Args:
          rows: int32, sorted unique stack rows. Rows that are not cached are ignored.
        """
        self._pinned.append(rows)

    def unpin(self, rows: np.ndarray) -> None:
        """Reverts `pin` of the same array object; does nothing after a `reset`."""
        self._pinned = [pinned for pinned in self._pinned if pinned is not rows]

    def _stamp(self, places: np.ndarray, batch: int) -> None:
        self.stamp[places] = np.maximum(self.stamp[places], batch)

    def _by_shard(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns rows ordered by shard, and the number of rows of each shard."""
        if self.num_shards == 1:
            return rows, np.array([len(rows)])
        shards = (rows % self.num_shards).astype(np.uint16)
        # NumPy uses a radix sort for 16 bits.
        order = np.argsort(shards, kind="stable")
        return rows[order], np.bincount(shards, minlength=self.num_shards)

    def _take_slots(self, counts: np.ndarray, batch: int) -> np.ndarray:
        """Returns places for `counts` new rows per shard, ordered by shard and slot."""
        taken = [np.zeros(0, np.int32)]
        for shard in np.flatnonzero(counts).tolist():
            begin = int(self._num_filled[shard])
            end = min(begin + int(counts[shard]), self.slots_per_shard)
            slots = np.arange(begin, end, dtype=np.int32)
            if (need := int(counts[shard]) - len(slots)) > 0:
                victims = self._victims(shard, need, begin, batch)
                if victims is None:
                    raise self._too_small(counts, batch)
                slots = np.concatenate([slots, victims])
            self._num_filled[shard] = end
            taken.append(slots * np.int32(self.num_shards) + np.int32(shard))
        return np.concatenate(taken)

    def _victims(
        self, shard: int, need: int, num_filled: int, batch: int
    ) -> np.ndarray | None:
        """Returns slots of a shard to evict, or `None` if too few may be evicted."""
        users = self.user.reshape(-1, self.num_shards)[:num_filled, shard]
        stamps = self.stamp.reshape(-1, self.num_shards)[:num_filled, shard]
        hand = int(self._hands[shard])
        size = max(_FEWEST_SLOTS, _SLOTS_PER_VICTIM * need)
        while True:
            size = min(size, num_filled)
            may_leave = _ring(users, hand, size) <= batch - UNFINISHED_BATCHES
            ages = np.where(may_leave, _ring(stamps, hand, size), np.int32(_NEVER))
            last = np.partition(ages, need - 1)[need - 1] if need <= size else _NEVER
            if last < _NEVER:
                break
            if size == num_filled:
                return None
            size *= 4
        is_victim = ages < last
        ties = np.flatnonzero(ages == last)
        is_victim[ties[: need - np.count_nonzero(is_victim)]] = True
        self._hands[shard] = (hand + size) % num_filled
        return ((np.flatnonzero(is_victim) + hand) % num_filled).astype(np.int32)

    def _too_small(self, counts: np.ndarray, batch: int) -> ValueError:
        """Returns the error. The batch's cached rows must already be marked as used."""
        in_use = (self.user > batch - UNFINISHED_BATCHES).reshape(-1, self.num_shards)
        rows = in_use.sum(axis=0) + counts
        shard = int(rows.argmax())
        cache_rows = (int(rows[shard]) - 1) * self.num_shards + 1
        error = ValueError(
            f"Batch {batch} and the two before it need {rows[shard]:,} rows of device "
            f"{shard}, which do not fit in its {self.slots_per_shard:,} cached rows of "
            f"{self._name}. Raise HostRows.cache_rows to at least {cache_rows:,}, or "
            "use smaller batches."
        )
        size = self.slots_per_shard * self.num_shards
        return about(error, "HostRows.cache_rows", size)

    def _exchanges(
        self,
        counts: np.ndarray,
        places: np.ndarray,
        fetched: np.ndarray,
        evicted: np.ndarray,
    ) -> list[Exchange]:
        """Splits new rows, ordered by shard, into exchanges of K rows per shard."""
        if not len(places):
            return []
        size, num_shards = self.exchange_rows, np.int32(self.num_shards)
        width = round_up(int(counts.max()), size)
        is_used = np.arange(width) < counts[:, None]

        def padded(values: np.ndarray, unused: int) -> np.ndarray:
            array = np.full(is_used.shape, unused, np.int32)
            array[is_used] = values
            return array

        evicted_local = np.where(evicted < 0, PADDING_ROW_ID, evicted // num_shards)
        arrays = (
            padded(places // num_shards, PADDING_ROW_ID),
            padded(fetched // num_shards, PADDING_ROW_ID),
            padded(evicted_local, PADDING_ROW_ID),
            padded(fetched, -1),
            padded(evicted, -1),
        )
        starts = range(0, width, size)
        return [Exchange(*(x[:, i : i + size] for x in arrays)) for i in starts]


def unique_rows(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the sorted unique rows of several arrays.

    Takes 2 to 3 ns per row on machines where NumPy sorts with vector instructions (AVX2
    or newer). `np.unique` hashes, and takes 40 to 160 ns per row. Sorting slices in two
    threads and merging them is not faster. To use more threads, call this function for
    several batches at once: NumPy releases the GIL.

    Args:
      rows: int32 arrays of any shape. `PADDING_ROW_ID` is dropped.
    """
    flat = np.concatenate([np.zeros(0, np.int32), *(x.reshape(-1) for x in rows)])
    flat.sort()
    is_first = np.empty(len(flat), bool)
    is_first[:1] = True
    np.not_equal(flat[1:], flat[:-1], out=is_first[1:])
    unique = np.compress(is_first, flat)
    has_padding = len(unique) and unique[-1] == PADDING_ROW_ID
    return unique[:-1] if has_padding else unique


def _ring(values: np.ndarray, begin: int, size: int) -> np.ndarray:
    """Returns `size` values from `begin` on, wrapping around at the end."""
    if begin + size <= len(values):
        return values[begin : begin + size]
    return np.concatenate([values[begin:], values[: begin + size - len(values)]])
