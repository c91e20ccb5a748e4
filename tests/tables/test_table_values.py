"""From stacked rows to one array per table, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import ANY, rejects
from tests.tiers import quick_cases
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
    ("num_devices", "hardware", "dim", "row_shape"),
    quick_cases(
        [
            *((1, "cpu", 3, None), (8, "cpu", 3, None)),
            pytest.param(3, "v5p", 3, (), id="one value"),
            *((2, "v5p", dim, None) for dim in (3, 16, 200)),
        ],
        *("1-cpu-3-None", "2-v5p-3-None"),
    ),
)
def test_round_trip(num_devices, hardware, dim, row_shape):
    plan = make_plan(num_devices, hardware, dim)
    values = random_values(plan, row_shape)
    stacked = te.functional.with_table_values(zeros(plan, row_shape), values, plan)
    assert_equal(te.functional.unstack_tables(stacked, plan), values)
    for name, before in zeros(plan, row_shape).items():
        assert stacked[name].layout == before.layout
        assert stacked[name].lines.shape == before.lines.shape
        assert stacked[name].lines.sharding.is_equivalent_to(plan.batch_sharding, 2)


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


@pytest.mark.parametrize("hardware", quick_cases(["v5p", "cpu"], "v5p"))
def test_values_of_narrow_tables_are_rounded_to_nearest(hardware):
    plan = make_plan(2, hardware, 5, "bfloat16")
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


@pytest.mark.parametrize("dim", quick_cases([1, 3], "3"))
def test_values_of_int8_tables_are_within_half_a_step(dim):
    plan = make_plan(2, "v5p", dim, "int8")
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


# The table's dtype, values of table "a", and the value of the error.
WRONG = {
    "few rows": ("float32", np.zeros((36, 3)), (36, 3)),
    "flat": ("float32", np.zeros(37), (37,)),
    "transposed": ("float32", np.zeros((3, 37)), (3, 37)),
    "complex": ("float32", np.zeros((37, 3), complex), ANY),
    "nested_lists": ("float32", [[1.0, 2.0], [3.0]], ANY),
    **{
        f"{bad} in {dtype}": (dtype, bad, value)
        for dtype, bad, value in [
            ("float32", 1e39, 1e39),
            ("bfloat16", 3.4e38, 3.4e38),
            ("bfloat16", -1e39, -1e39),
            ("int8", 1e39, (0, np.inf)),
            ("int8", np.nan, ANY),
            ("int8", -np.inf, (-np.inf, 0)),
        ]
    },
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_rejected_by_table(case):
    dtype, values, found = WRONG[case]
    plan, fix = make_plan(2, dtype=dtype), "table 'a'"
    if isinstance(values, float):
        bad, values, fix = values, np.zeros((37, 3)), "row 4"
        values[4, 1] = bad
    with rejects(field="values of table 'a'", value=found, fix=fix):
        te.functional.with_table_values(zeros(plan), {"a": values}, plan)


def test_unknown_tables_are_rejected():
    plan = make_plan(1)
    values = {"a": np.zeros((37, 3)), "x": np.zeros(3), "w": np.zeros(3)}
    with rejects(field="values", value=["w", "x"], fix="['a', 'b', 'c', 'd']"):
        te.functional.with_table_values(zeros(plan), values, plan)


@pytest.mark.parametrize("block_bytes", [2**26, 64])
def test_numbers_that_are_not_finite_are_set_and_counted(block_bytes, monkeypatch):
    monkeypatch.setattr(line_exchange, "_MIN_BLOCK_BYTES", block_bytes)
    plan = make_plan(2, dtype="bfloat16")
    values = {"a": np.zeros((37, 3), np.float32), "c": np.zeros((5, 3), np.float32)}
    values["a"][5, 1], values["a"][30], values["c"][2] = np.nan, np.inf, -np.inf
    with pytest.warns(UserWarning) as found:
        stacked = te.functional.with_table_values(zeros(plan), values, plan)
    (warning,) = found
    assert "'a' hold 4, the first in row 5; values of table 'c' hold 3" in str(
        warning.message
    )
    after = te.functional.unstack_tables(stacked, plan)
    assert_equal({name: after[name] for name in values}, values)
