"""Bytes per device, for sizes that can be reckoned by hand and against real arrays."""

import jax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of

CPU, V5P = te.hardware.hardware_by_name("cpu"), te.hardware.hardware_by_name("v5p")


def plan_of(vocabulary_size, dim, num_devices, hardware, optimizer):
    table = te.TableConfig(vocabulary_size=vocabulary_size, dim=dim)
    return te.make_plan(
        te.FeatureConfig(table=table),
        mesh_of(num_devices),
        hardware=hardware,
        optimizer=optimizer,
    )


OPTIMIZERS = {
    "sgd": (te.optimizers.sgd(0.1), 0),
    "rowwise_adagrad": (te.optimizers.rowwise_adagrad(0.1), 1 / 16),
    "adam": (te.optimizers.adam(0.1), 2),
}


@pytest.mark.parametrize("hardware", [CPU, V5P], ids=["cpu", "v5p"])
def test_slots_in_units_of_the_table(hardware):
    # 16,384 rows of 16 fill lines of 8 and of 128 rows exactly.
    for optimizer, per_table in OPTIMIZERS.values():
        plan = plan_of(16_384, 16, 2, hardware, optimizer)
        assert plan.table_bytes_per_device == 8192 * 16 * 4
        assert plan.slot_bytes_per_device == per_table * plan.table_bytes_per_device


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
