"""Plans never lose a row, whatever the batches are."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_embedding.host_rows.batch_rows import unique_rows
from tpu_embedding.host_rows.planner import CacheTooSmallError, Planner
from tpu_embedding.types import PADDING_ROW_ID

WINDOW = 4


def state_of(planner):
    """Returns a copy of all that decides the next plans, except for stamps."""
    arrays = planner.place, planner.row_of, planner.user
    clock = planner._hand, planner._num_filled
    return [planner.next_batch, *clock, *(array.copy().tolist() for array in arrays)]


class Program:
    """Runs a planner, and swaps the rows of a dictionary as the devices do."""

    def __init__(self, num_rows, num_slots):
        self.planner = Planner(num_rows, num_slots)
        self.num_slots, self.pinned = num_slots, set()
        self.reset()

    def reset(self):
        self.cached = {}  # Slot to row.
        self.recent = []  # Rows that the latest batches use or pin.
        self.left = {}  # Row to the batch that evicted it.
        self.pinned = set()

    def plan(self, rows):
        """Returns the plan, or None if the batch doesn't fit."""
        planner, new = self.planner, set(rows.tolist())
        cached = set(self.cached.values())
        kept = set().union(self.pinned & cached, *self.recent[-2:])
        before = state_of(planner), planner.stamp.tolist()
        if len(kept | new) > self.num_slots:
            with pytest.raises(CacheTooSmallError) as raised:
                planner.plan(rows)
            assert raised.value.num_rows == len(kept | new)
            assert before == (state_of(planner), planner.stamp.tolist())
            return None
        plan = planner.plan(rows)
        for array in (plan.slots, plan.fetched, plan.evicted):
            assert array.shape == plan.fetched.shape
        missing = new - cached
        assert plan.num_rows == len(new)
        assert set(plan.fetched.tolist()) == missing
        assert len(plan.fetched) == len(missing)
        assert plan.wait_for == max((self.left.get(x, -1) for x in missing), default=-1)
        changed = plan.slots, plan.fetched, plan.evicted
        moves = list(zip(*(array.tolist() for array in changed), strict=True))
        for slot, _, old in moves:
            assert old not in kept | new
            assert self.cached.get(slot, -1) == old
        for slot, row, old in moves:
            self.cached[slot] = row
            self.left[old] = plan.batch
        self.recent = [*self.recent[-2:], new | (self.pinned & cached)]
        self.check()
        return plan

    def check(self):
        """Compares the planner's arrays with the devices' cache."""
        planner, row_of = self.planner, np.full(len(self.planner.row_of), -1)
        for slot, row in self.cached.items():
            row_of[slot] = row
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
        for plan in reversed(plans):
            self.planner.undo(plan)
        assert state_of(self.planner) == state
        self.check()


def random_rows(random, num_rows, size):
    """Returns sorted unique rows; low ones are frequent."""
    rows = num_rows ** random.random(size)
    return unique_rows([np.minimum(rows.astype(np.int32) - 1, num_rows - 1)])


def run_program(seed, num_slots, num_rows, size, num_steps):
    """Plans random batches, and sometimes undoes, pins or resets."""
    random = np.random.default_rng(seed)
    program = Program(num_rows, num_slots)
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
            program.planner.unpin_all()
            pinned.clear()
            program.pinned = set()
        elif action == "reset":
            seen = int(random.integers(50))
            program.planner.reset(seen)
            program.reset()
            coming, pinned = [], []


@given(
    seed=st.integers(0, 2**32 - 1),
    num_slots=st.integers(1, 200),
    rows_per_slot=st.sampled_from([1, 2, 10]),
    fill=st.sampled_from([0.2, 0.5, 1.0, 2.0]),
)
@settings(max_examples=60, deadline=None)
def test_random_programs_lose_no_row(seed, num_slots, rows_per_slot, fill):
    num_rows, size = num_slots * rows_per_slot, int(fill * num_slots)
    run_program(seed, num_slots, num_rows, size, num_steps=40)


def test_rows_of_coming_batches_stay():
    """The rows that leave are those that no batch will use, then the oldest."""
    program = Program(200, 60)
    for begin in (0, 20, 40):
        program.plan(np.arange(begin, begin + 20, dtype=np.int32))
    for _ in range(3):
        program.plan(np.arange(5, dtype=np.int32))
    program.planner.enter(8, np.arange(20, 40, dtype=np.int32))
    program.plan(np.arange(100, 115, dtype=np.int32))
    program.plan(np.arange(115, 135, dtype=np.int32))
    left = set(range(60)) - set(program.cached.values())
    assert left == {*range(5, 20), *range(40, 60)}


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
