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
from tpu_embedding.types import PADDING_ROW_ID as PADDING
from tpu_embedding.types import RowUpdates
from tpu_embedding.update.lazy_update import lift_to_rows, step_on_no_row
from tpu_embedding.update.sequence import apply_in_sequence
from tpu_embedding.update.table_writer import TableWriter

RULE = lift_to_rows(counted())
WRITER = TableWriter(stack=plan_of([11], 3, counted())[1])


@jax.jit
def apply(table, state, gradient):
    table, state = apply_in_sequence(RULE, table, state, gradient, WRITER)
    return table, step_on_no_row(counted(), state, table.layout.dim)


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
        gradient = RowUpdates(row_ids=jnp.asarray(row_ids), values=gradients)
        table, state = apply(table, state, gradient)
        # All occurrences see the same count; it advances once, without ids, too.
        reference.count += 1
        for row_id, values in zip(row_ids, gradients, strict=True):
            if row_id != PADDING:
                reference.apply([row_id], values)
        reference.check(table, state)


def test_takes_as_many_passes_as_the_most_frequent_row_has_occurrences():
    """Padding, which is more frequent, takes none."""
    layout = LAYOUTS["dim3"]
    table = packed(integers((layout.num_rows, 3)), layout)
    passes = []

    def update(updates, state, params):
        jax.debug.callback(passes.append, jnp.sum(updates.row_ids != PADDING))
        return RULE.update(updates, state, params)

    rule = RULE._replace(update=update)
    gradient = RowUpdates(
        row_ids=jnp.int32([PADDING, 1, PADDING, 5, PADDING, 1, PADDING]),
        values=jnp.ones((7, 3)),
    )
    result = apply_in_sequence(rule, table, RULE.init(table), gradient, WRITER)
    jax.block_until_ready(unpack_rows(result[0]))
    jax.effects_barrier()
    # Rows 1 and 5, and row 1 again.
    assert sorted(map(int, passes)) == [1, 2]
