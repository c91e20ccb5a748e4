"""Blocks of rows in natural order, read from stacks and written to them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.tiers import each_once, full_cases, matrix, quick_cases
from tpu_embedding.rows.file_rows import file_row
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables import line_exchange, row_stream
from tpu_embedding.tables.line_exchange import rows_per_block
from tpu_embedding.tables.row_stream import read_blocks, write_blocks

SIZES = {"a": 301, "b": 1, "c": 5, "d": 40}


def plan_of(mesh, dim=3, dtype="float32", hardware="cpu", placement=None, **options):
    features = [
        te.FeatureConfig(
            table=te.TableConfig(vocabulary_size=size, dim=dim, name=name, dtype=dtype)
        )
        for name, size in SIZES.items()
    ]
    return te.make_plan(
        features,
        mesh,
        hardware=te.hardware.hardware_by_name(hardware),
        placement=placement,
        **options,
    )


def random_lines(packed, stack, plan, seed=0):
    """Rows of random bits, the same on all copies; unused lanes are also random."""
    generator = np.random.default_rng(seed)
    shape, dtype = packed.lines.shape, packed.lines.dtype
    bits = generator.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    is_bool = np.issubdtype(dtype, np.bool_)
    lines = (bits & 1).astype(bool)[..., 0] if is_bool else bits.view(dtype)
    lines = jax.device_put(lines.reshape(shape), plan.rows_sharding(stack))
    return dataclasses.replace(packed, lines=lines)


def packed_of(plan, row=None, seed=0):
    (stack,) = plan.stacks
    layout = stack.layout
    dtype = layout.stored_dtype
    if row is not None:
        layout, dtype = layout.slot_layout(row), row.dtype
    shape = (stack.num_shards * layout.num_lines, *layout.lines_shape[1:])
    packed = PackedRows(lines=jax.ShapeDtypeStruct(shape, dtype), layout=layout)
    return random_lines(packed, stack, plan, seed), stack


def bits_of(array):
    return np.ascontiguousarray(array).view(np.uint8)


def tables_of(blocks, packed, sizes=SIZES):
    """Puts blocks together; checks that every row comes exactly once."""
    row = file_row(packed)
    tables = {n: np.zeros((s, *row.shape), row.dtype) for n, s in sizes.items()}
    counts = {n: np.zeros(s, int) for n, s in sizes.items()}
    for name, start, rows in blocks:
        assert rows.dtype == row.dtype
        tables[name][start : start + len(rows)] = rows
        counts[name][start : start + len(rows)] += 1
    for count in counts.values():
        np.testing.assert_array_equal(count, 1)
    return tables


def read_all(packed, stack, plan, receivers="one"):
    turns = list(read_blocks(packed, stack, plan, receivers=receivers))
    return tables_of([block for turn in turns for block in turn], packed)


def values_of(rows, layout):
    """The float32 numbers of rows of a file."""
    if layout.narrow_dtype != "int8":
        return rows.astype(np.float32)
    ends = np.ascontiguousarray(rows[:, layout.dim :]).view(np.float32)
    return rows[:, : layout.dim].astype(np.float32) * ends[:, :1] + ends[:, 1:]


ROWS = {
    "table": None,
    "one value": jax.ShapeDtypeStruct((), jnp.float32),
    "bool": jax.ShapeDtypeStruct((), jnp.bool_),
    "bfloat16 slot": jax.ShapeDtypeStruct((3,), jnp.bfloat16),
    "wide slot": jax.ShapeDtypeStruct((9,), jnp.float32),
}
PLACEMENTS = {
    "all axes": None,
    "one axis": te.Sharded(axes=("model",)),
    "replicated": te.Replicated(),
}


@pytest.fixture(params=["on host", "exchanged"], autouse=True)
def way(request, monkeypatch):
    """Rows go the way of CPU devices, and that of all others."""
    if request.param == "exchanged":
        monkeypatch.setattr(row_stream, "_is_on_host", lambda packed: False)
    return request.param


@pytest.mark.parametrize(
    ("dim", "row"), quick_cases([(200, None), (3, "one value")], "3-one value")
)
def test_rows_that_are_dealt_to_sparse_cores(dim, row, monkeypatch):
    monkeypatch.setattr(line_exchange, "_MIN_BLOCK_BYTES", 2000)
    plan = plan_of(mesh_of(3), dim, backend=te.SparseCore(cores=2))
    assert_round_trip(plan, ROWS[row] if row else None)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(line_exchange, "_MIN_BLOCK_BYTES", 200)


def assert_round_trip(plan, row=None):
    """Reads equal the values by table; a write of them gives equal bits."""
    packed, stack = packed_of(plan, row)
    tables = read_all(packed, stack, plan)
    # Random bits hold NaNs, and scales whose products with codes are infinite.
    with np.errstate(all="ignore"):
        expected = te.functional.unstack_tables({stack.name: packed}, plan)
        for name, rows in tables.items():
            found = values_of(rows, packed.layout)
            np.testing.assert_array_equal(found, expected[name].astype(np.float32))
    for name, rows in read_all(packed, stack, plan, "all").items():
        np.testing.assert_array_equal(bits_of(rows), bits_of(tables[name]))
    other, _ = packed_of(plan, row, seed=1)
    sharding = other.lines.sharding

    def read(name, start, num_rows):
        return tables[name][start : start + num_rows]

    new = write_blocks(other, stack, plan, read)
    assert new.lines.sharding.is_equivalent_to(sharding, new.lines.ndim)
    for name, rows in read_all(new, stack, plan).items():
        np.testing.assert_array_equal(bits_of(rows), bits_of(tables[name]))
    for shard in new.lines.addressable_shards:
        same = [s for s in new.lines.addressable_shards if s.index == shard.index]
        for copy in same:
            np.testing.assert_array_equal(
                bits_of(np.asarray(copy.data)), bits_of(np.asarray(shard.data))
            )


@pytest.mark.parametrize(
    ("num_devices", "hardware", "row"), each_once([2, 1], ["v5p", "cpu"], ROWS)
)
def test_round_trip(num_devices, hardware, row, small_blocks):
    plan = plan_of(mesh_of(num_devices), hardware=hardware)
    assert_round_trip(plan, ROWS[row])


@pytest.mark.parametrize(
    ("hardware", "dtype", "dim"),
    quick_cases(
        matrix(["v5p", "cpu"], ["bfloat16", "int8"], [1, 7, 100, 1024]),
        *("v5p-bfloat16-1", "cpu-int8-7"),
    ),
)
def test_any_dim_and_dtype(dim, dtype, hardware, monkeypatch):
    monkeypatch.setattr(line_exchange, "_MIN_BLOCK_BYTES", 32 * dim)
    assert_round_trip(plan_of(mesh_of(3), dim, dtype, hardware))


@pytest.mark.parametrize(
    ("kind", "placement"),
    full_cases(
        zip([AxisType.Auto, AxisType.Explicit, AxisType.Auto], PLACEMENTS, strict=True),
        f"{AxisType.Auto}-all axes",
    ),
)
def test_any_placement(placement, kind, small_blocks):
    devices = np.asarray(jax.devices()[:6]).reshape(2, 3)
    mesh = Mesh(devices, ("data", "model"), axis_types=(kind, kind))
    assert_round_trip(plan_of(mesh, hardware="v5p", placement=PLACEMENTS[placement]))


def test_a_write_changes_the_rows_that_are_named_and_no_others(small_blocks):
    plan = plan_of(mesh_of(3), dim=5, dtype="bfloat16", hardware="v5p")
    packed, stack = packed_of(plan)
    before = read_all(packed, stack, plan)
    num_new = {"a": 290, "c": 5, "d": 0}
    asked = []

    def read(name, start, num_rows):
        asked.append((name, start, num_rows))
        return np.full((num_rows, 5), len(asked), jnp.bfloat16)

    new = write_blocks(packed, stack, plan, read, num_new)
    assert packed.lines.is_deleted()
    after = read_all(new, stack, plan)
    block = rows_per_block(10)
    for _, start, num_rows in asked:
        assert start // block == (start + num_rows - 1) // block
    for name, rows in after.items():
        end = num_new.get(name, 0)
        assert (rows[:end] > 0).all()
        np.testing.assert_array_equal(bits_of(rows[end:]), bits_of(before[name][end:]))
    assert sum(num_rows for _, _, num_rows in asked) == 290 + 5


@pytest.mark.full(every_case=True)
def test_blocks_stay_when_the_lines_are_donated(small_blocks):
    plan = plan_of(mesh_of(3))
    packed, stack = packed_of(plan)
    blocks = sum(read_blocks(packed, stack, plan), [])
    before = [block.rows.copy() for block in blocks]
    jax.jit(lambda lines: lines * 0, donate_argnums=0)(packed.lines).block_until_ready()
    for block, rows in zip(blocks, before, strict=True):
        np.testing.assert_array_equal(bits_of(block.rows), bits_of(rows))


PROCESSES = {
    "one": ([0, 0, 0], [0, 1, 2]),
    "two": ([0, 1, 0, 1], [0, 0, 1, 1]),
    "with unequal numbers of devices": ([0, 0, 0, 1, 1], [0, 1, 0, 0, 1]),
}


@pytest.mark.parametrize("case", PROCESSES)
def test_all_processes_get_each_window_of_a_turn(case):
    processes, windows = PROCESSES[case]
    assert row_stream.windows_for_all(processes) == windows
