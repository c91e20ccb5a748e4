"""Packing of rows: exact bits in and out, and nothing but the named rows changes."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.tiers import quick_cases
from tpu_embedding.rows.access import add_to_rows, gather_rows, with_room_for_kernels
from tpu_embedding.rows.kernels.kernel_access import KernelAccess
from tpu_embedding.rows.packed_rows import (
    PackedRows,
    RowLayout,
    broadcast_to_lanes,
    clear_last_row,
    concatenate_rows,
    keep_rows,
    pack_rows,
    round_up,
    scale_rows,
    unpack_rows,
)

DIMS = [1, 3, 16, 24, 40, 64, 100, 128, 200]
PADDING = te.inputs.PADDING_ROW_ID
NUM_ROWS = 37  # fills no line of 2, 3, 5, 8 or 42 rows exactly

LAYOUTS = {
    f"dim{dim}-{lanes or 'natural'}": RowLayout(
        num_rows=NUM_ROWS, row_shape=(dim,), line_lanes=lanes
    )
    for dim in DIMS
    for lanes in (None, 128)
}
LAYOUTS |= {
    f"scalar-{lanes or 'natural'}": RowLayout(
        num_rows=300, row_shape=(), line_lanes=lanes
    )
    for lanes in (None, 128)
}
KERNELS = KernelAccess(backend="interpreter")
KERNEL_LAYOUTS = {
    f"dim{dim}-kernels": with_room_for_kernels(
        RowLayout(num_rows=num_rows, row_shape=(dim,), line_lanes=128)
    )
    for dim, num_rows in {8: 37, 16: 40, 64: 300, 128: 37, 256: 40}.items()
}
if jax.__version_info__ >= (0, 12):
    LAYOUTS |= KERNEL_LAYOUTS
every_layout = pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            layout,
            id=name,
            marks=() if layout.dim in (1, 3, 16, 200) else pytest.mark.full,
        )
        for name, layout in LAYOUTS.items()
    ],
)


def kernels_of(layout):
    return KERNELS if layout in KERNEL_LAYOUTS.values() else None


@functools.partial(jax.jit, static_argnames="layout")
def pack(rows, layout):
    return pack_rows(rows, layout, kernels_of(layout))


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
        (16, 8, 128, 5),
        (24, 5, 128, 8),
        (40, 3, 128, 13),
        (64, 2, 128, 19),
        (65, 1, 128, 37),
        (100, 1, 128, 37),
        (128, 1, 128, 37),
        (129, 1, 256, 37),
        (200, 1, 256, 37),
        (1024, 1, 1024, 37),
    ],
)
def test_sizes_of_lines_of_128_lanes(dim, rows_per_line, lanes, num_lines):
    layout = RowLayout(num_rows=NUM_ROWS, row_shape=(dim,), line_lanes=128)
    assert layout.rows_per_line == rows_per_line
    assert layout.lanes == lanes
    assert layout.num_lines == num_lines
    assert layout.dim == dim


@pytest.mark.parametrize("dim", DIMS)
def test_natural_lines_are_rows(dim):
    layout = RowLayout(num_rows=NUM_ROWS, row_shape=(dim,))
    assert (layout.rows_per_line, layout.lanes) == (1, dim)
    assert layout.num_lines == NUM_ROWS


def test_layout_of_one_value_per_row():
    layout = RowLayout(num_rows=300, row_shape=(16,), line_lanes=128)
    scalar = layout.slot_layout(jax.ShapeDtypeStruct((), jnp.int32))
    assert scalar == LAYOUTS["scalar-128"]
    assert (scalar.dim, scalar.rows_per_line, scalar.num_lines) == (1, 1, 300)
    assert scalar.lines_shape == (300,)
    assert layout.lines_shape == (38, 128)
    assert layout.slot_layout(jax.ShapeDtypeStruct((16,), jnp.float32)) == layout


@pytest.mark.parametrize(
    ("row_shape", "dtype", "kernels"),
    [
        ((16,), jnp.float32, KERNELS),
        ((16,), jnp.bfloat16, None),
        ((), jnp.float32, None),
        ((8,), jnp.float32, None),
    ],
)
def test_kernels_reach_slots_that_are_like_the_table(row_shape, dtype, kernels):
    layout = with_room_for_kernels(
        RowLayout(num_rows=304, row_shape=(16,), line_lanes=128)
    )
    table = PackedRows(lines=None, layout=layout, kernels=KERNELS)
    row = jax.ShapeDtypeStruct(row_shape, dtype)
    assert table.slot_kernels(row) == kernels
    slot = layout.slot_layout(row)
    assert slot.row_shape == row_shape
    # A pass over all lines needs slots of as many lines as the table has.
    assert slot.spare_lines == int(row_shape == (16,))


@pytest.mark.parametrize(
    ("value", "multiple", "expected"),
    [(0, 8, 0), (1, 8, 8), (8, 8, 8), (9, 8, 16), (7, 1, 7), (2**40 + 1, 2, 2**40 + 2)],
)
def test_round_up(value, multiple, expected):
    assert round_up(value, multiple) == expected


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
    lines = np.asarray(pack(rows, layout).lines).reshape(-1, layout.lanes)
    expected = np.zeros_like(lines)
    for row in range(layout.num_rows):
        line, place = divmod(row, layout.rows_per_line)
        start = place * layout.dim
        expected[line, start : start + layout.dim] = rows[row]
    np.testing.assert_array_equal(lines, expected)


def ids_of(layout):
    """Every row, some of them again, padding, and ids just behind the last row."""
    n = layout.num_rows
    order = np.random.default_rng(1).permutation(n)
    beyond = [n, n + 1, n + layout.rows_per_line, layout.num_lines + n, PADDING]
    return np.concatenate([order, order[:5], beyond]).astype(np.int32)


@every_layout
def test_gather_reads_exact_bits_whatever_the_neighbours_hold(layout):
    rows = nasty_rows(layout)
    # What lies behind the last row in its line must not come out either.
    lines = np.array(pack(rows, layout).lines).reshape(-1, layout.lanes)
    lines[:, layout.rows_per_line * layout.dim :] = np.nan
    unused = layout.num_lines * layout.rows_per_line - layout.num_rows
    if unused:
        end = layout.rows_per_line * layout.dim
        lines[-1, end - unused * layout.dim : end] = np.nan
    ids = ids_of(layout)
    lines = lines.reshape(layout.lines_shape)
    packed = PackedRows(
        lines=jnp.asarray(lines), layout=layout, kernels=kernels_of(layout)
    )
    result = gather(packed, ids)
    assert result.shape == (len(ids), *layout.row_shape)
    assert result.dtype == jnp.float32
    expected = rows[np.minimum(ids, layout.num_rows - 1)]
    np.testing.assert_array_equal(bits(result), bits(expected))


@every_layout
def test_gather_of_no_ids(layout):
    ids = np.zeros((0,), np.int32)
    result = gather(pack(random_rows(layout), layout), ids)
    assert result.shape == (0, *layout.row_shape)


@every_layout
def test_add_changes_the_named_rows_only(layout):
    rows = nasty_rows(layout)
    named = np.random.default_rng(2).permutation(layout.num_rows)[::3]
    named = np.union1d(named, [0, layout.num_rows - 1])
    rows[named] = random_rows(layout, 4)[named]
    # Just behind the last row is the unused part of its line.
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


@every_layout
def test_adding_to_no_row_changes_no_bit(layout):
    packed = pack(nasty_rows(layout), layout)
    ids = np.full(6, PADDING, np.int32)
    values = np.full((6, *layout.row_shape), np.inf, np.float32)
    result = add(packed, ids, values)
    np.testing.assert_array_equal(bits(result.lines), bits(packed.lines))


# Where rows share a line, XLA's sum of a denormal and -0.0 is 0 on CPU, as every sum
# with a denormal is on TPU.
@pytest.mark.parametrize("name", ["dim16-natural", "dim100-128", "dim200-128"])
def test_denormals_of_other_lines_survive(name):
    layout = LAYOUTS[name]
    rows = np.full((NUM_ROWS, *layout.row_shape), 1e-40, np.float32)
    ids = np.arange(0, NUM_ROWS, 2, dtype=np.int32)
    values = np.ones((len(ids), *layout.row_shape), np.float32)
    after = unpack(add(pack(rows, layout), ids, values))
    np.testing.assert_array_equal(bits(after)[1::2], bits(rows)[1::2])


@pytest.mark.parametrize("dim", [3, 16])
def test_all_rows_of_a_line_named_at_once(dim):
    layout = LAYOUTS[f"dim{dim}-128"]
    rows = random_rows(layout)
    ids = np.arange(NUM_ROWS, dtype=np.int32)
    values = random_rows(layout, 6)
    after = unpack(add(pack(rows, layout), ids, values))
    np.testing.assert_array_equal(after, rows + values)


@pytest.mark.parametrize(
    "name", ["dim16-natural", "dim16-128", "dim200-128", "scalar-128"]
)
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
    table_bytes = 4 * layout.num_lines * layout.lanes
    assert memory.alias_size_in_bytes == table_bytes
    assert memory.temp_size_in_bytes < table_bytes / 2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32], ids=str)
def test_other_storage_types(dtype):
    layout = LAYOUTS["dim24-128"]
    rows = jnp.asarray(np.arange(NUM_ROWS * 24).reshape(NUM_ROWS, 24) % 128, dtype)
    ids = np.array([4, 36, PADDING], np.int32)
    packed = add(pack(rows, layout), ids, np.full((3, 24), 2.0, np.float32))
    assert packed.lines.dtype == dtype
    expected = np.asarray(rows).copy()
    expected[[4, 36]] += np.asarray(2, expected.dtype)
    np.testing.assert_array_equal(unpack(packed), expected)
    assert gather(packed, ids).dtype == dtype


def test_layout_is_part_of_the_static_shape():
    packed = pack(random_rows(LAYOUTS["dim16-128"]), LAYOUTS["dim16-128"])
    leaves, tree = jax.tree.flatten(packed)
    assert len(leaves) == 1
    assert jax.tree.unflatten(tree, leaves).layout == packed.layout
    other = pack(random_rows(LAYOUTS["dim16-natural"]), LAYOUTS["dim16-natural"])
    assert tree != jax.tree.structure(other)


few_layouts = pytest.mark.parametrize(
    "layout",
    [LAYOUTS[name] for name in ("dim1-128", "dim3-128", "dim16-natural", "dim16-128")]
    + [LAYOUTS["dim24-128"]]
    + [LAYOUTS[name] for name in ("dim200-128", "scalar-natural")],
    ids=lambda layout: f"{layout.row_shape}-{layout.line_lanes}",
)


@few_layouts
def test_only_kept_rows_stay(layout):
    rows = nasty_rows(layout)
    is_kept = np.random.default_rng(7).random(layout.num_rows) < 0.5
    is_kept[[0, -1]] = [True, False]
    kept = jax.jit(keep_rows)(pack(rows.copy(), layout), is_kept)
    rows[~is_kept] = 0
    np.testing.assert_array_equal(bits(unpack(kept)), bits(rows))
    assert kept.layout == layout


@few_layouts
def test_rows_times_their_gains(layout):
    rows = random_rows(layout)
    gains = np.random.default_rng(8).normal(size=layout.num_rows).astype(np.float32)
    scaled = jax.jit(scale_rows)(pack(rows, layout), gains)
    expected = rows * gains.reshape(-1, *[1] * len(layout.row_shape))
    np.testing.assert_array_equal(unpack(scaled), expected)
    assert scaled.layout == layout


@few_layouts
@pytest.mark.parametrize("num_rows", [1, 37, 40])
def test_the_last_row_is_cleared(layout, num_rows):
    layout = dataclasses.replace(layout, num_rows=num_rows)
    rows = nasty_rows(layout)
    cleared = jax.jit(lambda x: clear_last_row(pack_rows(x, layout)))(rows.copy())
    rows[-1] = 0
    np.testing.assert_array_equal(bits(unpack(cleared)), bits(rows))
    assert cleared.layout == layout


@pytest.mark.parametrize(
    "sizes", [[16, 8, 32], [5], [3, 1, 9], [8, 3], [1, 8]], ids=str
)
@pytest.mark.parametrize(
    ("dim", "lanes"),
    quick_cases(
        [(1, 128), (16, 128), (200, 128), (16, None), (24, None), (24, 128)],
        *("16-128", "200-128", "24-None"),
    ),
)
def test_rows_of_several_arrays_follow_each_other(dim, lanes, sizes):
    rows = random_rows(RowLayout(num_rows=sum(sizes), row_shape=(dim,)))
    parts = np.split(rows, np.cumsum(sizes)[:-1])
    layout = RowLayout(num_rows=sum(sizes), row_shape=(dim,), line_lanes=lanes)
    packed = concatenate_rows([jnp.asarray(part) for part in parts], layout)
    assert packed.layout == layout
    np.testing.assert_array_equal(packed.lines, pack(rows, layout).lines)


@pytest.mark.parametrize("dim", [2, 3, 5, 8, 16])
def test_values_of_rows_by_lane(dim):
    layout = RowLayout(num_rows=9, row_shape=(dim,), line_lanes=16)
    columns = list(np.arange(3 * (16 // dim)).reshape(16 // dim, 3))
    result = broadcast_to_lanes([jnp.asarray(column) for column in columns], layout)
    expected = np.repeat(np.stack(columns, axis=1), dim, axis=1)
    assert result.shape == (3, 16)
    np.testing.assert_array_equal(result[:, : expected.shape[1]], expected)


@pytest.mark.parametrize("kernels", [None, KERNELS], ids=["xla", "kernels"])
@pytest.mark.parametrize("dim", [16, 200])
def test_layout_of_buffers(dim, kernels):
    layout = RowLayout(num_rows=37, row_shape=(dim,), line_lanes=128)
    if kernels is not None:
        layout = with_room_for_kernels(layout)
    buffer = PackedRows(lines=None, layout=layout, kernels=kernels).buffer_layout(9)
    assert (buffer.num_rows, buffer.spare_lines) == (9, 0)
    assert buffer.row_shape == (dim,)
    assert buffer.line_lanes == (None if kernels is None else 128)
    assert buffer.resized(3) == dataclasses.replace(buffer, num_rows=3)


@pytest.mark.parametrize(
    ("dim", "num_rows", "has_room", "num_lines"),
    [(16, 8, False, 1), (16, 8, True, 2), (16, 7, True, 1), (128, 9, True, 10)]
    + [(256, 9, False, 9), (256, 9, True, 16), (256, 7, True, 8), (256, 8, True, 16)],
)
def test_room_for_kernels(dim, num_rows, has_room, num_lines):
    layout = RowLayout(num_rows=num_rows, row_shape=(dim,), line_lanes=128)
    if has_room:
        layout = with_room_for_kernels(layout)
    assert layout.num_lines == num_lines
