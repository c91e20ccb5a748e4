"""First values depend on seed, table name and row, and on nothing else."""

import functools
import math

import jax
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects

KEY = jax.random.key(11)


def random_integers(key, shape, dtype):
    """An initializer without rounding: any compiler computes the same bits."""
    return (jax.random.bits(key, shape) >> 8).astype(dtype)


def table(name, vocabulary_size, dim=4, initializer=None):
    return te.TableConfig(
        vocabulary_size=vocabulary_size, dim=dim, name=name, initializer=initializer
    )


TABLES = (
    table("big", 101),
    table("one_row", 1),
    table("five", 5),  # fewer rows than 8 devices
    table("integers", 41, initializer=random_integers),
    table("wide", 13, 200),
    table("fan", 11, 4, jax.nn.initializers.variance_scaling(1, "fan_in", "normal")),
    table("normal", 45, 4, te.initializers.normal(0.3, 0.1)),
    table("uniform", 33, 4, te.initializers.uniform(-0.1, 0.3)),
    table("each_row", 29, 4, te.initializers.rowwise(random_integers)),
)


# With LLVM's optimizations, which other tests leave out: without them, programs of
# different numbers of devices round the initializers of JAX otherwise.
init_tables = jax.jit(
    te.functional.init_tables,
    static_argnums=0,
    compiler_options={
        "xla_backend_optimization_level": 3,
        "xla_llvm_disable_expensive_passes": False,
    },
)


@functools.cache
def values_of(num_devices=1, hardware=None, tables=TABLES, key_data=11, **options):
    """Logical initial values by table name."""
    plan = te.make_plan(
        [te.FeatureConfig(table=t) for t in tables],
        mesh_of(num_devices),
        hardware=None if hardware is None else te.hardware.hardware_by_name(hardware),
        **options,
    )
    stacked = init_tables(plan, jax.random.key(key_data))
    for stack in plan.stacks:
        lines = stacked[stack.name].lines
        assert lines.sharding.is_equivalent_to(plan.batch_sharding, 2)
        assert lines.dtype == stack.layout.stored_dtype
        assert stacked[stack.name].layout == stack.layout
    return te.functional.unstack_tables(stacked, plan)


# Another program may round an initializer of JAX otherwise: XLA fuses and vectorises it
# as it pleases. Seen: 2 units in the last place, 2.3e-7.
ROUNDING = {"fan": dict(rtol=1e-6, atol=0)}


def assert_same_values(actual, expected):
    assert actual.keys() <= expected.keys()
    for name in actual:
        tolerance = ROUNDING.get(name, dict(rtol=0, atol=0))
        np.testing.assert_allclose(
            actual[name], expected[name], **tolerance, err_msg=name
        )


@pytest.mark.full
@pytest.mark.parametrize(("num_devices", "hardware"), [(8, "v5p"), (3, None)])
def test_equal_on_any_devices_and_in_any_packing(num_devices, hardware):
    values = values_of(num_devices, hardware)
    assert values.keys() == {t.name for t in TABLES}
    assert_same_values(values, values_of())


@pytest.mark.full
def test_equal_if_rows_are_dealt_to_sparse_cores():
    values = values_of(3, backend="sparse_core")
    assert_same_values(values, values_of())


def test_equal_in_any_stack():
    expected = values_of(tables=TABLES[:4])
    # Other neighbours, before and after, on two devices; and another key.
    first, last = table("a_new_first_one", 3), table("zz_new_last_one", 9)
    tables = (first, TABLES[0], TABLES[3], last)
    more = values_of(2, tables=tables)
    assert_same_values({name: more[name] for name in ("big", "integers")}, expected)
    for name, values in values_of(2, tables=tables, key_data=12).items():
        assert not np.isin(values, more[name]).any()


@pytest.mark.full
@pytest.mark.parametrize(("dim", "dtype"), [(3, "bfloat16"), (64, "float32")])
def test_tables_of_several_slabs_are_equal_on_any_devices(dim, dtype):
    # Sizes around the slabs' ends; the first table starts within a line of the second.
    sizes = {"a": 5, "b": 16_384, "c": 20_001}
    tables = tuple(
        te.TableConfig(vocabulary_size=size, dim=dim, name=name, dtype=dtype)
        for name, size in sizes.items()
    )
    expected = values_of(tables=tables)
    for num_devices, hardware in ((1, "v5p"), (3, None)):
        assert_same_values(values_of(num_devices, hardware, tables), expected)
    if dtype == "float32":
        assert np.unique(expected["c"][:, 0]).size > 0.9 * sizes["c"]


@pytest.mark.full
def test_no_temporary_grows_with_the_tables():
    temporaries = []
    for num_rows in (100_000, 400_000):
        plan = te.make_plan(
            te.FeatureConfig(table=table("a", num_rows, 64)), mesh_of(2)
        )
        compiled = jax.jit(te.functional.init_tables).lower(plan, KEY).compile()
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
        assert temporaries[-1] < max(0.02 * num_rows * 256 / 2, 2**20)
    assert temporaries[1] < 4.1 * temporaries[0]


def test_one_program_whatever_the_number_of_tables():
    sizes = []
    for num_tables in (2, 40):
        tables = [table(f"t{i}", 10 + i) for i in range(num_tables)]
        plan = te.make_plan([te.FeatureConfig(table=t) for t in tables], mesh_of(1))
        lowered = jax.jit(te.functional.init_tables).lower(plan, KEY)
        sizes.append(lowered.as_text().count(" = "))
    assert sizes[0] == sizes[1]


def test_default_scale_is_that_of_the_tables_dim():
    tables = (table("a", 2000, 4), table("b", 2000, 100))
    for name, dim in (("a", 4), ("b", 100)):
        values = values_of(8, tables=tables)[name]
        stddev = 1 / math.sqrt(dim)
        assert np.abs(values).max() <= 2 * stddev * (1 + 1e-6)
        # A normal cut at two deviations keeps 0.8796 of its deviation; 8,000 samples
        # know theirs to 0.8 %.
        assert np.std(values) == pytest.approx(0.8796 * stddev, rel=0.03)


@pytest.mark.parametrize("num_devices", [1, 8])
def test_initializer_of_another_shape_is_rejected_by_table(num_devices):
    def transposed(key, shape, dtype):
        return jax.random.normal(key, shape[::-1], dtype)

    with rejects(field="TableConfig.initializer", fix="'bad'"):
        values_of(num_devices, tables=(table("bad", 6, 4, transposed),))
