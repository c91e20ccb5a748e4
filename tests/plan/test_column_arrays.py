"""Which tables lie in column arrays, and what `print(plan)` says of the others."""

import dataclasses

import pytest

import tpu_embedding as te
from tests.conftest import mesh_of

V5P = te.hardware.hardware_by_name("v5p")
LARGE = 9_000_000  # 17.17 GiB of dim 512


def plan_of(num_rows, dim, *, dtype="float32", hardware=V5P, num_devices=1, **options):
    table = te.TableConfig(vocabulary_size=num_rows, dim=dim, name="large", dtype=dtype)
    rule = te.optimizers.adagrad(0.1)
    mesh = mesh_of(num_devices)
    config = te.FeatureConfig(table=table)
    return te.make_plan(config, mesh, optimizer=rule, hardware=hardware, **options)


def layouts_of(plan):
    (stack,) = plan.stacks
    return [stack.layout, *(plan.slot_layout(stack, slot) for slot in stack.slots)]


@pytest.mark.parametrize(
    ("dim", "num_arrays", "size"), [(256, 2, 8.58), (384, 3, 5.72), (512, 4, 4.29)]
)
def test_a_table_above_the_limit_lies_in_arrays_of_128_columns(dim, num_arrays, size):
    num_rows = LARGE * 512 // dim
    plan = plan_of(num_rows, dim)
    for layout in layouts_of(plan):
        assert layout.column_arrays == num_arrays
        assert layout.lines_shape == (num_rows, 128)
    text = str(plan)
    assert f"1 x {dim} of {dim} in {num_arrays} arrays" in text
    assert "17.17 GiB per device, more than the 16.00 GiB" in text
    assert f"lies in {num_arrays} arrays of {size} GiB, each of 128 columns" in text
    assert "slot variable" not in text
    assert "lies in one array" not in text
    whole = plan_of(num_rows, dim, num_devices=2)
    assert {layout.column_arrays for layout in layouts_of(whole)} == {1}
    num_bytes = 2 * whole.table_bytes_per_device
    assert num_bytes == plan.table_bytes_per_device == plan.slot_bytes_per_device


def test_slots_of_one_value_per_row_stay_whole():
    table = te.TableConfig(vocabulary_size=LARGE, dim=512, name="large")
    rule = te.optimizers.rowwise_adagrad(0.1)
    config = te.FeatureConfig(table=table)
    plan = te.make_plan(config, mesh_of(1), optimizer=rule, hardware=V5P)
    assert [layout.column_arrays for layout in layouts_of(plan)] == [4, 1]


@pytest.mark.parametrize(
    ("num_rows", "dim", "options", "reason"),
    [
        (LARGE * 4, 128, {}, "its dim, 128, is no multiple of 128 above 128"),
        (LARGE * 2, 200, {}, "its dim, 200, is no multiple of 128 above 128"),
        (LARGE * 2, 512, {"dtype": "bfloat16"}, "rows of bfloat16 are never cut"),
        (LARGE * 4, 512, {}, "even 128 columns take 17.17 GiB"),
    ],
)
def test_the_reason_for_whole_lines_is_printed(num_rows, dim, options, reason):
    plan = plan_of(num_rows, dim, **options)
    assert {layout.column_arrays for layout in layouts_of(plan)} == {1}
    wanted = f"to take; it lies in one array, because {reason}; more devices make it"
    assert wanted in str(plan)


def test_the_limit_is_inclusive():
    size = plan_of(1000, 512, hardware=te.hardware.hardware_by_name("v5e"))
    limit = size.table_bytes_per_device
    for missing, wanted in ((0, 1), (1, 4)):
        hardware = dataclasses.replace(V5P, max_array_bytes=limit - missing)
        plan = plan_of(1000, 512, hardware=hardware)
        assert plan.stacks[0].layout.column_arrays == wanted


@pytest.mark.parametrize(
    ("rule", "num_stacks"),
    [(te.optimizers.adagrad(0.1), 2), (te.optimizers.rowwise_adagrad(0.1), 1)],
)
def test_the_largest_slot_splits_a_stack(rule, num_stacks):
    tables = [
        te.TableConfig(vocabulary_size=6_000_000, dim=512, name=name, dtype="bfloat16")
        for name in "ab"
    ]
    features = {x.name: te.FeatureConfig(table=x) for x in tables}
    plan = te.make_plan(features, mesh_of(1), optimizer=rule, hardware=V5P)
    assert len(plan.stacks) == num_stacks
    assert ("would share a stack" in str(plan)) == (num_stacks > 1)
