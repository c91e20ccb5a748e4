"""A rule once per occurrence, against a loop over the occurrences."""

from typing import Any

import jax
import numpy as np
import pytest

from tests.tiers import each_once
from tests.update.update_cases import (
    LAYOUTS,
    Counted,
    counted,
    integers,
    packed,
    plan_of,
)
from tpu_embedding.rows.row_gradients import GradientRounds, RowGradients
from tpu_embedding.types import PADDING_ROW_ID as PADDING
from tpu_embedding.update.apply import update_in_sequence
from tpu_embedding.update.lazy_update import lift_to_rows
from tpu_embedding.update.table_writer import TableWriter

RULE = lift_to_rows(counted())
WRITERS = {dim: TableWriter(stack=plan_of([11], dim, counted())[1]) for dim in (3, 16)}


@jax.jit
def apply(table, state, row_ids, gradients):
    gradients = RowGradients(row_ids=row_ids, values=gradients)
    gradient = GradientRounds(first=gradients)
    return update_in_sequence(table, state, gradient, WRITERS[table.layout.dim])


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
        table, state = apply(table, state, row_ids, gradients)
        # All occurrences see the same count; it advances once, without ids, too.
        reference.count += 1
        for row_id, values in zip(row_ids, gradients, strict=True):
            if row_id != PADDING:
                reference.apply([row_id], values)
        reference.check(table, state)
