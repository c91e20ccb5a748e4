"""Plans equal a cache that is written in plain Python, and never lose a row."""

import copy
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rejections import rejects
from tests.tiers import full_cases
from tpu_embedding.host_rows.planner import Planner, unique_rows
from tpu_embedding.types import PADDING_ROW_ID

WINDOW = 4
SHARDS = (1, 2, 3, 8)


@dataclasses.dataclass
class Slot:
    """One cached row."""

    row: int
    stamp: int
    user: int


class Model:
    """The same cache, one row after the other."""

    def __init__(self, num_shards, slots_per_shard):
        self.num_shards, self.size = num_shards, slots_per_shard
        self.pinned = []
        self.reset(0)

    def reset(self, next_batch):
        self.batch = next_batch
        self.shards = [[] for _ in range(self.num_shards)]
        self.hands = [0] * self.num_shards
        self.left = {}
        self.pinned = []

    def slot(self, row):
        """Returns a row's slot, or None."""
        slots = self.shards[row % self.num_shards]
        return next((slot for slot in slots if slot.row == row), None)

    def enter(self, batch, rows):
        for row in rows:
            if slot := self.slot(row):
                slot.stamp = max(slot.stamp, batch)

    def plan(self, rows):
        """Returns the changes of each shard, in order, and the batch to wait for.

        A change has the local slot, the row that enters, and the one that leaves or -1.
        A string has the least `cache_rows` if the batch doesn't fit.
        """
        held = [*rows, *(row for rows in self.pinned for row in rows)]
        before = copy.deepcopy(self.shards), list(self.hands)
        for row in held:
            if slot := self.slot(row):
                slot.user, slot.stamp = self.batch, max(slot.stamp, self.batch)
        missing = [[] for _ in range(self.num_shards)]
        for row in rows:
            if self.slot(row) is None:
                missing[row % self.num_shards].append(row)
        most = max(
            len(new) + sum(slot.user >= self.batch - 2 for slot in slots)
            for new, slots in zip(missing, self.shards, strict=True)
        )
        if most > self.size:
            self.shards, self.hands = before
            return f"{(most - 1) * self.num_shards + 1:,}", None
        changes = [self._fill(i, new) for i, new in enumerate(missing)]
        waits = [self.left.get(row, -1) for new in missing for row in new]
        self.left |= {old: self.batch for shard in changes for _, _, old in shard}
        self.batch += 1
        return changes, max(waits, default=-1)

    def _fill(self, shard, rows):
        slots, number = self.shards[shard], len(self.shards[shard])
        free = range(number, min(self.size, number + len(rows)))
        victims = self._victims(shard, len(rows) - len(free))
        changes = []
        for place, row in zip([*free, *victims], rows, strict=True):
            slot = Slot(row, self.batch, self.batch)
            if place < number:
                old, slots[place] = slots[place].row, slot
            else:
                slots.append(slot)
                old = -1
            changes.append((place, row, old))
        return changes

    def _victims(self, shard, need):
        if not need:
            return []
        slots, seen = self.shards[shard], max(64, 8 * need)
        while True:
            seen = min(seen, len(slots))
            ring = [(self.hands[shard] + i) % len(slots) for i in range(seen)]
            old = [place for place in ring if slots[place].user < self.batch - 2]
            if len(old) >= need:
                break
            seen *= 4
        self.hands[shard] = (self.hands[shard] + seen) % len(slots)
        chosen = sorted(old, key=lambda place: slots[place].stamp)[:need]
        return [place for place in ring if place in chosen]


def state_of(planner):
    """Returns a copy of all that decides the next plans, except for stamps."""
    arrays = planner.place, planner.row_of, planner.user
    clock = planner._hands, planner._num_filled
    return [planner.next_batch, *(array.copy().tolist() for array in arrays + clock)]


