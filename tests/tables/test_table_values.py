"""From stacked rows to one array per table, and back."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.rows.packed_rows import PackedRows
from tpu_embedding.tables import line_exchange

SIZES = {"a": 37, "b": 1, "c": 5}


def make_plan(num_devices=8, hardware="cpu", dim=3, dtype="float32"):
    """Three tables in `stack_0`, and `d` of another dim in `stack_1`."""
    sizes = {name: (size, dim) for name, size in SIZES.items()} | {"d": (10, dim + 1)}
    config = [
        te.FeatureConfig(
            table=te.TableConfig(vocabulary_size=size, dim=dim, name=name, dtype=dtype)
        )
        for name, (size, dim) in sizes.items()
    ]
    return te.make_plan(
        config, mesh_of(num_devices), hardware=te.hardware.hardware_by_name(hardware)
    )


def zeros(plan, row_shape=None):
    """Stacks of zeros, as tables or as a slot variable; no program is compiled."""
    stacks = {}
    for stack in plan.stacks:
        layout = stack.layout
        if row_shape is not None:
            row = jax.ShapeDtypeStruct(row_shape, np.float32)
            layout = layout.slot_layout(row)
        shape = (plan.num_shards * layout.num_lines, *layout.lines_shape[1:])
        lines = np.zeros(shape, layout.stored_dtype)
        lines = jax.device_put(lines, plan.rows_sharding(stack))
        stacks[stack.name] = PackedRows(lines=lines, layout=layout)
    return stacks


def random_values(plan, row_shape=None, seed=0):
    generator = np.random.default_rng(seed)
    return {
        table.name: generator.normal(
            size=(
                table.config.vocabulary_size,
                *((table.config.dim,) if row_shape is None else row_shape),
            )
        ).astype(np.float32)
        for stack in plan.stacks
        for table in stack.tables
    }


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(actual[name], expected[name])
        assert actual[name].dtype == expected[name].dtype


@pytest.mark.parametrize(
    ("num_devices", "hardware", "row_shape"),
    [(1, "cpu", None), (3, "v5p", None), (8, "cpu", None), (3, "v5p", ())],
)
def test_round_trip(num_devices, hardware, row_shape):
    plan = make_plan(num_devices, hardware)
    values = random_values(plan, row_shape)
    stacked = te.functional.with_table_values(zeros(plan, row_shape), values, plan)
    assert_equal(te.functional.unstack_tables(stacked, plan), values)
    for name, before in zeros(plan, row_shape).items():
        assert stacked[name].layout == before.layout
        assert stacked[name].lines.shape == before.lines.shape
        assert stacked[name].lines.sharding.is_equivalent_to(plan.batch_sharding, 2)


@pytest.mark.parametrize("dim", [1, 16, 200])
def test_round_trip_of_any_dim(dim):
    plan = make_plan(3, "v5p", dim)
    values = random_values(plan)
    stacked = te.functional.with_table_values(zeros(plan), values, plan)
    assert_equal(te.functional.unstack_tables(stacked, plan), values)


@pytest.mark.parametrize(
    ("num_devices", "hardware", "dtype"), [(1, "v5p", "int8"), (3, "cpu", "float32")]
)
def test_blocks_of_few_rows(num_devices, hardware, dtype, monkeypatch):
    plan = make_plan(num_devices, hardware, dtype=dtype)
    old, new = random_values(plan), random_values(plan, seed=1)
    some = {name: new[name] for name in "ac"}

    def read_and_write():
        stacked = te.functional.with_table_values(zeros(plan), old, plan)
        stacked = te.functional.with_table_values(stacked, some, plan)
        return stacked, te.functional.unstack_tables(stacked, plan)

    expected, expected_values = read_and_write()
    monkeypatch.setattr(line_exchange, "_MIN_BLOCK_BYTES", 64)
    found, found_values = read_and_write()
    assert_equal(found_values, expected_values)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_rows_are_dealt_in_turn():
    plan = make_plan(3)
    values = random_values(plan)
    stacked = te.functional.with_table_values(zeros(plan), values, plan)["stack_0"]
    shards = np.asarray(stacked.lines).reshape(3, -1, 3)
    for table in plan.stacks[0].tables:
        for row, expected in enumerate(values[table.name], table.row_offset):
            np.testing.assert_array_equal(shards[row % 3, row // 3], expected)


def test_tables_that_are_not_named_stay():
    plan = make_plan(3, "v5p")
    old = random_values(plan)
    stacked = te.functional.with_table_values(zeros(plan), old, plan)
    new = random_values(plan, seed=1)["b"]
    result = te.functional.with_table_values(stacked, {"b": new}, plan)
    assert_equal(te.functional.unstack_tables(result, plan), old | {"b": new})
    assert result["stack_1"] is stacked["stack_1"]
    # Nor does the argument change.
    assert_equal(te.functional.unstack_tables(stacked, plan), old)


def test_unknown_tables_are_refused_with_the_known_ones():
    plan = make_plan()
    values = {"a": np.zeros((37, 3)), "x": np.zeros(3), "w": np.zeros(3)}
    with pytest.raises(ValueError, match=re.escape("unknown tables ['w', 'x']")) as e:
        te.functional.with_table_values(zeros(plan), values, plan)
    assert "['a', 'b', 'c', 'd']" in str(e.value)


@pytest.mark.parametrize("shape", [(36, 3), (37,), (3, 37)], ids=str)
def test_values_of_another_shape_are_refused_by_table(shape):
    plan = make_plan()
    with pytest.raises(ValueError, match="values of table 'a'") as error:
        te.functional.with_table_values(zeros(plan), {"a": np.zeros(shape)}, plan)
    assert "(37, 3)" in str(error.value)
    assert str(shape) in str(error.value)


@pytest.mark.parametrize("hardware", ["v5p", "cpu"])
def test_values_of_narrow_tables_are_rounded_to_nearest(hardware):
    plan = make_plan(3, hardware, 5, "bfloat16")
    values = random_values(plan)
    stacked = te.functional.with_table_values(zeros(plan), values, plan)
    assert stacked["stack_0"].lines.dtype == jnp.int32
    found = te.functional.unstack_tables(stacked, plan)
    rounded = {
        name: np.asarray(jnp.asarray(rows, jnp.bfloat16).astype(jnp.float32))
        for name, rows in values.items()
    }
    assert_equal(found, rounded)
    # What was read is set again without a loss.
    again = te.functional.with_table_values(zeros(plan), found, plan)
    assert_equal(te.functional.unstack_tables(again, plan), rounded)


@pytest.mark.parametrize("dim", [1, 3])
def test_values_of_int8_tables_are_within_half_a_step(dim):
    plan = make_plan(3, "v5p", dim, "int8")
    values = random_values(plan)
    stacked = te.functional.with_table_values(zeros(plan), values, plan)
    found = te.functional.unstack_tables(stacked, plan)
    for name, rows in values.items():
        step = np.ptp(rows, axis=1, keepdims=True) / 255
        # And the rounding of float32, where a row has one value.
        assert (np.abs(found[name] - rows) <= 0.501 * step + 1e-6).all()
    # The largest error of a second time is that of float32.
    again = te.functional.with_table_values(zeros(plan), found, plan)
    for name, rows in te.functional.unstack_tables(again, plan).items():
        np.testing.assert_allclose(rows, found[name], rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (np.zeros((37, 3), complex), "complex128"),
        ([[1.0, 2.0], [3.0]], "inhomogeneous"),
    ],
    ids=["complex", "nested_lists"],
)
def test_values_that_are_no_real_numbers_are_refused_by_table(values, text):
    plan = make_plan()
    with pytest.raises(ValueError, match="values of table 'a'") as error:
        te.functional.with_table_values(zeros(plan), {"a": values}, plan)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("dtype", "bad", "text"),
    [
        ("float32", 1e39, "within 3.40282e+38 of zero for dtype float32, got 1e+39"),
        ("bfloat16", 3.4e38, "for dtype bfloat16"),
        ("bfloat16", -1e39, "for dtype bfloat16, got -1e+39"),
        ("int8", 1e39, "must be finite for dtype int8"),
        ("int8", np.nan, "must be finite for dtype int8"),
        ("int8", -np.inf, "must be finite for dtype int8"),
    ],
)
def test_values_beyond_a_type_are_refused_by_table(dtype, bad, text):
    plan = make_plan(2, dtype=dtype)
    values = np.zeros((37, 3))
    values[4, 1] = bad
    with pytest.raises(ValueError, match="values of table 'a'") as error:
        te.functional.with_table_values(zeros(plan), {"a": values}, plan)
    assert text in str(error.value) and "row 4" in str(error.value)


def test_infinities_of_16_bit_tables_stay():
    plan = make_plan(2, dtype="bfloat16")
    values = np.zeros((37, 3), np.float32)
    values[4] = [np.inf, -np.inf, np.nan]
    with pytest.warns(UserWarning, match="table 'a' hold 3, the first in row 4"):
        stacked = te.functional.with_table_values(zeros(plan), {"a": values}, plan)
    np.testing.assert_array_equal(
        te.functional.unstack_tables(stacked, plan)["a"], values
    )


@pytest.mark.parametrize("block_bytes", [2**26, 64])
def test_numbers_that_are_not_finite_are_counted(block_bytes, monkeypatch):
    monkeypatch.setattr(line_exchange, "_MIN_BLOCK_BYTES", block_bytes)
    plan = make_plan(2)
    values = random_values(plan)
    values["a"][5, 1] = np.nan
    values["a"][30] = np.inf
    values["c"][2] = np.nan
    with pytest.warns(UserWarning) as found:
        te.functional.with_table_values(zeros(plan), values, plan)
    (warning,) = found
    assert "'a' hold 4, the first in row 5; values of table 'c' hold 3" in str(
        warning.message
    )
