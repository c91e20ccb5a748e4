"""Gradients of rounds: unused places are zero, and every round is folded once."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiers import quick_cases
from tpu_embedding.rows.packed_rows import RowLayout, pack_rows
from tpu_embedding.rows.row_gradients import GradientRounds, PackedRowGradients
from tpu_embedding.types import PADDING_ROW_ID, RowRange

P = PADDING_ROW_ID


@pytest.mark.parametrize("line_lanes", [None, 128], ids=["natural", "packed"])
@pytest.mark.parametrize("dim", quick_cases([1, 3, 16, 128, 200], "1", "16"))
def test_unused_places_are_zero(dim, line_lanes):
    row_ids = np.array([4, P, 0, P, P, 7, 2**31 - 2], np.int32)
    values = np.random.default_rng(0).normal(size=(7, dim)).astype(np.float32)
    values[row_ids == P] = np.nan
    layout = RowLayout(num_rows=7, row_shape=(dim,), line_lanes=line_lanes)
    updates = PackedRowGradients(
        row_ids=jnp.array(row_ids), values=pack_rows(jnp.array(values), layout)
    ).as_row_updates()
    np.testing.assert_array_equal(updates.row_ids, row_ids)
    values[row_ids == P] = 0
    np.testing.assert_array_equal(updates.values, values)


def test_global_gradients_are_longer_than_the_layout_of_a_shard():
    layout = RowLayout(num_rows=4, row_shape=(2,))
    rows = pack_rows(
        jnp.arange(16.0).reshape(8, 2), RowLayout(num_rows=8, row_shape=(2,))
    )
    gradients = PackedRowGradients(
        row_ids=jnp.array([1, P, 2, 3, P, 0, 1, 2], jnp.int32),
        values=type(rows)(lines=rows.lines, layout=layout),
    )
    expected = np.arange(16.0).reshape(8, 2)
    expected[[1, 4]] = 0
    np.testing.assert_array_equal(gradients.as_row_updates().values, expected)


def gradients_of(row):
    layout = RowLayout(num_rows=1, row_shape=(1,))
    values = pack_rows(jnp.ones((1, 1)), layout)
    return PackedRowGradients(row_ids=jnp.array([row], jnp.int32), values=values)


def collect(carry, gradients, rows):
    return [*carry, (int(gradients.row_ids[0]), rows)]


def test_a_single_round_is_about_all_rows():
    rounds = GradientRounds(first=gradients_of(3))
    assert rounds.fold(collect, ["start"]) == ["start", (3, None)]


def test_later_rounds_follow_the_first():
    first_rows = RowRange(jnp.int32(0), jnp.int32(4))
    later = [(5, RowRange(jnp.int32(4), jnp.int32(6))), (7, None)]

    def fold_later(body, carry):
        for row, rows in later:
            carry = body(carry, gradients_of(row), rows)
        return carry

    rounds = GradientRounds(
        first=gradients_of(1), first_rows=first_rows, fold_later=fold_later
    )
    assert rounds.fold(collect, []) == [(1, first_rows), *later]
