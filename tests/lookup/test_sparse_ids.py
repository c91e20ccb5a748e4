"""Sparse ids become ragged ones, or the matrix of a sequence."""

import re

import jax
import numpy as np
import pytest

from tests.lookup.prepare_cases import (
    PADDING,
    prepare,
    ragged,
    sparse,
)

SPARSE_SHAPES = {
    "row_beyond": (sparse([[3, 0]], [1]), "got [3, 0] at value 0"),
    "column_beyond": (sparse([[0, 0], [0, 4]], [1, 2]), "got [0, 4] at value 1"),
    "negative": (sparse([[0, 0], [-1, 0]], [1, 2]), "got [-1, 0] at value 1"),
    "fewer_values": (sparse([[0, 0], [0, 1]], [1]), "(1, 2), got (2, 2)"),
    "rank_1": (sparse([[0]], [1], dense_shape=(3,)), "rank >= 2"),
}


@pytest.mark.parametrize(("ids", "shown"), SPARSE_SHAPES.values(), ids=SPARSE_SHAPES)
def test_sparse_coordinates_that_do_not_fit(ids, shown):
    with pytest.raises(ValueError, match=re.escape(shown)) as error:
        prepare(ids)
    assert "indices of feature 'the_feature'" in str(error.value)


def test_two_ids_at_one_place_of_a_sequence_are_refused():
    # One of them would be lost.
    with pytest.raises(ValueError, match="'the_feature'"):
        prepare(sparse([[0, 0], [0, 0]], [1, 2]), max_sequence_length=2)


def test_two_ids_at_one_place_are_both_combined():
    prepared = prepare(sparse([[0, 0], [0, 0]], [1, 2]), num_devices=1)
    assert sorted(prepared.values[0, :2]) == [1, 2]
    assert prepared.row_splits.tolist() == [[0, 2, 2, 2]]


def test_unsorted_sparse_ids_are_sorted():
    order = np.random.default_rng(0).permutation(7)
    indices = np.array([[0, 0], [0, 2], [1, 3], [3, 0], [3, 1], [3, 2], [4, 0]])
    values, weights = np.arange(7), np.arange(7) / 2
    expected = prepare(ragged(values, [0, 2, 3, 3, 6, 7], weights))
    prepared = prepare(
        sparse(indices[order], values[order], (5, 4), weights[order].astype(np.float32))
    )
    jax.tree.map(np.testing.assert_array_equal, prepared, expected)
    assert prepared.batch_size == 5


def test_sparse_ids_of_higher_rank_are_flattened_to_samples():
    ids = sparse([[1, 0, 0], [0, 1, 4], [1, 2, 1]], [7, 8, 9], (2, 3, 5))
    prepared = prepare(ids, num_devices=1, output_shape=(2, 3))
    assert prepared.batch_size == 6
    assert prepared.row_splits.tolist() == [[0, 0, 1, 1, 2, 2, 3]]
    assert prepared.values[0, :3].tolist() == [8, 7, 9]


def test_sparse_sequences_keep_their_places():
    ids = sparse([[2, 3], [0, 1], [2, 0]], [7, 8, 9])
    prepared = prepare(ids, max_sequence_length=2)
    # As wide as the sequence, whatever the batch; column 3 is beyond it.
    expected = np.full((3, 2), PADDING)
    expected[0, 1], expected[2, 0] = 8, 9
    np.testing.assert_array_equal(prepared.ids, expected)
    assert prepared.weights is None
