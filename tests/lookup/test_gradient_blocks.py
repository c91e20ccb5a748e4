"""Gradients summed block by block: any cut of the ids gives the sums of all ids."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.lookup.stages import PADDING
from tests.lookup.test_pooling import integers
from tpu_embedding.lookup._backward import gradient_blocks, sorted_blocks
from tpu_embedding.rows.packed_rows import RowLayout, gather_in_bounds

ROWS, NUM_KEYS = 12, 12

KEYS = {
    "no ids": [],
    "one row": [7] * 10,
    "all rows": list(range(ROWS)),
    "row over three blocks": [3, 5, 5, 5, 5, 5, 5, 5, 5, 9],
    "row ends with a block": [5, 5, 5, 5, 9, 9, 9, 9],
    "padding begins with a block": [1, 2, 3, 4],
    "random": np.random.default_rng(0).integers(0, ROWS, NUM_KEYS).tolist(),
}


@functools.partial(jax.jit, static_argnames=("ids_per_block", "layout"))
def fold(keys, cotangents, ids_per_block, layout):
    """Returns sums and visits of each row, and the ranges of the rounds."""
    (num_ids,) = keys.shape

    def read_cotangents(ids):
        return gather_in_bounds(cotangents, ids)

    def body(carry, gradients):
        sums, visits, ends, turn = carry
        updates = gradients.as_row_updates()
        sums = sums.at[updates.row_ids].add(updates.values, mode="drop")
        visits = visits.at[updates.row_ids].add(1, mode="drop")
        first, end = gradients.covered or (jnp.int32(0), jnp.int32(ROWS))
        is_row = updates.row_ids != PADDING
        is_outside = is_row & ((updates.row_ids < first) | (updates.row_ids >= end))
        visits += jnp.sum(is_outside)
        return sums, visits, ends.at[turn].set(jnp.stack([first, end])), turn + 1

    carry = (
        jnp.zeros((ROWS, layout.dim)),
        jnp.zeros((ROWS,), jnp.int32),
        jnp.full((num_ids + 1, 2), -1, jnp.int32),
        0,
    )
    blocks = sorted_blocks(keys, layout.dim, ids_per_block)
    rounds = gradient_blocks(blocks, read_cotangents, layout)
    return rounds.fold(body, carry)


@pytest.mark.parametrize(("ids_per_block", "dim"), [(1, 1), (4, 3)])
def test_blocks_sum_by_row(ids_per_block, dim):
    layout = RowLayout(num_rows=ROWS, row_shape=(dim,))
    for name, keys in KEYS.items():
        keys = keys + [PADDING] * (NUM_KEYS - len(keys))
        keys = np.random.default_rng(1).permutation(np.array(keys, np.int32))
        cotangents = integers(len(keys), dim)
        # A cotangent of padding belongs to no row.
        cotangents[keys == PADDING] = np.nan
        sums, visits, ends, turns = fold(keys, cotangents, ids_per_block, layout)
        expected = np.zeros((ROWS, dim), np.float32)
        used = keys != PADDING
        np.add.at(expected, keys[used], cotangents[used])
        np.testing.assert_array_equal(sums, expected, err_msg=name)
        is_touched = np.isin(np.arange(ROWS), keys)
        np.testing.assert_array_equal(visits, is_touched, err_msg=name)
        num_blocks = max(1, -(-int(used.sum()) // ids_per_block))
        assert turns == num_blocks
        ranges = np.asarray(ends)[:num_blocks]
        np.testing.assert_array_equal(ranges[1:, 0], ranges[:-1, 1], err_msg=name)
        assert ranges[0, 0] == 0
        assert ranges[-1, 1] == ROWS or not used.any()