def changes_of(planner, plan):
    """Returns the changes of each shard in a plan's exchanges; checks the padding."""
    changes = [[] for _ in range(planner.num_shards)]
    shape = planner.num_shards, planner.exchange_rows
    for exchange in plan.exchanges:
        for array in exchange:
            assert array.dtype == np.int32 and array.shape == shape
        is_used = exchange.fetched_rows >= 0
        assert is_used.any()
        for local, rows in (
            (exchange.fetched, exchange.fetched_rows),
            (exchange.evicted, exchange.evicted_rows),
        ):
            expected = np.where(rows < 0, PADDING_ROW_ID, rows // planner.num_shards)
            np.testing.assert_array_equal(local, expected)
        assert (exchange.slots[~is_used] == PADDING_ROW_ID).all()
        assert (exchange.evicted_rows[~is_used] == -1).all()
        for shard, lane in np.argwhere(is_used).tolist():
            parts = exchange.slots, exchange.fetched_rows, exchange.evicted_rows
            changes[shard].append(tuple(int(part[shard, lane]) for part in parts))
    return changes


class Program:
    """Runs a planner and the model side by side, and checks each plan."""

    def __init__(self, num_rows, num_shards, slots_per_shard):
        self.planner = Planner(num_rows, num_shards, slots_per_shard)
        self.model = Model(num_shards, slots_per_shard)
        self.cached = {}  # As the devices have it: (shard, slot) to row.
        self.recent = []  # Rows of the latest batches.
        self.in_store = {}  # Row to the batch that evicted it.

    def enter(self, batch, rows):
        self.planner.enter(batch, rows)
        self.model.enter(batch, rows.tolist())

    def plan(self, rows):
        """Returns the plan, or None if the batch doesn't fit."""
        before = state_of(self.planner), self.planner.stamp.tolist()
        expected, wait_for = self.model.plan(rows.tolist())
        if isinstance(expected, str):
            with rejects(ValueError, field="cache_rows", fix=f" {expected},"):
                self.planner.plan(rows)
            assert before == (state_of(self.planner), self.planner.stamp.tolist())
            return None
        plan = self.planner.plan(rows)
        changes = changes_of(self.planner, plan)
        assert changes == expected and plan.wait_for == wait_for
        assert plan.batch == self.model.batch - 1 == self.planner.next_batch - 1
        assert plan.num_rows == len(rows)
        assert plan.num_fetched == sum(map(len, changes))
        self._execute(changes, plan)
        self.recent = [*self.recent[-2:], set(rows.tolist())]
        self.check()
        return plan

    def _execute(self, changes, plan):
        """Swaps the rows of a dictionary, as the devices do."""
        kept = set().union(
            *self.recent[-2:], *map(np.ndarray.tolist, self.model.pinned)
        )
        waits = [-1]
        for shard, rows in enumerate(changes):
            for slot, row, old in rows:
                assert row % self.planner.num_shards == shard and old not in kept
                assert self.cached.get((shard, slot), -1) == old
                assert row not in self.cached.values()
                waits.append(self.in_store.get(row, -1))
            # The exchanges of a batch bring back no row that left in them.
            assert not {row for _, row, _ in rows} & {old for *_, old in rows}
            for slot, row, old in rows:
                self.cached[shard, slot] = row
                self.in_store[old] = plan.batch
        assert plan.wait_for == max(waits)

    def check(self):
        """Compares the planner's arrays with the devices' cache and the model."""
        planner = self.planner
        place = {
            row: slot * planner.num_shards + s for (s, slot), row in self.cached.items()
        }
        assert len(place) == len(self.cached)
        here = np.flatnonzero(planner.place >= 0)
        assert place == {row: int(planner.place[row]) for row in here.tolist()}
        row_of = {int(p): r for r, p in place.items()}
        assert planner.row_of.tolist() == [
            row_of.get(p, -1) for p in range(len(planner.row_of))
        ]
        assert set().union(*self.recent) <= place.keys()
        for shard, slots in enumerate(self.model.shards):
            for number, slot in enumerate(slots):
                p = number * planner.num_shards + shard
                found = planner.row_of[p], planner.stamp[p], planner.user[p]
                assert found == (slot.row, slot.stamp, slot.user)

    def snapshot(self):
        return copy.deepcopy(
            (
                self.model,
                self.cached,
                self.recent,
                self.in_store,
                state_of(self.planner),
            )
        )

    def undo(self, plans, snapshot):
        """Takes back plans; the state equals the one that was before them."""
        stamps_before = self.planner.stamp
        self.planner.undo(plans, snapshot[-1][0] - 1)
        self.model, self.cached, self.recent, self.in_store, state = copy.deepcopy(
            snapshot
        )
        assert state_of(self.planner) == state
        assert (self.planner.user < max(self.planner.next_batch, 1)).all()
        for shard, slots in enumerate(self.model.shards):
            for number, slot in enumerate(slots):
                slot.stamp = int(
                    stamps_before[number * self.planner.num_shards + shard]
                )
        self.check()


def random_rows(random, num_rows, size):
    """Returns sorted unique rows; low ones are frequent."""
    rows = num_rows ** random.random(size)
    return unique_rows([np.minimum(rows.astype(np.int32) - 1, num_rows - 1)])


def run_program(seed, num_shards, slots_per_shard, num_rows, size, num_steps):
    """Plans random batches, and sometimes undoes, pins or resets."""
    random = np.random.default_rng(seed)
    program = Program(num_rows, num_shards, slots_per_shard)
    coming, seen, pinned, num_plans = [], 0, [], 0
    for _ in range(num_steps):
        while len(coming) <= WINDOW:
            coming.append(random_rows(random, num_rows, random.integers(size + 1)))
            program.enter(seen, coming[-1])
            seen += 1
        action = random.choice(
            ["plan", "undo", "pin", "reset"], p=[0.8, 0.1, 0.07, 0.03]
        )
        if action == "plan":
            num_plans += program.plan(coming.pop(0)) is not None
        elif action == "undo":
            snapshot, count = program.snapshot(), int(random.integers(4))
            plans = [program.plan(rows) for rows in coming[:count]]
            program.undo([plan for plan in plans if plan], snapshot)
        elif action == "pin" and not pinned and program.recent:
            pinned = [np.array(sorted(program.recent[-1]), np.int32)]
            program.planner.pin(pinned[0])
            program.model.pinned = pinned
        elif action == "pin" and pinned:
            program.planner.unpin(pinned[0])
            program.model.pinned = pinned = []
        elif action == "reset":
            seen = int(random.integers(50))
            program.planner.reset(seen)
            program.model.reset(seen)
            program.cached, program.recent, program.in_store = {}, [], {}
            coming, pinned = [], []
    return program, num_plans


@given(
    seed=st.integers(0, 2**32 - 1),
    num_shards=st.sampled_from(SHARDS),
    slots_per_shard=st.integers(1, 40),
    rows_per_slot=st.sampled_from([1, 2, 10]),
    fill=st.sampled_from([0.2, 0.5, 1.0, 2.0]),
)
@settings(max_examples=60, deadline=None)
def test_random_programs_equal_the_model(
    seed, num_shards, slots_per_shard, rows_per_slot, fill
):
    slots = num_shards * slots_per_shard
    num_rows, size = slots * rows_per_slot, int(fill * slots)
    run_program(seed, num_shards, slots_per_shard, num_rows, size, num_steps=40)


@pytest.mark.parametrize("num_shards", full_cases([1, 3], "1"))
def test_more_misses_than_an_exchange_holds(num_shards):
    program = Program(40_000, num_shards, 1200)
    random = np.random.default_rng(num_shards)
    assert program.planner.exchange_rows == 0
    program.plan(np.zeros(0, np.int32))
    assert program.planner.exchange_rows == 0
    program.plan(np.arange(100, dtype=np.int32))
    assert program.planner.exchange_rows == 256
    counts = []
    for _ in range(5):
        rows = random.choice(40_000, num_shards * 350, replace=False)
        plan = program.plan(unique_rows([rows.astype(np.int32)]))
        assert plan is not None
        counts.append(len(plan.exchanges))
    assert min(counts) > 1


@pytest.mark.parametrize(
    ("num_rows", "num_shards", "slots", "expected"),
    [
        (1, 1, 10_000, 256),
        (512, 1, 10_000, 256),
        (513, 1, 10_000, 512),
        (8 * 513, 8, 10_000, 512),
        (600, 2, 301, 256),
        (9, 1, 9, 16),
    ],
)
def test_rows_of_an_exchange(num_rows, num_shards, slots, expected):
    planner = Planner(10_000, num_shards, slots)
    planner.plan(np.arange(num_rows, dtype=np.int32))
    assert planner.exchange_rows == expected


@pytest.mark.parametrize("size", [0, 1, 2, 200_000])
def test_unique_rows_equal_numpy(size):
    random = np.random.default_rng(size)
    parts = [random.integers(size + 1, size=(size, 2)), random.integers(9, size=size)]
    parts = [part.astype(np.int32) for part in parts]
    before = copy.deepcopy(parts)
    expected = np.unique(np.concatenate([part.reshape(-1) for part in parts]))
    for padding in ([], [np.full(3, PADDING_ROW_ID, np.int32)]):
        found = unique_rows([*parts, *padding])
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, expected)
    for part, same in zip(parts, before, strict=True):
        np.testing.assert_array_equal(part, same)
    assert len(unique_rows([])) == 0
