"""Stochastic rounding: bits by logical row and step, and what they do to a table."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.update.update_cases import (
    bits,
    gradients_of_shards,
    packed,
    plan_of,
    rounds_of,
    shard_of,
    sharded,
    unshard,
)
from tpu_embedding.optimizers.row_optimizer import KeptGradient
from tpu_embedding.optimizers.table_rows import table_rows
from tpu_embedding.rows import access
from tpu_embedding.update.drivers import update_stack
from tpu_embedding.update.parts import bits_of_rows
from tpu_embedding.update.state import init_state

SIZES = [5, 1, 6]
DIM = 3


def random_bits(sizes, num_devices, *, step=0, occurrence=0):
    """Returns the bits of every row of all tables, `[rows, DIM]`."""
    plan, stack = plan_of(
        sizes, DIM, "sgd", num_devices=num_devices, dtype=jnp.bfloat16
    )
    row_ids = np.arange(stack.rows_per_shard, dtype=np.int32)

    def run(row_ids):
        return bits_of_rows(row_ids, jnp.int32(step), occurrence, stack)

    shards = sharded(plan, run)([row_ids] * num_devices)
    rows = np.stack([np.asarray(x) for x in shards], axis=1).reshape(-1, DIM)
    return np.concatenate(
        [rows[x.row_offset : x.row_offset + x.num_rows] for x in stack.tables]
    )


def test_bits_belong_to_the_rows_of_a_table():
    whole = random_bits(SIZES, 1)
    np.testing.assert_array_equal(random_bits(SIZES, 3), whole)
    # The first table alone, in a stack of one table.
    np.testing.assert_array_equal(random_bits(SIZES[:1], 2), whole[:5])
    # Another table before it is longer: its rows move within the stack.
    moved = random_bits([9, 1, 6], 2)
    np.testing.assert_array_equal(moved[9:], whole[5:])


def test_every_element_has_bits_of_its_own_in_every_step():
    found = [random_bits(SIZES, 1, step=step) for step in (0, 1, 2)]
    found.append(random_bits(SIZES, 1, occurrence=1))
    assert len(np.unique(np.stack(found))) == 4 * sum(SIZES) * DIM


class Table:
    """A table of a plan, and its state, on emulated devices."""

    def __init__(self, plan, stack, rows):
        self.plan, self.stack, self.num_rows = plan, stack, len(rows)
        self.tables = [packed(x, stack.layout) for x in shard_of(rows, plan.num_shards)]
        init = sharded(plan, lambda table: init_state(table, stack))
        self.states = init(self.tables)
        self._apply = None

    def apply(self, *rounds):
        """Applies row ids and gradients, round by round."""
        parts = [
            gradients_of_shards(
                np.asarray(ids), values, self.plan.num_shards, num_places=16
            )
            for ids, values in rounds
        ]

        def step(table, state, *parts):
            gradient = rounds_of([(part, None) for part in parts])
            return update_stack(table, state, gradient, self.stack)

        self._apply = self._apply or sharded(self.plan, step)
        self.tables, self.states = zip(
            *self._apply(self.tables, self.states, *parts), strict=True
        )

    @property
    def rows(self):
        return unshard(self.tables, self.num_rows)


def sgd_that_asks_for_totals():
    """SGD whose state keeps a dense gradient, as it asks for a total of the table."""

    def update(updates, state, params=None):
        del params
        rows = table_rows(updates)
        return -(updates + 0 * rows.per_row(rows.total(updates))), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


RULES = {
    "touched": te.optimizers.sgd(1.0),
    "sequence": te.optimizers.in_sequence(te.optimizers.sgd(1.0)),
    "every_element": te.optimizers.every_row(te.optimizers.sgd(1.0)),
    "every_row": te.optimizers.every_row(sgd_that_asks_for_totals()),
}


def start_of(num_rows, dim, dtype=jnp.bfloat16):
    rows = np.random.default_rng(0).normal(size=(num_rows, dim))
    return np.array(jnp.asarray(rows, dtype).astype(jnp.float32))


@pytest.mark.full
def test_every_way_to_update_rounds_alike(monkeypatch):
    """On all rows, with any devices and packing, and in blocks: the same bits."""
    dtype = jnp.bfloat16
    monkeypatch.setattr(access, "_ROWS_PER_BLOCK", 4)
    rows = start_of(sum(SIZES), DIM, dtype)
    gradients = np.random.default_rng(1).normal(size=rows.shape).astype(np.float32)
    gradients *= 1e-3
    results = {}
    for (name, rule), (num_devices, hardware) in zip(
        RULES.items(), [(1, "cpu"), (3, "v5p"), (2, "cpu"), (2, "v5p")], strict=True
    ):
        plan, stack = plan_of(
            *(SIZES, DIM, rule), num_devices=num_devices, hardware=hardware, dtype=dtype
        )
        is_kept = isinstance(stack.optimizer.driver, KeptGradient)
        assert is_kept == (name == "every_row")
        # Some rows between two tables are unused.
        row_ids = np.concatenate(
            [x.row_offset + np.arange(x.num_rows) for x in stack.tables]
        )
        stack_rows = np.zeros((stack.num_rows, DIM), rows.dtype)
        stack_rows[row_ids] = rows
        table = Table(plan, stack, stack_rows)
        for _ in range(2):
            table.apply((row_ids, gradients))
        results[name] = table.rows[row_ids]
        assert all(state.step == 2 for state in table.states)
    expected = results.pop("touched")
    assert (expected != rows).any() and (expected == rows).any()
    step = float(jnp.finfo(dtype).eps) * np.abs(rows)
    assert (np.abs(expected - (rows - 2 * gradients)) <= 2 * step).all()
    for found in results.values():
        np.testing.assert_array_equal(bits(found), bits(expected))


@pytest.mark.parametrize("name", ["touched", "every_element"])
def test_rounds_and_untouched_rows(name):
    """Rows of later rounds are rounded like those of the first; others stay."""
    rows = start_of(12, DIM)
    rows[7] = [-0.0, 1e-40, np.inf]
    rows[2] = [-0.0, 0.0, 2.0**-130]
    gradients = np.full((12, DIM), 1e-3, np.float32)
    gradients[2] = 0  # touched, but does not move
    touched = [2, 5, 0, 11]
    results = []
    for parts in ([touched], [touched[:1], touched[1:]]):
        plan, stack = plan_of([12], DIM, RULES[name], dtype=jnp.bfloat16)
        table = Table(plan, stack, rows)
        before = table.rows
        for _ in range(3):
            table.apply(*((ids, gradients[ids]) for ids in parts))
        results.append(table.rows)
        np.testing.assert_array_equal(
            bits(np.delete(table.rows, touched[1:], axis=0)),
            bits(np.delete(before, touched[1:], axis=0)),
        )
    np.testing.assert_array_equal(bits(results[0]), bits(results[1]))
    assert (results[0] != before)[touched[1:]].any()


def test_occurrences_of_a_row_are_rounded_one_by_one():
    """In sequence, each of 8 occurrences moves a row by a quarter of a step, or not."""
    rule = RULES["sequence"]
    plan, stack = plan_of([1], 64, rule, dtype=jnp.bfloat16)
    table = Table(plan, stack, np.ones((1, 64), np.float32))
    gradients = np.full((8, 64), -(2.0**-9), np.float32)
    table.apply((np.zeros(8, np.int32), gradients))
    moved = (table.rows - 1) * 2**7
    # The mean of 64 sums of 8 draws with probability 1/4: 2, with deviation 0.15.
    assert 1.2 < moved.mean() < 2.8
    assert len(np.unique(moved)) > 3


def test_small_gradients_move_a_row_at_the_right_mean_rate():
    """1/64 of a step in each of 128 updates: 2 steps of 2**-7 on average."""
    plan, stack = plan_of([4], 256, te.optimizers.sgd(1.0), dtype=jnp.bfloat16)
    table = Table(plan, stack, np.ones((4, 256), np.float32))
    for _ in range(128):
        table.apply((np.arange(4), np.full((4, 256), -(2.0**-13), np.float32)))
    moved = (table.rows - 1) * 2**7
    # Variance of 128 draws with probability 1/64: 1.97. The mean of 1,024 elements has
    # the deviation 0.044; five of them.
    assert moved.mean() == pytest.approx(2, abs=0.22)
    assert 1.6 < moved.var() < 2.4


def test_a_row_without_an_update_keeps_the_sign_of_its_zeros():
    rule = te.optimizers.every_row(te.optimizers.sgd(1.0))
    plan, stack = plan_of([5], DIM, rule)
    table = Table(plan, stack, np.full((5, DIM), -0.0, np.float32))
    table.apply((np.arange(1), np.zeros((1, DIM), np.float32)))
    assert np.signbit(table.rows).all()
