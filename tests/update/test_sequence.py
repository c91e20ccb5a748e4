"""A rule once per occurrence, against a loop over the occurrences."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.update.update_cases import (
    LAYOUTS,
    Counted,
    counted,
    integers,
    packed,
    plan_of,
)
from tpu_embedding.rows.packed_rows import unpack_rows
from tpu_embedding.rows.row_gradients import GradientRounds, RowGradients
from tpu_embedding.types import PADDING_ROW_ID as PADDING
from tpu_embedding.update.apply import update_in_sequence
from tpu_embedding.update.lazy_update import RuleStep, lift_to_rows
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


@pytest.mark.parametrize("layout_name", ["dim3", "dim16-packed"])
@pytest.mark.parametrize("name", CASES)
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


def test_takes_as_many_passes_as_the_most_frequent_row_has_occurrences(monkeypatch):
    """Padding, which is more frequent, takes none."""
    layout = LAYOUTS["dim3"]
    table = packed(integers((layout.num_rows, 3)), layout)
    passes, update_rows = [], RuleStep.update_rows

    def record(self, gradient, *arguments):
        jax.debug.callback(passes.append, jnp.sum(gradient.row_ids != PADDING))
        return update_rows(self, gradient, *arguments)

    monkeypatch.setattr(RuleStep, "update_rows", record)
    row_ids = jnp.int32([PADDING, 1, PADDING, 5, PADDING, 1, PADDING])
    gradient = GradientRounds(
        first=RowGradients(row_ids=row_ids, values=jnp.ones((7, 3)))
    )
    result = update_in_sequence(table, RULE.init(table), gradient, WRITERS[3])
    jax.block_until_ready(unpack_rows(result[0]))
    jax.effects_barrier()
    # Rows 1 and 5, and row 1 again.
    assert sorted(map(int, passes)) == [1, 2]
