"""Bytes per device, for sizes that can be reckoned by hand and against real arrays."""

import jax
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.plan.memory import format_bytes, format_table, rows_bytes
from tpu_embedding.rows.packed_rows import RowLayout

CPU, V5P = te.hardware.hardware_by_name("cpu"), te.hardware.hardware_by_name("v5p")


def plan_of(
    vocabulary_size,
    dim,
    num_devices=1,
    hardware=CPU,
    optimizer=None,
    dtype="float32",
):
    table = te.TableConfig(vocabulary_size=vocabulary_size, dim=dim, dtype=dtype)
    return te.make_plan(
        te.FeatureConfig(table=table),
        mesh_of(num_devices),
        hardware=hardware,
        optimizer=optimizer,
    )


@pytest.mark.parametrize(
    ("vocabulary_size", "dim", "num_devices", "line_bytes", "num_lines"),
    [
        (1024, 1, 1, 512, 8),  # 128 rows to a line
        (1000, 16, 1, 512, 128),  # 125 lines, 8 to a tile
        (1024, 16, 1, 512, 128),  # packs exactly
        (1025, 16, 1, 512, 136),
        (1000, 16, 8, 512, 16),  # 125 rows, 16 lines
        (1024, 64, 8, 512, 64),
        (1024, 100, 1, 512, 1024),  # 28 lanes unused
        (1024, 128, 1, 512, 1024),
        (1024, 200, 8, 1024, 128),
        (1, 3, 8, 512, 8),  # one tile at least
    ],
)
def test_tables_on_tpu(vocabulary_size, dim, num_devices, line_bytes, num_lines):
    plan = plan_of(vocabulary_size, dim, num_devices, V5P)
    assert plan.table_bytes_per_device == line_bytes * num_lines
    assert plan.slot_bytes_per_device == 0


@pytest.mark.parametrize(
    ("vocabulary_size", "dim", "num_devices", "num_bytes"),
    [(1000, 16, 1, 64_000), (1000, 16, 8, 8_000), (7, 3, 2, 48), (1, 1, 8, 4)],
)
def test_tables_on_cpu(vocabulary_size, dim, num_devices, num_bytes):
    plan = plan_of(vocabulary_size, dim, num_devices)
    assert plan.table_bytes_per_device == num_bytes


OPTIMIZERS = {
    "sgd": (te.optimizers.sgd(0.1), 0),
    "rowwise_adagrad": (te.optimizers.rowwise_adagrad(0.1), 1 / 16),
    "adagrad": (te.optimizers.adagrad(0.1), 1),
    "adam": (te.optimizers.adam(0.1), 2),
    "optax.adam": (optax.adam(0.1), 2),
}


@pytest.mark.parametrize(
    ("optimizer", "per_table"), OPTIMIZERS.values(), ids=OPTIMIZERS
)
@pytest.mark.parametrize("hardware", [CPU, V5P], ids=["cpu", "v5p"])
def test_slots_in_units_of_the_table(optimizer, per_table, hardware):
    # 16,384 rows of 16 fill lines of 8 and of 128 rows exactly.
    plan = plan_of(16_384, 16, 2, hardware, optimizer)
    assert plan.table_bytes_per_device == 8192 * 16 * 4
    assert plan.slot_bytes_per_device == per_table * plan.table_bytes_per_device


def test_one_slot_value_per_row_is_padded_to_a_tile():
    # 100 rows: one line of 128, of which a tile has 8.
    plan = plan_of(100, 64, 1, V5P, te.optimizers.rowwise_adagrad(0.1))
    assert plan.slot_bytes_per_device == 8 * 512
    assert plan.table_bytes_per_device == 56 * 512


def test_stacks_and_their_slots_add_up():
    tables = [
        te.TableConfig(vocabulary_size=1024, dim=16, name="a"),
        te.TableConfig(vocabulary_size=2048, dim=16, name="b"),
        te.TableConfig(
            vocabulary_size=1024, dim=64, name="c", optimizer=te.optimizers.adam(0.1)
        ),
    ]
    plan = te.make_plan(
        [te.FeatureConfig(table=t) for t in tables], mesh_of(2), hardware=V5P
    )
    assert plan.table_bytes_per_device == (3 * 1024 * 16 + 1024 * 64) * 4 // 2
    assert [plan.slot_bytes_of(stack) for stack in plan.stacks] == [0, 1024 * 64 * 4]
    assert plan.slot_bytes_per_device == 1024 * 64 * 4


