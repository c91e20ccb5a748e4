"""Rules on touched rows: exact values there, the same bits everywhere else."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiers import full_cases, with_ids
from tests.update.update_cases import (
    LAYOUTS,
    NASTY,
    Counted,
    bits,
    counted,
    integers,
    packed,
)
from tpu_embedding.rows.access import add_to_rows
from tpu_embedding.rows.packed_rows import unpack_rows
from tpu_embedding.types import PADDING_ROW_ID, RowUpdates
from tpu_embedding.update.parts import lift_to_rows
from tpu_embedding.update.state import slots_of


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


@pytest.mark.parametrize(
    "layout", full_cases(with_ids(LAYOUTS), "dim3-packed", "dim128-packed")
)
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


def test_a_slot_that_forgets_survives_outliers():
    """Of `1e30 + (1 - 1e30)` nothing is left."""
    layout = LAYOUTS["dim3"]
    table = packed(np.zeros((layout.num_rows, 3)), layout)
    state: Any = COUNTED.init(table)
    for gradient in (1e30, 3.0):
        gradients = np.full((1, 3), gradient, np.float32)
        table, state, _ = apply(COUNTED, table, state, updates_of([4], gradients))
    np.testing.assert_array_equal(unpack_rows(state.lasts)[4], [3, 3, 3])
