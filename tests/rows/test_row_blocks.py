"""Blocks cover all rows once, and begin at lines of every layout."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiers import full_cases, matrix, with_ids
from tpu_embedding.rows import access
from tpu_embedding.rows.access import blocks_of, read_block, write_block
from tpu_embedding.rows.packed_rows import RowLayout, pack_rows, store_rows, unpack_rows


def layouts_of(num_rows, dim=24):
    """Lines hold 5 rows of float32, and 10 of bfloat16."""
    float32 = RowLayout(num_rows=num_rows, row_shape=(dim,), tile_lanes=128)
    bfloat16 = RowLayout(
        num_rows=num_rows, row_shape=(dim,), tile_lanes=128, narrow_dtype="bfloat16"
    )
    return float32, bfloat16


LAYOUTS = dict(zip(("float32", "bfloat16"), layouts_of(37), strict=True))


@pytest.mark.parametrize(
    ("num_rows", "first", "others"),
    [
        (3, (0, 3), []),
        (10, (0, 10), []),
        (30, (0, 10), [10, 20]),
        (27, (20, 7), [0, 10]),
    ],
)
def test_every_row_is_in_one_block(num_rows, first, others, monkeypatch):
    monkeypatch.setattr(access, "_ROWS_PER_BLOCK", 8)
    found = blocks_of(layouts_of(num_rows))
    assert found.size == 10
    assert found.first == first

    def count(counts, block):
        start, size = block
        return counts.at[start + jnp.arange(size)].add(1)

    counts = found.as_parts().fold(count, jnp.zeros(num_rows, jnp.int32))
    np.testing.assert_array_equal(counts, np.ones(num_rows))
    assert list(found.starts) == others


@pytest.mark.parametrize(
    ("start", "size", "layout"),
    full_cases(
        matrix([(0, 10), (30, 7)], with_ids(LAYOUTS)), "30-7-bfloat16", "0-10-float32"
    ),
)
def test_blocks_are_read_and_written(layout, start, size):
    rows = np.arange(37 * 24, dtype=np.float32).reshape(37, 24) % 128
    packed = pack_rows(jnp.asarray(rows), layout)
    block = read_block(packed, jnp.int32(start), size)
    assert block.dtype == jnp.float32
    np.testing.assert_array_equal(block, rows[start : start + size])
    new = store_rows(-block, layout)
    after = write_block(packed, jnp.int32(start), new)
    rows[start : start + size] *= -1
    np.testing.assert_array_equal(unpack_rows(after), rows)