@pytest.mark.parametrize("hardware", [CPU, V5P], ids=["cpu", "v5p"])
@pytest.mark.parametrize("dim", [3, 16, 200])
def test_shapes_of_the_arrays_agree(dim, hardware):
    # Each shard has a multiple of 8 lines, so that nothing is added for tiles.
    plan = plan_of(42 * 8 * 16, dim, 2, hardware, te.optimizers.adam(0.1))
    tables = jax.eval_shape(te.functional.init_tables, plan, jax.random.key(0))
    slots = jax.eval_shape(te.functional.init_slots, tables, plan)

    def bytes_of(tree):
        return sum(4 * x.size for x in jax.tree.leaves(tree) if x.ndim == 2)

    assert bytes_of(tables) == 2 * plan.table_bytes_per_device
    assert bytes_of(slots) == 2 * plan.slot_bytes_per_device


@pytest.mark.parametrize(
    ("dtype", "dim", "line_bytes", "num_lines"),
    [
        ("bfloat16", 1, 512, 32),  # always half of float32
        ("bfloat16", 3, 512, 104),  # 84 rows to a line
        ("bfloat16", 16, 512, 512),
        ("bfloat16", 128, 512, 4096),
        ("float16", 128, 512, 4096),
        ("bfloat16", 200, 1024, 4096),  # 2 rows to a line of 256 lanes
        ("int8", 16, 512, 392),  # 6 words, 21 rows to a line
        ("int8", 128, 512, 2736),  # 34 words, 3 rows to a line
    ],
)
def test_narrow_tables_on_tpu(dtype, dim, line_bytes, num_lines):
    optimizer = None if dtype == "int8" else te.optimizers.adagrad(0.1)
    plan = plan_of(8192, dim, 1, V5P, optimizer, dtype)
    assert plan.table_bytes_per_device == num_lines * line_bytes
    if optimizer is not None:
        # Slots stay float32.
        float32 = plan_of(8192, dim, 1, V5P, optimizer)
        assert plan.slot_bytes_per_device == float32.slot_bytes_per_device
    assert f" {dtype} " in str(plan)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
@pytest.mark.parametrize("hardware", [CPU, V5P], ids=["cpu", "v5p"])
def test_shapes_of_narrow_arrays_agree(dtype, hardware):
    plan = plan_of(42 * 8 * 16, 16, 2, hardware, None, dtype)
    tables = jax.eval_shape(te.functional.init_tables, plan, jax.random.key(0))
    (lines,) = jax.tree.leaves(tables)
    assert 4 * lines.size == 2 * plan.table_bytes_per_device
    if hardware is CPU:
        row_bytes = {"int8": 24}.get(dtype, 32)
        assert plan.table_bytes_per_device == 42 * 8 * 8 * row_bytes


@pytest.mark.parametrize("itemsize", [2, 4])
def test_rows_bytes(itemsize):
    layout = RowLayout(num_rows=9, row_shape=(64,), line_lanes=128)
    assert rows_bytes(layout, V5P, itemsize) == 8 * 128 * itemsize
    assert rows_bytes(layout, CPU, itemsize) == 5 * 128 * itemsize


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20, "1.00 MiB"),
        (5 * 2**30, "5.00 GiB"),
        (3 * 2**40, "3072.00 GiB"),
    ],
)
def test_format_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_format_table():
    rows = [("name", "kind", "rows"), ("a", "xy", "1,000"), ("longer", "z", "7")]
    assert format_table(rows, num_left_aligned=2).splitlines() == [
        "name    kind   rows",
        "a       xy    1,000",
        "longer  z         7",
    ]
    assert format_table(rows).splitlines()[2] == "longer     z      7"
