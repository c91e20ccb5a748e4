"""Whole steps give the same numbers for every placement on every mesh."""

import functools
import itertools

import jax
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import needs_kernels
from tests.lookup.placements import (
    MESHES,
    assert_replicas_equal,
    mesh_of_shape,
    placements_on,
)
from tests.lookup.test_lookup import (
    batch_of,
    check_against_reference,
    make_plan,
)
from tests.tiers import quick_cases

full = pytest.mark.full


BATCHES = [
    ("ragged_weighted", None),
    ("multi_hot", 2),
    ("all_of_one_shard", 1),
    ("no_ids", 1),
    ("all_same_id", None),
]


def placed_cases():
    """Yields mesh, placement, batch and capacity: two batches for each place."""
    batches = itertools.cycle(BATCHES)
    for mesh in MESHES:
        for placement in placements_on(mesh):
            for case, capacity in itertools.islice(batches, 2):
                yield mesh, placement, case, capacity


@pytest.mark.parametrize(
    ("mesh", "placement", "case", "capacity"),
    quick_cases(
        placed_cases(), "4x2-model-ragged_weighted-None", "3-replicated-multi_hot-2"
    ),
)
def test_equals_dense_reference(mesh, placement, case, capacity):
    placed = placements_on(mesh)[placement]
    plan = make_plan(mesh_of_shape(mesh), capacity=capacity, placement=placed)
    check_against_reference(plan, batch_of(case))


@pytest.mark.full
@pytest.mark.parametrize(
    ("exchange", "hardware"),
    [
        pytest.param("ragged", None, marks=full),
        pytest.param("padded", "v5p", marks=full),
        ("ragged", "v5p"),
    ],
)
def test_exchange_and_packing_change_no_result(exchange, hardware):
    plan = make_plan(
        mesh_of_shape("2x4"),
        capacity=3,
        exchange=exchange,
        hardware=hardware,
        placement=te.Sharded(axes=("model",)),
    )
    check_against_reference(plan, batch_of("multi_hot"))


@pytest.mark.parametrize("axes", [("data",), pytest.param(("model",), marks=full)])
def test_initial_values_are_those_of_one_device(axes):
    key = jax.random.key(3)
    one = make_plan(mesh_of_shape("1"))
    expected = te.functional.unstack_tables(te.functional.init_tables(one, key), one)
    for placement in (te.Sharded(axes=axes), te.Replicated()):
        plan = make_plan(mesh_of_shape("4x2"), placement=placement)
        tables = te.functional.init_tables(plan, key)
        assert_replicas_equal(tables)
        (stack,) = plan.stacks
        sharding = tables[stack.name].lines.sharding
        assert sharding.is_equivalent_to(plan.rows_sharding(stack), 2)
        for name, values in te.functional.unstack_tables(tables, plan).items():
            np.testing.assert_array_equal(values, expected[name])


@pytest.mark.parametrize(
    "placement", ["replicated", "data", pytest.param("model", marks=full)]
)
def test_table_values_round_trip(placement):
    values = {
        name: np.random.default_rng(0).normal(size=(size, 4)).astype(np.float32)
        for name, size in (("table_of_a", 37), ("table_of_b", 5), ("table_of_c", 11))
    }
    placed = placements_on("4x2")[placement]
    plan = make_plan(mesh_of_shape("4x2"), placement=placed)
    tables = te.functional.init_tables(plan, jax.random.key(3))
    tables = te.functional.with_table_values(tables, values, plan)
    assert_replicas_equal(tables)
    sharding = tables["stack_0"].lines.sharding
    assert sharding.is_equivalent_to(plan.rows_sharding(plan.stacks[0]), 2)
    for name, found in te.functional.unstack_tables(tables, plan).items():
        np.testing.assert_array_equal(found, values[name])


@full
@pytest.mark.parametrize("placement", ["data", "replicated"])
def test_the_norm_counts_each_row_once(placement):
    plan = make_plan(
        mesh_of_shape("4x2"), capacity=2, placement=placements_on("4x2")[placement]
    )
    batch = batch_of("multi_hot")
    _, gradients, touched = check_against_reference(plan, batch)
    _, expected_gradients, _ = on_one_device()
    norm, expected_norm = (
        te.gradients.global_norm(gradients),
        te.gradients.global_norm(expected_gradients),
    )
    # Squares are summed in another order.
    np.testing.assert_allclose(norm, expected_norm, rtol=1e-5)
    first = gradients.first_round("stack_0")
    used = np.asarray(first.row_ids) != te.inputs.PADDING_ROW_ID
    assert 0 < used.sum() <= sum(rows.sum() for rows in touched.values())


@functools.cache
def on_one_device():
    plan = make_plan(mesh_of_shape("1"))
    return check_against_reference(plan, batch_of("multi_hot"))


