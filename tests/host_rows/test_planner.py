"""Plans never lose a row, whatever the batches are."""

import copy

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
    """Runs a planner, and swaps the rows of a dictionary as the devices do."""

    def __init__(self, num_rows, num_shards, slots_per_shard):
        self.planner = Planner(num_rows, num_shards, slots_per_shard)
        self.slots_per_shard, self.pinned = slots_per_shard, set()
        self.reset()

    def reset(self):
        self.cached = {}  # (shard, slot) to row.
        self.recent = []  # Rows that the latest batches use or pin.
        self.left = {}  # Row to the batch that evicted it.
        self.pinned = set()

    def plan(self, rows):
        """Returns the plan, or None if the batch doesn't fit."""
        planner, new = self.planner, set(rows.tolist())
        cached = set(self.cached.values())
        kept = set().union(self.pinned & cached, *self.recent[-2:])
        needed = [0] * planner.num_shards
        for row in kept | new:
            needed[row % planner.num_shards] += 1
        before = state_of(planner), planner.stamp.tolist()
        if max(needed) > self.slots_per_shard:
            least = f"{(max(needed) - 1) * planner.num_shards + 1:,}"
            with rejects(ValueError, field="cache_rows", fix=f" {least},"):
                planner.plan(rows)
            assert before == (state_of(planner), planner.stamp.tolist())
            return None
        plan = planner.plan(rows)
        changes = changes_of(planner, plan)
        missing = new - cached
        assert (plan.num_rows, plan.num_fetched) == (len(new), len(missing))
        assert {row for shard in changes for _, row, _ in shard} == missing
        assert plan.wait_for == max((self.left.get(x, -1) for x in missing), default=-1)
        for shard, moves in enumerate(changes):
            for slot, row, old in moves:
                assert row % planner.num_shards == shard and old not in kept | new
                assert self.cached.get((shard, slot), -1) == old
            for slot, row, old in moves:
                self.cached[shard, slot] = row
                self.left[old] = plan.batch
        self.recent = [*self.recent[-2:], new | (self.pinned & cached)]
        self.check()
        return plan

    def check(self):
        """Compares the planner's arrays with the devices' cache."""
        planner, row_of = self.planner, np.full(len(self.planner.row_of), -1)
        for (shard, slot), row in self.cached.items():
            row_of[slot * planner.num_shards + shard] = row
        np.testing.assert_array_equal(planner.row_of, row_of)
        (places,) = np.nonzero(row_of >= 0)
        here = np.flatnonzero(planner.place >= 0)
        assert sorted(here) == sorted(row_of[places])
        np.testing.assert_array_equal(planner.place[row_of[places]], places)
        assert set().union(*self.recent) <= set(self.cached.values())

    def snapshot(self):
        arrays = self.cached, self.recent, self.left, self.pinned
        return copy.deepcopy((state_of(self.planner), arrays))

    def undo(self, plans, snapshot):
        """Takes back plans; the state equals the one that was before them."""
        state, (self.cached, self.recent, self.left, self.pinned) = snapshot
        self.planner.undo(plans, state[0] - 1)
        assert state_of(self.planner) == state
        self.check()


def random_rows(random, num_rows, size):
    """Returns sorted unique rows; low ones are frequent."""
    rows = num_rows ** random.random(size)
    return unique_rows([np.minimum(rows.astype(np.int32) - 1, num_rows - 1)])


def run_program(seed, num_shards, slots_per_shard, num_rows, size, num_steps):
    """Plans random batches, and sometimes undoes, pins or resets."""
    random = np.random.default_rng(seed)
    program = Program(num_rows, num_shards, slots_per_shard)
    coming, seen, pinned = [], 0, []
    for _ in range(num_steps):
        while len(coming) <= WINDOW:
            coming.append(random_rows(random, num_rows, random.integers(size + 1)))
            program.planner.enter(seen, coming[-1])
            seen += 1
        action = random.choice(
            ["plan", "undo", "pin", "reset"], p=[0.8, 0.1, 0.07, 0.03]
        )
        if action == "plan":
            program.plan(coming.pop(0))
        elif action == "undo":
            snapshot, count = program.snapshot(), int(random.integers(4))
            plans = [program.plan(rows) for rows in coming[:count]]
            program.undo([plan for plan in plans if plan], snapshot)
        elif action == "pin" and not pinned and program.recent:
            program.pinned = program.recent[-1]
            pinned = [np.array(sorted(program.pinned), np.int32)]
            program.planner.pin(pinned[0])
        elif action == "pin" and pinned:
            program.planner.unpin(pinned.pop())
            program.pinned = set()
        elif action == "reset":
            seen = int(random.integers(50))
            program.planner.reset(seen)
            program.reset()
            coming, pinned = [], []


@given(
    seed=st.integers(0, 2**32 - 1),
    num_shards=st.sampled_from(SHARDS),
    slots_per_shard=st.integers(1, 40),
    rows_per_slot=st.sampled_from([1, 2, 10]),
    fill=st.sampled_from([0.2, 0.5, 1.0, 2.0]),
)
@settings(max_examples=60, deadline=None)
def test_random_programs_lose_no_row(
    seed, num_shards, slots_per_shard, rows_per_slot, fill
):
    slots = num_shards * slots_per_shard
    num_rows, size = slots * rows_per_slot, int(fill * slots)
    run_program(seed, num_shards, slots_per_shard, num_rows, size, num_steps=40)


def test_rows_of_coming_batches_stay():
    """The rows that leave are those that no batch will use, then the oldest."""
    program = Program(200, 1, 60)
    for begin in (0, 20, 40):
        program.plan(np.arange(begin, begin + 20, dtype=np.int32))
    for _ in range(3):
        program.plan(np.arange(5, dtype=np.int32))
    program.planner.enter(8, np.arange(20, 40, dtype=np.int32))
    program.plan(np.arange(100, 115, dtype=np.int32))
    program.plan(np.arange(115, 135, dtype=np.int32))
    left = set(range(60)) - set(program.cached.values())
    assert left == {*range(5, 20), *range(40, 60)}


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
