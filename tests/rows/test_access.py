"""Reads and changes of rows, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tiers import full_cases, with_ids
from tpu_embedding.rows.access import (
    gather_rows,
    replace_stored_rows,
    set_rows,
)
from tpu_embedding.rows.packed_rows import (
    PackedRows,
    RowLayout,
    pack_rows,
    rows_of_lines,
    unpack_rows,
)
from tpu_embedding.types import PADDING_ROW_ID

NUM_ROWS = 37  # fills no line of 42, 8 or 2 rows exactly

LAYOUTS = {
    f"dim{dim}-{lanes or 'natural'}": RowLayout(
        num_rows=NUM_ROWS, row_shape=(dim,), tile_lanes=lanes
    )
    for lanes, dims in {None: (3,), 128: (1, 3, 16, 200)}.items()
    for dim in dims
} | {"scalar": RowLayout(num_rows=NUM_ROWS, row_shape=(), tile_lanes=128)}
NARROW_LAYOUTS = {
    f"{dtype}-dim{dim}-{lanes or 'natural'}": RowLayout(
        num_rows=NUM_ROWS, row_shape=(dim,), tile_lanes=lanes, narrow_dtype=dtype
    )
    for dtype, lanes, dims in [
        ("bfloat16", None, (3,)),
        ("bfloat16", 128, (3, 16)),
        ("int8", 128, (300,)),
    ]
    for dim in dims
}
narrow_layouts = pytest.mark.parametrize(
    "layout", full_cases(with_ids(NARROW_LAYOUTS), "bfloat16-dim16-128")
)

jitted_gather = jax.jit(gather_rows)


def integers(layout, num_rows=None, seed=0):
    shape = (num_rows or layout.num_rows, *layout.row_shape)
    return np.random.default_rng(seed).integers(-99, 99, shape).astype(np.float32)


def test_gather_keeps_every_bit():
    dim = 64
    # NaNs with a payload, denormals, infinities and both zeros.
    bits = np.array([0x7FC00001, 0xFF800123, 1, 0x80000001, 0x7F800000, 0x80000000])
    bits = np.resize(bits.astype(np.uint32), (5, dim))
    table = PackedRows(
        lines=jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float32),
        layout=RowLayout(num_rows=5, row_shape=(dim,)),
    )
    rows = jax.jit(gather_rows)(table, jnp.array([4, 0, 4]))
    np.testing.assert_array_equal(np.asarray(rows).view(np.uint32), bits[[4, 0, 4]])
    assert gather_rows(table, jnp.zeros(0, jnp.int32)).shape == (0, dim)


@narrow_layouts
def test_gather_of_narrow_rows(layout):
    rows = integers(layout)
    # Multiples of a step, from 0 to 255: int8 holds them exactly.
    rows[:, 0], rows[:, -1] = 0, 255
    rows = np.abs(rows)
    ids = np.array([36, 0, 0, 7, 8, 36, 35, 37, 41, PADDING_ROW_ID], np.int32)
    packed = pack_rows(jnp.array(rows), layout)
    assert packed.lines.dtype == jnp.int32
    assert packed.lines.shape == layout.lines_shape
    np.testing.assert_array_equal(unpack_rows(packed), rows)
    found = jitted_gather(packed, jnp.array(ids))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, rows[np.minimum(ids, NUM_ROWS - 1)])


@narrow_layouts
def test_replace_narrow_rows(layout):
    """Any bits replace any others; those of neighbours in the same line stay."""
    generator = np.random.default_rng(3)
    bits = 32 if layout.rows_per_lane == 1 else 16

    def integers_of(shape, bits):
        return generator.integers(0, 2**bits, shape, np.uint32).view(np.int32)

    packed = PackedRows(
        lines=jnp.asarray(integers_of(layout.lines_shape, 32)), layout=layout
    )
    ids = np.array([36, PADDING_ROW_ID, 0, 37, 12, 11, 37], np.int32)
    new = integers_of((len(ids), layout.lanes_per_row), bits)
    after = jax.jit(replace_stored_rows)(packed, jnp.array(ids), jnp.array(new))
    assert after.layout == layout

    def by_row(packed):
        lines = np.asarray(packed.lines).reshape(
            layout.num_lines, layout.lanes_per_line
        )
        used = layout.groups_per_line * layout.lanes_per_row
        return rows_of_lines(lines, layout), lines[:, used:]

    (rows, unused), (found, found_unused) = by_row(packed), by_row(after)
    expected = rows.copy()
    is_row = ids < NUM_ROWS
    expected[ids[is_row]] = new[is_row]
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found_unused, unused)


@pytest.mark.parametrize(
    "layout", full_cases(with_ids(LAYOUTS), "dim1-128", "dim16-128")
)
def test_no_value_keeps_another_from_its_place(layout):
    # NaN, infinities, differences that overflow or lose the new value.
    nasty = np.float32([np.nan, np.inf, -np.inf, 0, -0.0, 1, 3e38, -3e38, 1e30, 1e-30])
    random = np.random.default_rng(0)
    rows = random.choice(nasty, (NUM_ROWS, *layout.row_shape))
    column = nasty.reshape(-1, *(1 for _ in layout.row_shape))
    rows[:10], new = column, random.choice(nasty, (12, *layout.row_shape))
    new[:3] = column[:3]
    ids = np.append(np.arange(10, dtype=np.int32), [PADDING_ROW_ID, NUM_ROWS])
    old, expected = rows[np.minimum(ids, NUM_ROWS - 1)], rows.copy()
    expected[:10] = new[:10]
    packed = pack_rows(jnp.array(rows), layout)
    set_some = jax.jit(set_rows)
    for known in [(), (jnp.array(old),)]:
        after = set_some(packed, ids, jnp.array(new), *known)
        packed_again = pack_rows(unpack_rows(after), layout).lines
        np.testing.assert_array_equal(after.lines, packed_again)
        after = np.asarray(unpack_rows(after))
        np.testing.assert_array_equal(after, expected)
        np.testing.assert_array_equal(
            after[10:].view("uint32"), rows[10:].view("uint32")
        )
