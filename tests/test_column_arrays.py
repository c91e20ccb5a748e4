"""Tables whose columns lie in several arrays: nothing changes but where the rows lie.

A hardware with a limit of a few kilobytes per array cuts a small table.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.rows.packed_rows import PackedRows

SIZE, DIM, BATCH, STEPS = 61, 256, 24, 2
ARRAYS = DIM // 128
full = pytest.mark.full(every_case=True)

OPTIMIZERS = {
    "rowwise_adagrad": te.optimizers.rowwise_adagrad(0.1),
    "adagrad": te.optimizers.adagrad(0.1),
    "ftrl": te.optimizers.ftrl(0.1),
    "adafactor_averages": te.optimizers.adafactor(0.1, use_ema=True),
    "every_row": te.optimizers.every_row(te.optimizers.adam(0.1)),
    "bfloat16_slots": te.optimizers.adam(0.1, slot_dtype=jnp.bfloat16),
}


def hardware_of(num_devices, is_cut=True):
    """A v5p on which 128 columns of the table just fit into an array, or all do."""
    num_rows = -(-SIZE // num_devices)
    limit = 4 * 128 * 8 * -(-num_rows // 8) if is_cut else 2**34
    v5p = te.hardware.hardware_by_name("v5p")
    return dataclasses.replace(v5p, max_array_bytes=limit)


def plan_of(num_devices, optimizer, *, hardware=None, **options):
    table = te.TableConfig(vocabulary_size=SIZE, dim=DIM, name="item", combiner="sum")
    return te.make_plan(
        {"items": te.FeatureConfig(table=table)},
        mesh_of(num_devices),
        optimizer=optimizer,
        hardware=hardware or hardware_of(num_devices),
        **options,
    )


def arrays_of(tree):
    """Number of arrays of each packed rows in a tree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, PackedRows))
    return [len(x.arrays) for x in leaves if isinstance(x, PackedRows)]


def initial_state(plan):
    values = np.random.default_rng(0).normal(size=(SIZE, DIM)).astype(np.float32)
    tables = te.functional.init_tables(plan, jax.random.key(0))
    slots = te.functional.init_slots(tables, plan)
    return te.functional.with_table_values(tables, {"item": values}, plan, slots=slots)


