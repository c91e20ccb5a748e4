"""Sums per row at the owner, in place or in a buffer as long as the rows are many."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from tpu_embedding.lookup._backward import merge
from tpu_embedding.types import PADDING_ROW_ID

CASES = {
    "nothing": [PADDING_ROW_ID] * 8,
    "one row": [3] * 8,
    "no repeats": [5, 1, 7, 0, 4, 2, 6, 3],
    "first of each source": [0, 1, 2, PADDING_ROW_ID, 0, 1, 2, PADDING_ROW_ID],
    "repeats before firsts": [6, 6, 5, 5, 4, PADDING_ROW_ID, 4, 0],
    "last row": [7, PADDING_ROW_ID, 7, PADDING_ROW_ID, 7, 0, 0, 7],
}


@functools.partial(jax.jit, static_argnames="bound")
def jitted_merge(row_ids, gradients, bound):
    return merge(row_ids, gradients, bound).as_row_updates()


def check(row_ids, num_rows, bound, dim=3):
    """Merges integers, whose sums are exact in any order."""
    row_ids = np.asarray(row_ids, np.int32)
    gradients = np.random.default_rng(0).integers(-9, 9, (len(row_ids), dim))
    gradients = gradients.astype(np.float32)
    is_used = row_ids != PADDING_ROW_ID
    gradients[~is_used] = np.nan
    merged = jitted_merge(row_ids, gradients, bound)
    result = np.zeros((num_rows, dim))
    is_row = np.asarray(merged.row_ids) != PADDING_ROW_ID
    assert (np.asarray(merged.values)[~is_row] == 0).all()
    found = np.asarray(merged.row_ids)[is_row]
    assert sorted(found) == sorted(set(row_ids[is_used]))
    result[found] = np.asarray(merged.values)[is_row]
    expected = np.zeros((num_rows, dim))
    np.add.at(expected, row_ids[is_used], gradients[is_used])
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("bound", [8, 1000])
@pytest.mark.parametrize("case", CASES)
def test_equals_numpy(case, bound):
    check(CASES[case] * (2 if bound == 8 else 1), 8, bound)


@pytest.mark.parametrize("num_repeats", [0, 1025])
def test_turns_of_the_loop(num_repeats):
    firsts = np.arange(7000)
    repeats = firsts[:num_repeats] * 7 % 7000
    row_ids = np.random.default_rng(1).permutation(np.concatenate([firsts, repeats]))
    check(row_ids, 7000, 10**6)


@hypothesis.given(
    st.lists(
        st.sampled_from([0, 1, 2, 3, 9, PADDING_ROW_ID]), min_size=24, max_size=24
    ),
    st.sampled_from([10, 10**6]),
)
@hypothesis.settings(max_examples=15, deadline=None)
def test_any_rows(row_ids, bound):
    check(row_ids, 10, bound)
