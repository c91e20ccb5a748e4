"""Rows whose columns lie in several arrays equal rows in one array."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tpu_embedding.rows.access import add_to_rows, gather_packed, replace_rows
from tpu_embedding.rows.consecutive_rows import merge_block, read_block, write_block
from tpu_embedding.rows.packed_rows import (
    RowLayout,
    full_rows,
    join_columns,
    pack_rows,
    unpack_rows,
)

WHOLE = RowLayout(num_rows=11, row_shape=(384,), line_lanes=128)
CUT = dataclasses.replace(WHOLE, column_arrays=3)
ROWS = np.random.default_rng(0).normal(size=(11, 384)).astype(np.float32)
IDS = jnp.asarray([7, 0, te.inputs.PADDING_ROW_ID, 10])
VALUES = np.random.default_rng(1).normal(size=(4, 384)).astype(np.float32)


@pytest.mark.parametrize("module", [np, jnp], ids=["numpy", "jax"])
def test_lines_are_split_and_joined(module):
    lines = module.asarray(ROWS)
    parts = CUT.split_columns(lines)
    assert [part.shape for part in parts] == [CUT.lines_shape] * 3 == [(11, 128)] * 3
    assert type(join_columns(parts)) is type(lines)
    np.testing.assert_array_equal(join_columns(parts), lines)


def test_one_array_is_not_copied():
    (part,) = WHOLE.split_columns(ROWS)
    assert join_columns([part]) is part is ROWS


def test_layouts_of_slots_and_buffers():
    slots = [
        CUT.slot_layout(jax.ShapeDtypeStruct(shape, dtype))
        for shape, dtype in (((384,), jnp.bfloat16), ((), jnp.int32), ((1,), jnp.int32))
    ]
    assert [layout.column_arrays for layout in slots] == [3, 1, 1]
    assert CUT.buffer_layout(4, is_packed=False).column_arrays == 1
    assert CUT.resized(4).lines_shape == (4, 128)
    assert CUT.differences(WHOLE) == ["lines_shape per shard: (11, 128), not (11, 384)"]


def test_rows_are_packed_filled_and_read():
    packed = pack_rows(jnp.asarray(ROWS), CUT)
    np.testing.assert_array_equal(unpack_rows(packed), ROWS)
    np.testing.assert_array_equal(join_columns(packed.arrays), ROWS)
    gathered = gather_packed(packed, IDS)
    np.testing.assert_array_equal(gathered.lines, ROWS[[7, 0, 10, 10]])
    filled = full_rows(2, CUT, jnp.bfloat16)
    assert filled.lines_dtype == jnp.bfloat16
    np.testing.assert_array_equal(unpack_rows(filled), np.full((11, 384), 2))


def test_rows_are_added_to_and_replaced():
    cut, whole = (pack_rows(jnp.asarray(ROWS), layout) for layout in (CUT, WHOLE))
    pairs = [(add_to_rows(x, IDS, jnp.asarray(VALUES)) for x in (cut, whole))]
    old = jnp.asarray(ROWS)[jnp.minimum(IDS, 10)]
    # One difference that loses its remainder, so that it is added in a second pass.
    new = jnp.asarray(VALUES).at[0, 200].set(1e-20)
    pairs.append(replace_rows(x, IDS, old, new) for x in (cut, whole))
    for found, wanted in pairs:
        np.testing.assert_array_equal(unpack_rows(found), unpack_rows(wanted))
        others = [row for row in range(11) if row not in (7, 0, 10)]
        np.testing.assert_array_equal(unpack_rows(found)[others, :], ROWS[others])


def test_blocks_are_read_written_and_merged():
    packed = pack_rows(jnp.asarray(ROWS), CUT)
    np.testing.assert_array_equal(read_block(packed, 3, 4), ROWS[3:7])
    wanted = ROWS.copy()
    wanted[3:7] = VALUES
    written = write_block(packed, 3, jnp.asarray(VALUES))
    np.testing.assert_array_equal(unpack_rows(written), wanted)
    is_new = np.asarray([True, False, False, True])
    merged = merge_block(packed, 3, jnp.asarray(VALUES), jnp.asarray(is_new))
    wanted[3:7] = np.where(is_new[:, None], VALUES, ROWS[3:7])
    np.testing.assert_array_equal(unpack_rows(merged), wanted)
