"""A rule on every row, block by block, against NumPy on the dense gradient."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.tiers import quick_cases
from tests.update.update_cases import (
    Balanced,
    balanced,
    check_balanced,
    gradients_of,
    gradients_of_shards,
    integers,
    packed,
    plan_of,
    rounds_of,
    shard_of,
    sharded,
    unshard,
)
from tpu_embedding.rows import access
from tpu_embedding.rows.packed_rows import unpack_rows
from tpu_embedding.update.drivers import update_stack
from tpu_embedding.update.state import init_state

CASES = {
    "packed": ([23, 7], 16, "v5p", 1, 4, 1),
    "unused_row": ([5, 6], 3, "cpu", 3, 3, 1),
    "unused_row_of_four_steps": ([2, 6], 3, "cpu", 3, 2, 4),
}
STEPS = [[0, 4, 2], [1, 4, 2, 0], [], [2, 3]]
"""Touched rows; the last row is added to each."""


def start(plan, stack, rows):
    tables = [packed(x, stack.layout) for x in shard_of(rows, plan.num_shards)]
    init = sharded(plan, lambda table: init_state(table, stack))
    return tables, init(tables)


@pytest.mark.parametrize("name", quick_cases(CASES, "packed"))
def test_equals_the_rule_on_the_dense_gradient(name, monkeypatch):
    sizes, dim, hardware, num_devices, block, num_steps = CASES[name]
    monkeypatch.setattr(access, "_ROWS_PER_BLOCK", block)
    plan, stack = plan_of(
        sizes,
        dim,
        te.optimizers.every_row(balanced(), gradient_steps=num_steps),
        num_devices=num_devices,
        hardware=hardware,
    )
    num_rows = sum(sizes)
    rows = integers((num_rows, dim))
    reference = Balanced(sizes, rows)
    tables, states = start(plan, stack, rows)
    is_used = shard_of(np.ones((num_rows, 1), bool), num_devices)

    def step(table, state, first, second):
        gradient = rounds_of([(first, None), (second, (0, 1))])
        return update_stack(table, state, gradient, stack)

    apply = sharded(plan, step)
    kept, touched = np.zeros_like(rows), np.zeros(num_rows, bool)
    for t, row_ids in enumerate(STEPS, 1):
        row_ids = np.unique([*row_ids, num_rows - 1])
        row_ids = row_ids[row_ids < num_rows]
        values = integers((len(row_ids), dim), seed=t)
        in_first = np.arange(len(row_ids)) % 2 == 0
        rounds = [
            gradients_of_shards(row_ids[part], values[part], num_devices)
            for part in (in_first, ~in_first)
        ]
        results = apply(tables, states, *rounds)
        tables, states = zip(*results, strict=True)
        kept[row_ids] += values
        touched[row_ids] = True
        if t % num_steps == 0:
            reference.step(kept / num_steps, touched, np.ones(num_rows, bool))
            kept, touched = np.zeros_like(rows), np.zeros(num_rows, bool)
        check_balanced(reference, tables, [x.inner for x in states], num_rows)
        found = unshard([state.gradient for state in states], num_rows)
        np.testing.assert_array_equal(found, kept)
        assert [int(state.step) for state in states] == [t % num_steps] * num_devices
        found = unshard([state.touches for state in states], num_rows)
        np.testing.assert_array_equal(found > 0, touched)
        for table, mask in zip(tables, is_used, strict=True):
            # Places after the last row of the stack do not move.
            assert (unpack_rows(table)[~mask[:, 0]] == 0).all()


def wide_slots():
    """A rule with a slot variable of 40 columns, whatever the table has."""

    def init(params):
        return jnp.zeros((params.shape[0], 40), params.dtype)

    def update(updates, state, params):
        sums = jnp.sum(updates, axis=1, keepdims=True)
        return -updates - params, state + sums

    return optax.GradientTransformation(init, update)


@pytest.mark.full
def test_blocks_begin_at_lines_of_all_arrays(monkeypatch):
    """Lines hold 2 rows of the table and 3 of the slot, so blocks take 6 or 12."""
    monkeypatch.setattr(access, "_ROWS_PER_BLOCK", 7)
    plan, stack = plan_of(
        [31], 64, te.optimizers.every_row(wide_slots()), hardware="v5p"
    )
    rows = integers((31, 64))
    tables, states = start(plan, stack, rows)
    row_ids = np.int32([30, 6, 11])
    values = integers((3, 64), seed=1)
    step = sharded(
        plan,
        lambda table, state, gradients: update_stack(
            table, state, rounds_of([(gradients, None)]), stack
        ),
    )
    ((table, state),) = step(tables, states, [gradients_of(row_ids, values)])
    expected = np.zeros((31, 64), np.float32)
    expected[row_ids] = -values
    np.testing.assert_array_equal(unpack_rows(table), expected)
    slot = np.zeros((31, 40))
    slot[row_ids] = values.sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(unpack_rows(state), slot)