def batch_of(step):
    """Ids of half of the rows, and cotangents whose sums are exact in any order."""
    random = np.random.default_rng(step)
    ids = {"items": random.integers(0, SIZE // 2, (BATCH, 2)).astype(np.int32)}
    cotangents = random.integers(-4, 5, (BATCH, DIM)).astype(np.float32) / 64
    return ids, {"items": cotangents}


@functools.partial(jax.jit, static_argnames="plan", donate_argnums=(0, 1))
def train_step(tables, slots, ids, cotangents, plan):
    result = te.functional.lookup(tables, ids, plan)
    gradients = te.functional.compute_gradients(result.routing, cotangents, plan)
    tables, slots = te.functional.apply_gradients(tables, slots, gradients, plan)
    return tables, slots, result.activations


def train(plan):
    """Returns the state after some steps, and the activations of each step."""
    tables, slots = initial_state(plan)
    activations = []
    for step in range(STEPS):
        tables, slots, rows = train_step(tables, slots, *batch_of(step), plan)
        activations.append(np.asarray(rows["items"]))
    return tables, slots, activations


def values_of(tables, slots, plan):
    values = te.functional.unstack_tables(tables, plan)
    return values, te.functional.slot_values(slots, plan, "all")


def assert_equal(here, there):
    jax.tree.map(np.testing.assert_array_equal, here, there)


def assert_close(here, there):
    """XLA fuses the update of columns otherwise, and may round a product once less."""
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=5e-6)
    jax.tree.map(close, here, there)


@pytest.mark.parametrize(
    ("num_devices", "name"),
    [
        (2, "rowwise_adagrad"),
        pytest.param(2, "ftrl", marks=full),
        pytest.param(3, "adafactor_averages", marks=full),
        pytest.param(2, "every_row", marks=full),
        pytest.param(8, "bfloat16_slots", marks=full),
    ],
)
def test_training_equals_that_of_whole_lines(num_devices, name):
    optimizer, whole = OPTIMIZERS[name], hardware_of(num_devices, is_cut=False)
    plan = plan_of(num_devices, optimizer)
    tables, slots, activations = train(plan)
    assert arrays_of(tables) == [ARRAYS]
    shapes = [slot.shape for slot in plan.stacks[0].slots]
    wanted = [ARRAYS if shape == (DIM,) else 1 for shape in shapes]
    assert sorted(arrays_of(slots)) == sorted(wanted)
    other = plan_of(num_devices, optimizer, hardware=whole)
    other_tables, other_slots, other_activations = train(other)
    assert arrays_of((other_tables, other_slots)) == [1] * (1 + len(shapes))
    assert_close(activations, other_activations)
    values = values_of(tables, slots, plan)
    assert_close(values, values_of(other_tables, other_slots, other))
    if name == "adafactor_averages":
        finalize = te.functional.finalize_variable_values
        tables, slots = finalize(tables, slots, plan)
        other_tables, other_slots = finalize(other_tables, other_slots, other)
        assert_close(
            values_of(tables, slots, plan), values_of(other_tables, other_slots, other)
        )


@pytest.mark.parametrize(
    ("name", "num_shards", "options"),
    [
        pytest.param("rowwise_adagrad", 2, {"capacity": 1}, marks=full),
        pytest.param("adagrad", 1, {"placement": te.Replicated()}, marks=full),
    ],
    ids=["rounds", "copies"],
)
def test_rounds_and_copies_equal_those_of_whole_lines(name, num_shards, options):
    results = []
    for is_cut in (True, False):
        hardware = hardware_of(num_shards, is_cut)
        plan = plan_of(2, OPTIMIZERS[name], hardware=hardware, **options)
        tables, slots, activations = train(plan)
        assert arrays_of(tables) == [ARRAYS if is_cut else 1]
        results.append((values_of(tables, slots, plan), activations))
    assert_equal(*results)


@pytest.mark.parametrize("is_cut_first", [True, pytest.param(False, marks=full)])
def test_checkpoints_move_to_other_layouts(is_cut_first, tmp_path):
    """Also to fewer devices and to a CPU's rows."""
    name = "rowwise_adagrad"
    cut = plan_of(2, OPTIMIZERS[name])
    cpu = te.hardware.hardware_by_name("cpu")
    whole = plan_of(1, OPTIMIZERS[name], hardware=cpu)
    old, new = (cut, whole) if is_cut_first else (whole, cut)
    tables, slots, _ = train(old)
    saved = {"tables": tables, "slots": slots}
    te.save(tmp_path / "saved", saved, plan=old)
    tables, slots = initial_state(new)
    empty = {"tables": tables, "slots": slots}
    restored = te.restore(tmp_path / "saved", empty, plan=new)
    assert arrays_of(restored["tables"]) == [1 if is_cut_first else ARRAYS]
    assert_equal(
        values_of(restored["tables"], restored["slots"], new),
        values_of(saved["tables"], saved["slots"], old),
    )


def test_tables_of_the_other_layout_are_refused():
    cut, whole = (plan_of(2, None, hardware=hardware_of(2, x)) for x in (True, False))
    tables = te.functional.init_tables(cut, jax.random.key(0))
    ids, _ = batch_of(0)
    with pytest.raises(ValueError, match=r"lines_shape per shard: \(31, 128\), not"):
        te.functional.lookup(tables, ids, whole)


def test_print_names_the_arrays():
    assert "lies in 2 arrays of 12.00 KiB, each of 128 columns" in str(
        plan_of(3, te.optimizers.adagrad(0.1))
    )