@needs_kernels
@full
@pytest.mark.parametrize("placement", ["model", "replicated"])
def test_kernels_change_no_result(placement):
    plan = make_plan(
        mesh_of_shape("2x4"),
        dim=8,
        hardware="v5p",
        kernels="interpreter",
        placement=placements_on("2x4")[placement],
    )
    check_against_reference(plan, batch_of("multi_hot"))


OPTIMIZERS = {
    "adagrad": te.optimizers.adagrad(0.1),
    "adam": te.optimizers.adam(0.1),
    "rowwise_adagrad": te.optimizers.rowwise_adagrad(0.1),
    "adafactor": te.optimizers.adafactor(0.1),
    "clippy_adagrad": te.optimizers.clippy_adagrad(0.1),
    "every_row": te.optimizers.every_row(te.optimizers.adam(0.1)),
    "sequence": te.optimizers.adagrad(0.1, use_gradient_accumulation=False),
    "adafactor_clipnorm": te.optimizers.adafactor(0.1, clipnorm=0.5),
}
IDS = np.random.default_rng(5).zipf(1.3, (24, 3)) % 36
BEFORE = np.random.default_rng(7).normal(size=(37, 4)).astype(np.float32)
SLOPES = np.random.default_rng(6).normal(size=(24, 4)).astype(np.float32)


@functools.cache
def trained(optimizer, mesh, placement, capacity):
    """Returns table and slot variables after three steps, by name."""
    table = te.TableConfig(vocabulary_size=37, dim=4, combiner="sum", name="table")
    plan = te.make_plan(
        te.FeatureConfig(table=table, name="ids"),
        mesh_of_shape(mesh),
        optimizer=OPTIMIZERS[optimizer],
        placement=placements_on(mesh)[placement],
        capacity=capacity,
    )
    tables = te.functional.init_tables(plan, jax.random.key(1))
    tables, _ = te.functional.with_table_values(tables, {"table": BEFORE}, plan, {})
    slots = te.functional.init_slots(tables, plan)

    @jax.jit
    def step(tables, slots, ids):
        result = te.functional.lookup(tables, ids, plan)
        cotangents = result.activations * SLOPES
        gradients = te.functional.compute_gradients(result.routing, cotangents, plan)
        return te.functional.apply_gradients(tables, slots, gradients, plan)

    for shift in (0, 1, 0):
        tables, slots = step(tables, slots, IDS + shift)
    assert step._cache_size() == 1
    assert_replicas_equal((tables, slots))
    after = te.functional.unstack_tables(tables, plan)["table"]
    leaves = jax.tree.leaves(slots, is_leaf=lambda x: hasattr(x, "layout"))
    values = [
        te.functional.unstack_tables({"stack_0": leaf}, plan)["table"]
        if hasattr(leaf, "layout")
        else np.asarray(leaf)
        for leaf in leaves
    ]
    return after, values


def optimizer_cases():
    """Yields optimizer, mesh, placement and capacity."""
    for i, name in enumerate(OPTIMIZERS):
        for j, (mesh, placement, capacity) in enumerate(
            [("4x2", "data", None), ("2x4", "replicated", None), ("4x2", "model", 2)]
        ):
            is_quick = i % 3 == j and name != "adafactor_clipnorm"
            marks = () if is_quick else full
            yield pytest.param(name, mesh, placement, capacity, marks=marks)


@pytest.mark.parametrize(
    ("optimizer", "mesh", "placement", "capacity"),
    quick_cases(optimizer_cases(), "rowwise_adagrad-4x2-model-2"),
)
def test_every_optimizer_gives_the_numbers_of_one_device(
    optimizer, mesh, placement, capacity
):
    expected, expected_slots = trained(optimizer, "1", "whole", None)
    found, found_slots = trained(optimizer, mesh, placement, capacity)
    # Gradients are summed in another order; three steps of a rate of 0.1.
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    for slot, expected_slot in zip(found_slots, expected_slots, strict=True):
        np.testing.assert_allclose(slot, expected_slot, rtol=1e-4, atol=1e-5)
    if optimizer != "every_row":
        untouched = np.setdiff1d(np.arange(37), [IDS, IDS + 1])
        assert untouched.size
        np.testing.assert_array_equal(found[untouched], BEFORE[untouched])


@full
def test_placements_of_one_layer_may_differ():
    tables = {
        name: te.TableConfig(
            vocabulary_size=23, dim=3, name=name, combiner="sum", placement=placement
        )
        for name, placement in (
            ("copied", te.Replicated()),
            ("half", te.Sharded(axes=("model",))),
        )
    }
    config = {n: te.FeatureConfig(table=t, name=n) for n, t in tables.items()}
    plan = te.make_plan(config, mesh_of_shape("2x4"), optimizer=te.optimizers.sgd(1.0))
    assert [stack.num_shards for stack in plan.stacks] == [1, 4]
    generator = np.random.default_rng(0)
    check_against_reference(
        plan, {name: generator.integers(0, 23, (21, 2)) for name in config}
    )
