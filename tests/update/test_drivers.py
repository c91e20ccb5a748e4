"""A gradient in several rounds updates like one with all rows, by any kind of rule."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.tiers import each_once
from tests.update.update_cases import (
    LAYOUTS,
    Balanced,
    Counted,
    balanced,
    check_balanced,
    counted,
    gradients_of,
    gradients_of_shards,
    integers,
    packed,
    plan_of,
    rounds_of,
    shard_of,
    sharded,
)
from tpu_embedding.optimizers.row_optimizer import EveryRow, Touched
from tpu_embedding.rows.access import Parts
from tpu_embedding.rows.packed_rows import unpack_rows
from tpu_embedding.rows.row_gradients import RowGradients
from tpu_embedding.types import PADDING_ROW_ID as PADDING
from tpu_embedding.update.drivers import update_stack
from tpu_embedding.update.parts import lift_to_rows
from tpu_embedding.update.state import init_state

NUM_ROWS = 45
ROUNDS = {
    "one": [[44, PADDING, 7, 0, PADDING]],
    "three": [[7, 0, PADDING], [PADDING, 12, 9], [44, PADDING, 43]],
    "no_ids": [[PADDING, PADDING], [PADDING, PADDING]],
}
RANGES = [(0, 9), (9, 40), (40, NUM_ROWS)]
"""Rows that each of three rounds covers."""


def values_of(rounds, dim, seed):
    return [integers((len(ids), dim), seed + 10 * i) for i, ids in enumerate(rounds)]


def stepper(plan, stack, rounds, ranges=None):
    """Returns a jitted function of table, state and the values of each round."""

    @jax.jit
    def step(table, state, values):
        parts = []
        for ids, of_round in zip(rounds, values, strict=True):
            part = gradients_of(ids, np.zeros(of_round.shape))
            is_padding = part.row_ids == PADDING
            values = jnp.where(is_padding[:, None], jnp.nan, of_round)
            parts.append(dataclasses.replace(part, values=values))
        pairs = zip(parts, ranges or [None] * len(parts), strict=True)
        return update_stack(table, state, rounds_of(list(pairs)), stack)

    return step


@pytest.mark.parametrize(
    ("name", "dim", "hardware"), [("three", 3, "v5p"), ("no_ids", 3, "v5p")]
)
def test_touched_rows(name, dim, hardware):
    plan, stack = plan_of([NUM_ROWS], dim, counted(), hardware=hardware)
    rounds = ROUNDS[name]
    rows = integers((NUM_ROWS, dim))
    reference, table = Counted(rows), packed(rows, stack.layout)
    state = init_state(table, stack)
    step = stepper(plan, stack, rounds)
    for seed in range(2):
        values = values_of(rounds, dim, seed)
        table, state = step(table, state, values)
        # One count for all rounds of a step.
        reference.count += 1
        for ids, of_round in zip(rounds, values, strict=True):
            is_used = np.array(ids) != PADDING
            reference.apply(np.array(ids)[is_used], of_round[is_used])
        reference.check(table, state)


@pytest.mark.parametrize(("dim", "hardware"), [(1, "cpu"), (3, "v5p")])
def test_every_element(dim, hardware):
    """Each round moves the rows of its range, also those without a gradient."""
    rule = te.optimizers.every_row(counted(has_hits=False))
    plan, stack = plan_of([NUM_ROWS], dim, rule, hardware=hardware)
    assert stack.optimizer.driver == EveryRow()
    rounds = ROUNDS["three"]
    rows = integers((NUM_ROWS, dim))
    reference, table = Counted(rows), packed(rows, stack.layout)
    state = init_state(table, stack)
    ranges = [tuple(map(np.int32, rows)) for rows in RANGES]
    step = sharded(plan, stepper(plan, stack, rounds, ranges))
    for seed in range(2):
        values = values_of(rounds, dim, seed)
        ((table, state),) = step([table], [state], [values])
        dense = np.zeros((NUM_ROWS, dim), np.float32)
        for ids, of_round in zip(rounds, values, strict=True):
            is_used = np.array(ids) != PADDING
            dense[np.array(ids)[is_used]] = of_round[is_used]
        reference.step(slice(None), dense)
        reference.check(table, state)


SIZES = [5, 1, 6]


def test_totals_of_tables_over_rounds_and_shards():
    """Table 1 has no gradient in the first step, and one row in the second."""
    num_devices, num_rounds = 2, 3
    plan, stack = plan_of(SIZES, 3, balanced(), num_devices=num_devices)
    num_rows = sum(SIZES)
    rows = integers((num_rows, 3))
    reference = Balanced(SIZES, rows)
    tables = [packed(x, stack.layout) for x in shard_of(rows, num_devices)]
    states = sharded(plan, lambda table: init_state(table, stack))(tables)
    np.testing.assert_array_equal(states[0].sums, reference.sums)

    def step(table, state, *parts):
        gradient = rounds_of([(part, (0, 1)) for part in parts])
        return update_stack(table, state, gradient, stack)

    apply = sharded(plan, step)
    for seed, row_ids in enumerate([[0, 4, 6, 9, 11], [5, 2, 4, 11]]):
        row_ids, values = np.array(row_ids), integers((len(row_ids), 3), seed)
        parts = [
            gradients_of_shards(
                row_ids[i::num_rounds], values[i::num_rounds], num_devices
            )
            for i in range(num_rounds)
        ]
        tables, states = zip(*apply(tables, states, *parts), strict=True)
        dense, touched = np.zeros_like(rows), np.zeros(num_rows, bool)
        dense[row_ids], touched[row_ids] = values, True
        reference.step(dense, touched, touched)
        check_balanced(reference, tables, states, num_rows)


def test_norm_of_all_occurrences():
    """Row 4 occurs three times; the squares of padding must not count."""
    rule = balanced(asks_for_occurrences=True)
    plan, stack = plan_of(SIZES, 3, rule)
    assert stack.optimizer.driver == Touched(occurrence_norm=True)
    rows = integers((12, 3))
    reference = Balanced(SIZES, rows)
    row_ids, values = np.array([0, 4, 11]), integers((3, 3))
    occurrences = [4, PADDING, 0, 4, 11, PADDING, 4], [1, 50, 2, 4, 8, 60, 16]

    def step(table):
        gradients = gradients_of(row_ids, values, occurrences=occurrences)
        gradient = rounds_of([(gradients, None)])
        return update_stack(table, init_state(table, stack), gradient, stack)

    ((table, state),) = sharded(plan, step)([packed(rows, stack.layout)])
    dense, touched = np.zeros_like(rows), np.zeros(12, bool)
    dense[row_ids], touched[row_ids] = values, True
    reference.step(dense, touched, touched, occurrence_squares=[23, 0, 8])
    np.testing.assert_array_equal(unpack_rows(table), reference.rows)
    np.testing.assert_array_equal(state.sums, reference.sums)


def test_totals_that_are_not_finite_stay_in_their_table():
    plan, stack = plan_of(SIZES, 3, balanced())
    rows = integers((12, 3))
    reference = Balanced(SIZES, rows)
    row_ids, values = np.array([0, 4, 5, 7, 11]), integers((5, 3))
    dense, touched = np.zeros_like(rows), np.zeros(12, bool)
    dense[row_ids], touched[row_ids] = values, True
    reference.step(dense, touched, touched)
    values[1] = np.nan

    def step(table, state):
        parts = [
            (gradients_of(row_ids[part], values[part]), None)
            for part in (slice(0, 3), slice(3, 5))
        ]
        return update_stack(table, state, rounds_of(parts), stack)

    tables = [packed(rows, stack.layout)]
    states = sharded(plan, lambda table: init_state(table, stack))(tables)
    ((table, state),) = sharded(plan, step)(tables, states)
    found = np.asarray(unpack_rows(table))
    np.testing.assert_array_equal(found[5:], reference.rows[5:])
    np.testing.assert_array_equal(found[1:4], rows[1:4])
    assert np.isnan(found[[0, 4]]).all()


@pytest.mark.parametrize(
    "make",
    [
        te.optimizers.adagrad,
        pytest.param(te.optimizers.adafactor, marks=pytest.mark.full(every_case=True)),
        pytest.param(
            lambda rate: te.optimizers.every_row(te.optimizers.lamb(rate)),
            marks=pytest.mark.full(every_case=True),
        ),
    ],
    ids=["touched", "totals", "every_row"],
)
def test_a_rate_that_is_not_finite_moves_no_row(make):
    rule = make(lambda count: jnp.where(count == 1, jnp.nan, 0.1))
    table = te.TableConfig(vocabulary_size=9, dim=4, name="t", optimizer=rule)
    plan = te.make_plan(te.FeatureConfig(table=table), mesh_of(1))
    tables = te.functional.init_tables(plan, jax.random.key(0))
    slots = te.functional.init_slots(tables, plan)

    @jax.jit
    def step(tables, slots):
        result = te.functional.lookup(tables, jnp.arange(4), plan)
        cotangents = jnp.ones_like(result.activations)
        gradients = te.functional.compute_gradients(result.routing, cotangents, plan)
        is_finite = te.functional.finite_rates(slots, plan)
        return *te.functional.apply_gradients(tables, slots, gradients, plan), is_finite

    found, moved = [], []
    for _ in range(3):
        (before,) = jax.tree.leaves(tables)
        tables, slots, is_finite = step(tables, slots)
        found.append(bool(is_finite))
        (after,) = jax.tree.leaves(tables)
        moved.append(not np.array_equal(before, after))
        assert jnp.isfinite(after).all()
    assert found == moved == [True, False, True]


RULE = lift_to_rows(counted())
STACKS = {
    dim: plan_of([11], dim, te.optimizers.in_sequence(counted()))[1] for dim in (3, 16)
}


@jax.jit
def apply_in_sequence(table, state, row_ids, gradients):
    gradients = RowGradients(row_ids=row_ids, values=gradients)
    gradient = Parts(gradients)
    return update_stack(table, state, gradient, STACKS[table.layout.dim])


CASES = {
    "duplicates": [2, 10, 2, 0, 10, 2, 2],
    "one_row": [10] * 7,
    "distinct": [6, 5, 4, 3, 2, 1, 0],
    "mostly_padding": [PADDING, 10, PADDING, 10, PADDING, PADDING, 0],
    "no_ids": [PADDING] * 7,
}


@pytest.mark.parametrize(
    ("name", "layout_name"), each_once(CASES, ["dim3", "dim16-packed"])
)
def test_runs_once_per_occurrence_in_order(name, layout_name):
    layout = LAYOUTS[layout_name]
    rows = integers((layout.num_rows, layout.dim))
    table = packed(rows, layout)
    state: Any = RULE.init(table)
    reference = Counted(rows)
    for step in range(2):
        row_ids = np.roll(np.int32(CASES[name]), step)
        gradients = integers((7, layout.dim), seed=step)
        table, state = apply_in_sequence(table, state, row_ids, gradients)
        # All occurrences see the same count; it also advances without ids.
        reference.count += 1
        for row_id, values in zip(row_ids, gradients, strict=True):
            if row_id != PADDING:
                reference.apply([row_id], values)
        reference.check(table, state)
