"""A device that owns all rows reads them directly: no sort, no exchange buffer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of

ROWS, DIM, SAMPLES, VALENCE = 50, 16, 64, 10


def plan_on(num_devices, **options):
    table = te.TableConfig(vocabulary_size=ROWS, dim=DIM, combiner="sum", name="t")
    feature = te.FeatureConfig(table=table, name="f")
    mesh = mesh_of(num_devices)
    return te.make_plan({"f": feature}, mesh, optimizer=optax.sgd(1.0), **options)


def ids_of(seed=0):
    ids = np.random.default_rng(seed).integers(0, ROWS, (SAMPLES, VALENCE))
    ids[:, 3] = te.inputs.PADDING_ROW_ID
    ids[5] = te.inputs.PADDING_ROW_ID
    return {"f": jnp.asarray(ids, jnp.int32)}


PLANS = {
    "one device": lambda: plan_on(1),
    "replicated": lambda: plan_on(8, placement=te.Replicated()),
}


@pytest.mark.parametrize("name", PLANS)
def test_no_sort_and_no_buffer_of_rows(name):
    plan = PLANS[name]()
    tables = te.functional.init_tables(plan, jax.random.key(0))

    def look_up(tables, features):
        return te.functional.lookup(tables, features, plan).activations

    compiled = jax.jit(look_up).lower(tables, ids_of()).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None
    assert " sort(" not in text and "all-to-all(" not in text
    num_ids = SAMPLES * VALENCE // plan.num_shards
    assert memory.temp_size_in_bytes < num_ids * DIM * 4


@pytest.mark.parametrize("name", PLANS)
def test_ids_without_a_row_read_nothing(name):
    plan = PLANS[name]()
    tables = te.functional.init_tables(plan, jax.random.key(0))
    values = te.functional.unstack_tables(tables, plan)["t"]
    # Padding reads the last row, and must not pass on what it holds.
    values[-1] = np.nan
    with pytest.warns(UserWarning, match="NaN"):
        tables = te.functional.with_table_values(tables, {"t": values}, plan)
    ids = ids_of()["f"]
    ids = ids.at[7, 0].set(ROWS).at[7, 1].set(-1)
    ids = jnp.where(ids == ROWS - 1, 0, ids)
    result = te.functional.lookup(tables, {"f": ids}, plan)
    is_row = (ids >= 0) & (ids < ROWS)
    rows = np.where(is_row[..., None], values[np.where(is_row, ids, 0)], 0)
    # Sums of 10 float32 numbers in another order.
    np.testing.assert_allclose(result.activations["f"], rows.sum(1), atol=1e-5)
    np.testing.assert_array_equal(result.activations["f"][5], np.zeros(DIM))
    assert int(result.stats.out_of_range["f"]) == 2
    assert int(result.stats.rounds["stack_0"]) == 1
