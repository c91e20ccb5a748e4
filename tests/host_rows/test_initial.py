"""Rows on the host start with the bits of rows on the devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.host_rows.twins import Run, check_equal
from tests.tiers import matrix, quick_cases
from tpu_embedding.host_rows import initial
from tpu_embedding.host_rows.records import file_rows_of_words, words_of_file_rows
from tpu_embedding.host_rows.store import RowStore
from tpu_embedding.rows import access
from tpu_embedding.update.state import values_of

WEIGHTS = optax.GradientTransformation(
    lambda rows: jnp.broadcast_to(
        jnp.arange(rows.shape[1], dtype=jnp.float32), rows.shape
    ),
    lambda updates, state, _: (updates * (1 + state), state),
)
"""A rule whose slot starts with another value for each element of a row."""

RULES = {
    "weights": WEIGHTS,
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adagrad": te.optimizers.adagrad(0.1),
    "rowwise_adagrad": te.optimizers.rowwise_adagrad(0.1),
    "lazy_adam": te.optimizers.lazy_adam(optax.linear_schedule(0.1, 0.0, 10)),
    "adafactor": te.optimizers.adafactor(0.1),
    "adafactor_exact": te.optimizers.adafactor(0.1, mode="exact"),
}


def run_of(placement, rule, sizes, num_devices, dim=3, hardware="cpu", **options):
    """Returns new tables and slots of tables of some sizes."""
    tables = [
        te.TableConfig(
            vocabulary_size=size, dim=dim, name=f"t{i}", placement=placement, **options
        )
        for i, size in enumerate(sizes)
    ]
    plan = te.make_plan(
        [te.FeatureConfig(table=table) for table in tables],
        mesh_of(num_devices),
        optimizer=rule,
        hardware=te.hardware.hardware_by_name(hardware),
    )
    return Run(plan=plan, seed=3)


def check_same_start(*args, **options):
    """Compares all rows, slots, totals and counts; returns the run on the host."""
    placements = te.HostRows(cache_rows=64), te.Sharded()
    host, devices = (run_of(place, *args, **options) for place in placements)
    check_equal(host.state(), devices.state())
    for value, other in zip(
        values_of(host.slots), values_of(devices.slots), strict=True
    ):
        assert (value.dtype, value.sharding) == (other.dtype, other.sharding)
    return host, devices


@pytest.fixture
def largest_blocks(monkeypatch):
    """Makes blocks small, and collects how many rows are written at once."""
    monkeypatch.setattr(access, "_ROWS_PER_BLOCK", 8)
    monkeypatch.setattr(initial, "_BLOCK_BYTES", 5 * 4 * 3)
    sizes, write = [], RowStore.write_range

    @functools.wraps(write)
    def counted(store, begin, values, words):
        sizes.append(len(values))
        write(store, begin, values, words)

    monkeypatch.setattr(RowStore, "write_range", counted)
    return sizes


@pytest.mark.parametrize(
    ("name", "dtype", "num_devices"),
    quick_cases(
        matrix(RULES, ["float32", "bfloat16"], [1, 2, 3, 8]),
        "adafactor_exact-bfloat16-2",
    ),
)
def test_equals_all_rows_on_the_devices(name, dtype, num_devices, largest_blocks):
    runs = check_same_start(RULES[name], (45, 21), num_devices, dtype=dtype)
    assert max(largest_blocks) <= max(15, 8 * num_devices)  # never a whole table
    rows = np.arange(45 * 3, dtype=np.float32).reshape(45, 3)
    for run in runs:
        run.tables, run.slots = te.functional.with_table_values(
            run.tables, {"t0": rows}, run.plan, run.slots
        )
    check_equal(*(run.state() for run in runs))  # Totals are measured again.


@pytest.mark.parametrize(
    ("name", "dtype", "dim", "hardware"),
    quick_cases(
        [
            ("adafactor", "bfloat16", 3, "v5p"),
            ("adafactor", "float32", 200, "v6e"),
            ("rowwise_adagrad", "float32", 1, "cpu"),
        ],
        every_case=True,
    ),
)
def test_packed_rows_of_whole_blocks(name, dtype, dim, hardware):
    """Tables of several blocks of full size, with fewer rows than devices in one."""
    num_devices = 3 if dim == 3 else 2
    check_same_start(
        *(RULES[name], (70_011, 2), num_devices, dim, hardware), dtype=dtype
    )


@pytest.mark.parametrize("dtype", quick_cases(["float32", "bfloat16"], every_case=True))
def test_initializers_of_rows_and_of_whole_tables(dtype, largest_blocks):
    for initializer in (
        # It needs the whole shape.
        lambda key, shape, dtype: jnp.arange(np.prod(shape), dtype=dtype).reshape(
            shape
        ),
        te.initializers.normal(0.3, 0.1),
        te.initializers.uniform(-0.1, 0.3),
        te.initializers.constant(-0.0),
        None,
    ):
        check_same_start(None, (3, 43), 3, 5, dtype=dtype, initializer=initializer)


@pytest.mark.parametrize("dtype", [np.uint8, jnp.bfloat16, np.float32, np.int32])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (8,)])
def test_words_hold_file_rows(dtype, shape):
    rows = np.arange(7 * int(np.prod(shape))).reshape(7, *shape).astype(dtype)
    words = words_of_file_rows(rows)
    num_bytes = int(np.prod(shape)) * rows.dtype.itemsize
    assert words.dtype == np.uint32 and words.shape == (7, -(-num_bytes // 4))
    row = jax.ShapeDtypeStruct(shape, dtype)
    np.testing.assert_array_equal(file_rows_of_words(words, row), rows)
