"""Assignment: rows become their summed gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.optimizers.rules.sgd import assign


@pytest.mark.full(every_case=True)
@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        (lambda rule: rule, "bfloat16"),
        pytest.param(te.optimizers.in_sequence, "float32", marks=pytest.mark.full),
    ],
)
def test_rows_that_hold_any_value_are_set(mode, dtype):
    table = te.TableConfig(
        vocabulary_size=9, dim=4, name="t", dtype=dtype, optimizer=mode(assign())
    )
    plan = te.make_plan(
        te.FeatureConfig(table=table),
        mesh_of(1),
        hardware=te.hardware.hardware_by_name("v5p"),
    )
    tables = te.functional.init_tables(plan, jax.random.key(0))
    slots = te.functional.init_slots(tables, plan)
    ids = jnp.arange(6)

    @jax.jit
    def step(tables, slots, values):
        result = te.functional.lookup(tables, ids, plan)
        gradients = te.functional.compute_gradients(result.routing, values, plan)
        return te.functional.apply_gradients(tables, slots, gradients, plan)

    first = np.ones((6, 4), np.float32)
    first[:4] = np.float32([[np.nan], [np.inf], [-np.inf], [1e30]])
    second = np.arange(24, dtype=np.float32).reshape(6, 4)
    for values in (first, second):
        tables, slots = step(tables, slots, values)
    rows = te.functional.lookup(tables, ids, plan).activations
    np.testing.assert_array_equal(rows, second)
