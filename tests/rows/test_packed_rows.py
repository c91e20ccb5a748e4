"""Packing of rows: exact bits in and out, and nothing but the named rows changes."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.tiers import full_cases, with_ids
from tpu_embedding.rows.access import add_to_rows, gather_rows
from tpu_embedding.rows.packed_rows import PackedRows, RowLayout, pack_rows, unpack_rows

DIMS = [3, 16, 200]
PADDING = te.inputs.PADDING_ROW_ID
NUM_ROWS = 37  # fills no line of 2, 3, 5, 8 or 42 rows exactly

LAYOUTS = {
    f"dim{dim}-{lanes or 'natural'}": RowLayout(
        num_rows=NUM_ROWS, row_shape=(dim,), tile_lanes=lanes
    )
    for dim in DIMS
    for lanes in (None, 128)
}
LAYOUTS |= {
    f"scalar-{lanes or 'natural'}": RowLayout(
        num_rows=300, row_shape=(), tile_lanes=lanes
    )
    for lanes in (None, 128)
}
LAYOUTS |= {
    f"dim{dim}-dealt": RowLayout(
        num_rows=2 * NUM_ROWS, row_shape=(dim,), tile_lanes=128, banks=2
    )
    for dim in DIMS
}
every_layout = pytest.mark.parametrize(
    "layout", full_cases(with_ids(LAYOUTS), "dim16-natural", "dim200-dealt")
)


pack = jax.jit(pack_rows, static_argnames="layout")
unpack = jax.jit(unpack_rows)
gather = jax.jit(gather_rows)
add = jax.jit(add_to_rows)


def bits(array):
    return np.asarray(array).view(np.uint32)


def random_rows(layout, seed=0):
    shape = (layout.num_rows, *layout.row_shape)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


NASTY = np.array(
    [0x80000000, 0x00000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FC12345]
    + [0xFFC54321, 0x7F7FFFFF, 0x00800000, 0x3F800001],
    np.uint32,
).view(np.float32)
"""-0, 0, infinities, quiet NaNs with and without payload, largest, smallest normal."""


def nasty_rows(layout):
    """Rows of which every second element is nasty, in another order in each row."""
    rows = random_rows(layout)
    flat = rows.reshape(-1)
    flat[::2] = np.resize(NASTY, flat[::2].shape)
    return rows


@pytest.mark.parametrize(
    ("dim", "rows_per_line", "lanes", "num_lines"),
    [
        (1, 1, 1, 37),
        (3, 42, 128, 1),
        (64, 2, 128, 19),
        (128, 1, 128, 37),
        (200, 1, 256, 37),
    ],
)
def test_sizes_of_lines_of_128_lanes(dim, rows_per_line, lanes, num_lines):
    layout = RowLayout(num_rows=NUM_ROWS, row_shape=(dim,), tile_lanes=128)
    assert layout.rows_per_line == rows_per_line
    assert layout.lanes_per_line == lanes
    assert layout.num_lines == num_lines
    assert layout.dim == dim


@every_layout
def test_pack_and_unpack_keep_every_bit(layout):
    rows = nasty_rows(layout)
    packed = pack(rows, layout)
    assert packed.lines.shape == layout.lines_shape
    assert packed.layout == layout
    unpacked = unpack(packed)
    assert unpacked.shape == rows.shape
    assert unpacked.dtype == rows.dtype
    np.testing.assert_array_equal(bits(unpacked), bits(rows))


@every_layout
def test_rows_lie_side_by_side_and_the_rest_is_zero(layout):
    rows = random_rows(layout)
    lines = whole_lines(pack(rows, layout).lines, layout)
    expected = np.zeros_like(lines)
    for row in range(layout.num_rows):
        line, place = divmod(row, layout.rows_per_line)
        start = place * layout.lanes_per_row
        expected[line, start : start + layout.dim] = rows[row]
    np.testing.assert_array_equal(lines, expected)


def whole_lines(lines, layout):
    """Returns lines as an array that can be set; those of a row as one line."""
    lines = np.array(lines)
    return lines.reshape(layout.num_lines // layout.lines_per_row, -1)


def test_rows_are_dealt_to_sparse_cores_in_turn():
    layout = RowLayout(num_rows=12, row_shape=(4,), tile_lanes=128, banks=3)
    rows = np.arange(12)
    np.testing.assert_array_equal(
        layout.dealt(rows), [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
    )
    np.testing.assert_array_equal(layout.undealt(layout.dealt(rows)), rows)


@pytest.mark.parametrize(
    ("dim", "row_lanes", "rows_per_line", "lines_per_row"),
    [(1, 8, 16, 1), (20, 32, 4, 1), (64, 64, 2, 1), (65, 128, 1, 1), (200, 256, 1, 2)],
)
def test_sizes_of_rows_for_sparse_cores(dim, row_lanes, rows_per_line, lines_per_row):
    layout = RowLayout(num_rows=64, row_shape=(dim,), tile_lanes=128, banks=2)
    assert layout.lanes_per_row == row_lanes
    assert layout.rows_per_line == rows_per_line
    assert layout.lines_per_row == lines_per_row
    assert layout.lines_shape == (64 // rows_per_line * lines_per_row, 128)


def ids_of(layout):
    """Every row, some of them again, padding, and ids just after the last row."""
    n = layout.num_rows
    order = np.random.default_rng(1).permutation(n)
    beyond = [n, n + 1, n + layout.rows_per_line, layout.num_lines + n, PADDING]
    return np.concatenate([order, order[:5], beyond]).astype(np.int32)


@every_layout
def test_gather_reads_exact_bits_whatever_the_neighbours_hold(layout):
    rows = nasty_rows(layout)
    # What is after the last row in its line must not come out either.
    lines = whole_lines(pack(rows, layout).lines, layout)
    lines[:, layout.rows_per_line * layout.lanes_per_row :] = np.nan
    unused = layout.row_of(layout.num_lines) - layout.num_rows
    if unused:
        end = layout.rows_per_line * layout.lanes_per_row
        lines[-1, end - unused * layout.lanes_per_row : end] = np.nan
    ids = ids_of(layout)
    lines = lines.reshape(layout.lines_shape)
    packed = PackedRows(lines=jnp.asarray(lines), layout=layout)
    result = gather(packed, ids)
    assert result.shape == (len(ids), *layout.row_shape)
    assert result.dtype == jnp.float32
    expected = rows[np.minimum(ids, layout.num_rows - 1)]
    np.testing.assert_array_equal(bits(result), bits(expected))


@every_layout
def test_add_changes_the_named_rows_only(layout):
    rows = nasty_rows(layout)
    named = np.random.default_rng(2).permutation(layout.num_rows)[::3]
    named = np.union1d(named, [0, layout.num_rows - 1])
    rows[named] = random_rows(layout, 4)[named]
    # Just after the last row is the unused part of its line.
    beyond = [layout.num_rows, *[layout.num_rows + 1] * 2, *[PADDING] * 3]
    ids = np.concatenate([named, beyond]).astype(np.int32)
    values = np.full((len(ids), *layout.row_shape), np.nan, np.float32)
    values[: len(named)] = random_rows(layout, 3)[named]

    packed = pack(rows, layout)
    order = np.random.default_rng(5).permutation(len(ids))
    result = add(packed, ids[order], values[order])
    assert result.layout == layout
    after = np.asarray(unpack(result))

    expected = rows.copy()
    expected[named] += values[: len(named)]
    untouched = np.setdiff1d(np.arange(layout.num_rows), named)
    np.testing.assert_array_equal(bits(after[untouched]), bits(rows[untouched]))
    # One float32 addition: both sides round the same way.
    np.testing.assert_array_equal(after[named], expected[named])
    # And so do the unused lanes.
    back = np.asarray(pack(after, layout).lines)
    np.testing.assert_array_equal(bits(result.lines), bits(back))


@pytest.mark.parametrize("name", ["dim16-natural", "dim16-128"])
def test_add_works_in_place_when_donated(name):
    layout = dataclasses.replace(LAYOUTS[name], num_rows=1009)
    lines = jax.ShapeDtypeStruct(layout.lines_shape, jnp.float32)
    ids = jax.ShapeDtypeStruct((5,), jnp.int32)
    values = jax.ShapeDtypeStruct((5, *layout.row_shape), jnp.float32)
    compiled = (
        jax.jit(add_to_rows, donate_argnums=0)
        .lower(PackedRows(lines=lines, layout=layout), ids, values)
        .compile()
    )
    text = compiled.as_text()
    assert "input_output_alias" in text
    table = rf"f32\[{','.join(map(str, layout.lines_shape))}\]"
    assert re.search(table, text)
    copies = re.findall(rf"= {table}\S* copy\(", text)
    assert not copies
    memory = compiled.memory_analysis()
    table_bytes = 4 * layout.num_lines * layout.lanes_per_line
    assert memory.alias_size_in_bytes == table_bytes
    assert memory.temp_size_in_bytes < table_bytes / 2
