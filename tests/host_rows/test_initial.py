"""The store starts with the bits of a run that has all rows on the devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.tiers import matrix, quick_cases
from tpu_embedding.host_rows import initial
from tpu_embedding.host_rows.initial import (
    columns_of,
    file_rows_of_words,
    fill_slots,
    fill_tables,
    measured_state,
    rows_of_record,
    words_of_file_rows,
)
from tpu_embedding.rows import access
from tpu_embedding.tables.row_stream import read_blocks
from tpu_embedding.update.state import is_slot, slots_of, values_of

KEY = jax.random.key(3)


UNWRITTEN = np.uint32(0xDEADBEEF)

RULES = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adagrad": te.optimizers.adagrad(0.1),
    "rowwise_adagrad": te.optimizers.rowwise_adagrad(0.1),
    "lazy_adam": te.optimizers.lazy_adam(optax.linear_schedule(0.1, 0.0, 10)),
    "adafactor": te.optimizers.adafactor(0.1),
    "adafactor_exact": te.optimizers.adafactor(0.1, mode="exact"),
    "adafactor_ema": te.optimizers.adafactor(0.1, use_ema=True),
}


class Store:
    """Records of all rows of a stack in one array."""

    def __init__(self, stack):
        self.words = np.full(
            (stack.num_rows, columns_of(stack)[-1].stop), UNWRITTEN, np.uint32
        )
        self.largest = 0

    def read_range(self, begin, end, words):
        assert 0 <= begin <= end <= len(self.words)
        self.largest = max(self.largest, end - begin)
        return self.words[begin:end, words].copy()

    def write_range(self, begin, values, words):
        assert values.dtype == np.uint32
        assert 0 <= begin and begin + len(values) <= len(self.words)
        self.largest = max(self.largest, len(values))
        self.words[begin : begin + len(values), words] = values


def plan_of(rule, dtype="float32", num_devices=3, sizes=(45, 21), dim=3, **options):
    tables = [
        te.TableConfig(
            vocabulary_size=size,
            dim=dim,
            name=f"host_rows_{i}",
            dtype=dtype,
            initializer=options.get("initializer"),
        )
        for i, size in enumerate(sizes)
    ]
    plan = te.make_plan(
        [te.FeatureConfig(table=table) for table in tables],
        mesh_of(num_devices),
        optimizer=rule,
        hardware=te.hardware.hardware_by_name(options.get("hardware", "cpu")),
    )
    (stack,) = plan.trained_stacks
    return plan, stack


def filled(plan, stack):
    """Returns a filled store and the state of its stack."""
    store = Store(stack)
    fill_tables(store, stack, plan, KEY)
    return store, fill_slots(store, stack, plan, "slot {}".format)


def on_devices(plan, stack):
    """Returns the table and the state of the stack with all rows on the devices."""
    tables = te.functional.init_tables(plan, KEY)
    return tables[stack.name], te.functional.init_slots(tables, plan)[stack.name]


def assert_same_rows(store, arrays, stack, plan):
    """Compares the bits of all rows of tables with arrays on the devices."""
    rows = zip(arrays, columns_of(stack), rows_of_record(stack), strict=True)
    offsets = {table.name: table.row_offset for table in stack.tables}
    for packed, column, row in rows:
        for blocks in read_blocks(packed, stack, plan):
            for block in blocks:
                begin = offsets[block.table] + block.start
                words = store.words[begin : begin + len(block.rows), column]
                np.testing.assert_array_equal(words, words_of_file_rows(block.rows))
                stored = file_rows_of_words(words, row)
                assert (stored.dtype, stored.shape) == (
                    block.rows.dtype,
                    block.rows.shape,
                )


def assert_same_values(state, expected):
    """Compares structure, bits and shardings of what belongs to no row."""
    names = iter(range(len(slots_of(expected))))
    structure = jax.tree.map(
        lambda leaf: f"slot {next(names)}" if is_slot(leaf) else 0,
        expected,
        is_leaf=is_slot,
    )
    is_placeholder = [isinstance(leaf, str) for leaf in jax.tree.leaves(structure)]
    leaves, tree = jax.tree.flatten(state)
    assert tree == jax.tree.structure(structure)
    values = [
        leaf for leaf, slot in zip(leaves, is_placeholder, strict=True) if not slot
    ]
    for value, other in zip(values, values_of(expected), strict=True):
        assert (value.dtype, value.shape) == (other.dtype, other.shape)
        assert value.sharding == other.sharding
        assert np.asarray(value).tobytes() == np.asarray(other).tobytes()


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(access, "_ROWS_PER_BLOCK", 8)
    monkeypatch.setattr(initial, "_BLOCK_BYTES", 5 * 4 * 3)


@pytest.mark.parametrize(
    ("name", "dtype", "num_devices"),
    quick_cases(
        matrix(RULES, ["float32", "bfloat16"], [1, 2, 3, 8]),
        "adafactor_exact-bfloat16-2",
    ),
)
def test_equals_all_rows_on_the_devices(name, dtype, num_devices, small_blocks):
    plan, stack = plan_of(RULES[name], dtype, num_devices)
    store, state = filled(plan, stack)
    table, expected = on_devices(plan, stack)
    assert_same_rows(store, [table, *slots_of(expected)], stack, plan)
    assert_same_values(state, expected)
    assert_same_values(measured_state(store, stack, plan, "slot {}".format), expected)
    assert store.largest <= max(15, 8 * num_devices)  # never a whole table


@pytest.mark.parametrize(
    ("name", "dtype", "dim", "hardware"),
    quick_cases(
        [
            ("adafactor_ema", "bfloat16", 3, "v5p"),
            ("adafactor_ema", "float32", 200, "v6e"),
            ("rowwise_adagrad", "float32", 1, "cpu"),
        ],
        every_case=True,
    ),
)
def test_packed_rows_of_whole_blocks(name, dtype, dim, hardware):
    """Tables of several blocks of full size, with fewer rows than devices in one."""
    sizes = 70_011, 2
    plan, stack = plan_of(
        RULES[name], dtype, 3 if dim == 3 else 2, sizes, dim, hardware=hardware
    )
    store, state = filled(plan, stack)
    table, expected = on_devices(plan, stack)
    assert_same_rows(store, [table, *slots_of(expected)], stack, plan)
    assert_same_values(state, expected)


@pytest.mark.parametrize(
    "dtype", quick_cases(["float32", "bfloat16", "int8"], every_case=True)
)
def test_initializers_of_rows_and_of_whole_tables(dtype, small_blocks):
    initializers = [
        # It needs the whole shape.
        lambda key, shape, dtype: jnp.arange(np.prod(shape), dtype=dtype).reshape(
            shape
        ),
        te.initializers.normal(0.3, 0.1),
        te.initializers.uniform(-0.1, 0.3),
        te.initializers.normal(0.1, 0.4),
        te.initializers.constant(-0.0),
        None,
    ]
    plan = te.make_plan(
        [
            te.FeatureConfig(
                table=te.TableConfig(
                    vocabulary_size=size,
                    dim=5,
                    name=f"initial_{i}",
                    dtype=dtype,
                    initializer=initializer,
                )
            )
            for i, initializer in enumerate(initializers)
            for size in [3 + 10 * i]
        ],
        mesh_of(3),
    )
    stacks = te.functional.init_tables(plan, KEY)
    for stack in plan.stacks:
        store = Store(stack)
        fill_tables(store, stack, plan, KEY)
        assert_same_rows(store, [stacks[stack.name]], stack, plan)


@pytest.mark.parametrize("dtype", [np.uint8, jnp.bfloat16, np.float32, np.int32])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (8,)])
def test_words_hold_file_rows(dtype, shape):
    rows = np.arange(7 * int(np.prod(shape))).reshape(7, *shape).astype(dtype)
    words = words_of_file_rows(rows)
    num_bytes = int(np.prod(shape)) * rows.dtype.itemsize
    assert words.dtype == np.uint32 and words.shape == (7, -(-num_bytes // 4))
    row = jax.ShapeDtypeStruct(shape, dtype)
    np.testing.assert_array_equal(file_rows_of_words(words, row), rows)
