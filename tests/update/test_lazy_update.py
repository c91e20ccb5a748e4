"""Rules on touched rows: exact values there, the same bits everywhere else."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.update.update_cases import (
    LAYOUTS,
    NASTY,
    Counted,
    bits,
    counted,
    integers,
    packed,
)
from tpu_embedding.optimizers.table_rows import TableRows, table_rows
from tpu_embedding.rows.access import add_to_rows
from tpu_embedding.rows.packed_rows import RowLayout, unpack_rows
from tpu_embedding.types import PADDING_ROW_ID, RowUpdates
from tpu_embedding.update.lazy_update import (
    lift_to_rows,
    move_rows,
    slots_of,
)

each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


@functools.partial(jax.jit, static_argnames="rule")
def apply(rule, table, state, updates):
    updates, state = rule.update(updates, state, table)
    return add_to_rows(table, updates.row_ids, updates.values), state, updates


def updates_of(row_ids, gradients):
    """Row updates between two places of padding, whose values must not be used."""
    padding = np.full((1, gradients.shape[1]), 77.0, np.float32)
    row_ids = np.int32([PADDING_ROW_ID, *row_ids, PADDING_ROW_ID])
    values = np.concatenate([padding, gradients, padding])
    return RowUpdates(row_ids=jnp.asarray(row_ids), values=jnp.asarray(values))


COUNTED = lift_to_rows(counted())


@each_layout
def test_touched_rows_follow_the_rule_and_others_keep_their_bits(layout):
    last, dim = layout.num_rows - 1, layout.dim
    rows = integers((layout.num_rows, dim))
    touched = [last, 0, 3]
    untouched = np.setdiff1d(np.arange(layout.num_rows), touched)
    reference = Counted(rows)
    rows[untouched] = np.resize(NASTY, (len(untouched), dim))
    table = packed(rows, layout)
    state: Any = COUNTED.init(table)
    slots = [np.asarray(unpack_rows(slot)) for slot in slots_of(state)]
    for step, row_ids in enumerate([touched, [3, last, 0]]):
        gradients = integers((3, dim), seed=step)
        updates = updates_of(row_ids, gradients)
        table, state, result = apply(COUNTED, table, state, updates)
        np.testing.assert_array_equal(result.row_ids, updates.row_ids)
        assert result.values.shape == updates.values.shape
        reference.step(row_ids, gradients)
    assert state.count == 2
    for found, before, expected in zip(
        [table, *slots_of(state)],
        [rows, *slots],
        [reference.rows, reference.momenta, reference.lasts, reference.hits],
        strict=True,
    ):
        found = np.asarray(unpack_rows(found))
        np.testing.assert_array_equal(found[touched], expected[touched])
        np.testing.assert_array_equal(bits(found[untouched]), bits(before[untouched]))


@each_layout
def test_what_is_not_finite_stays_in_its_row(layout):
    rows = integers((layout.num_rows, layout.dim))
    gradients = integers((3, layout.dim))
    reference = Counted(rows)
    reference.step([0, 1, 3], gradients)
    gradients[1] = np.resize([np.nan, np.inf, -np.inf], layout.dim)
    table = packed(rows, layout)
    updates = updates_of([0, 1, 3], gradients)
    table, state, _ = apply(COUNTED, table, COUNTED.init(table), updates)
    others = np.arange(layout.num_rows) != 1
    for found, expected in zip(
        [table, state.momenta, state.lasts],
        [reference.rows, reference.momenta, reference.lasts],
        strict=True,
    ):
        found = np.asarray(unpack_rows(found))
        np.testing.assert_array_equal(found[others], expected[others])
        assert not np.isfinite(found[1]).any()


def test_a_slot_that_forgets_survives_outliers():
    """Of `1e30 + (1 - 1e30)` nothing is left."""
    layout = LAYOUTS["dim3-packed"]
    table = packed(np.zeros((layout.num_rows, 3)), layout)
    state: Any = COUNTED.init(table)
    for gradient in (1e30, 3.0):
        gradients = np.full((1, 3), gradient, np.float32)
        table, state, _ = apply(COUNTED, table, state, updates_of([4], gradients))
    np.testing.assert_array_equal(unpack_rows(state.lasts)[4], [3, 3, 3])


@pytest.mark.parametrize(("by_adding", "expected"), [(True, 0.0), (False, 3.0)])
def test_only_rows_that_are_not_moved_by_adding_are_replaced(by_adding, expected):
    layout = LAYOUTS["dim3"]
    slot = packed(np.full((layout.num_rows, 3), 1e30, np.float32), layout)
    old, new = jnp.full((1, 3), 1e30), jnp.full((1, 3), 3.0)
    moved = move_rows(slot, jnp.int32([10]), old, new, by_adding)
    np.testing.assert_array_equal(unpack_rows(moved)[10], np.full(3, expected))
    np.testing.assert_array_equal(unpack_rows(moved)[9], np.float32([1e30] * 3))


def test_a_rule_that_asks_is_told_of_the_rows():
    """By `rows_of`, which gets all rows in `init` and the touched ones in `update`."""
    asked = []

    def rows_of(row_ids):
        asked.append(row_ids.tolist())
        return TableRows(
            table_sizes=jnp.float32([100]),
            tables=None,
            is_used=row_ids < 5,
            is_touched=row_ids < 5,
            all_reduce=lambda totals, _: 10 * totals,
        )

    def init(params):
        return table_rows(params).total(params)

    def update(updates, state, params=None):
        known = table_rows(updates)
        return known.per_row(known.total(updates)), state + known.total(params)

    rule = optax.GradientTransformation(init, update)
    table = packed(np.ones((5, 2), np.float32), RowLayout(num_rows=5, row_shape=(2,)))
    updates = RowUpdates(
        row_ids=jnp.int32([4, PADDING_ROW_ID, 1]),
        values=jnp.float32([[1, 2], [50, 50], [3, 4]]),
    )
    lifted = lift_to_rows(rule, rows_of)
    state = lifted.init(table)
    np.testing.assert_array_equal(state, [[50, 50]])
    result, state = lifted.update(updates, state, table)
    np.testing.assert_array_equal(result.values, [[40, 60]] * 3)
    np.testing.assert_array_equal(state, [[70, 70]])
    assert asked == [[0, 1, 2, 3, 4], [4, PADDING_ROW_ID, 1]]
    # Nobody is told outside, and without `rows_of` the given rows are one table.
    assert table_rows(jnp.ones((3, 2))).table_sizes.tolist() == [3]
    np.testing.assert_array_equal(lift_to_rows(rule).init(table), [[5, 5]])
