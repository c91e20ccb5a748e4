"""Whole steps give the same numbers for every placement on every mesh."""

import functools

import jax
import numpy as np
import pytest

import tpu_embedding as te
from tests.lookup.placements import (
    assert_replicas_equal,
    mesh_of_shape,
    placements_on,
)
from tests.lookup.test_lookup import batch_of, check_against_reference, make_plan

full = pytest.mark.full


@pytest.mark.parametrize(
    ("mesh", "placement", "case", "capacity"),
    [
        ("2x2", "model", "ragged_weighted", 1),
        pytest.param("2", "replicated", "multi_hot", 2, marks=full),
        pytest.param("2x2x2", "data+expert", "all_of_one_shard", 1, marks=full),
    ],
)
def test_equals_dense_reference(mesh, placement, case, capacity):
    placed = placements_on(mesh)[placement]
    plan = make_plan(mesh_of_shape(mesh), capacity=capacity, placement=placed)
    check_against_reference(plan, batch_of(case))


def test_initial_and_set_values_equal_those_of_one_device():
    key, one = jax.random.key(3), make_plan(mesh_of_shape("1"))
    expected = te.functional.unstack_tables(te.functional.init_tables(one, key), one)
    values = {name: np.float32(2 * table) for name, table in expected.items()}
    for placement in (te.Sharded(axes=("data",)), te.Replicated()):
        plan = make_plan(mesh_of_shape("2x2"), placement=placement)
        tables = te.functional.init_tables(plan, key)
        new = te.functional.with_table_values(tables, values, plan)
        for found, wanted in ((tables, expected), (new, values)):
            assert_replicas_equal(found)
            sharding = found["stack_0"].lines.sharding
            assert sharding.is_equivalent_to(plan.rows_sharding(plan.stacks[0]), 2)
            found = te.functional.unstack_tables(found, plan)
            jax.tree.map(np.testing.assert_array_equal, found, wanted)


OPTIMIZERS = {
    "rowwise_adagrad": te.optimizers.rowwise_adagrad(0.1),
    "adafactor": te.optimizers.adafactor(0.1),
    "every_row": te.optimizers.every_row(te.optimizers.adam(0.1)),
    "sequence": te.optimizers.adagrad(0.1, use_gradient_accumulation=False),
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


@full
@pytest.mark.parametrize(
    ("optimizer", "mesh", "placement", "capacity"),
    [
        ("rowwise_adagrad", "2x2", "model", 2),
        ("adafactor", "4x2", "data", None),
        ("every_row", "4x2", "model", 2),
        ("sequence", "4x2", "replicated", None),
    ],
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
