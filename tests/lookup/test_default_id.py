"""Samples without ids that read a default row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.lookup.test_lookup import (
    BATCH,
    batch_of,
    check_against_reference,
    make_plan,
)

OUTSIDE = np.where(np.arange(BATCH) % 3 == 0, -1, np.arange(BATCH) % 7)
CASES = {
    "ragged_weighted": lambda: batch_of("ragged_weighted"),
    "ids_outside": lambda: dict.fromkeys("abcd", OUTSIDE),
}


@pytest.mark.parametrize(
    "case", ["ragged_weighted", pytest.param("ids_outside", marks=pytest.mark.full)]
)
def test_equals_dense_reference(case):
    plan = make_plan(mesh_of(2), default_id=3, out_of_range_ids="drop")
    check_against_reference(plan, CASES[case]())


def test_samples_that_fill_up_the_batch_touch_nothing():
    """Rows decay when touched; 5 samples on 2 devices leave a place to fill."""
    table = te.TableConfig(vocabulary_size=9, dim=2, combiner="sum", name="t")
    feature = te.FeatureConfig(table=table, default_id=4)
    optimizer = te.optimizers.sgd(0.1, weight_decay_factor=0.5)
    plan = te.make_plan(feature, mesh_of(2), optimizer=optimizer)
    ids = np.arange(5) % 3
    tables = te.functional.init_tables(plan, jax.random.key(0))
    before = te.functional.unstack_tables(tables, plan)["t"]
    result = te.functional.lookup(tables, te.inputs.prepare_features(ids, plan), plan)
    gradients = te.functional.compute_gradients(
        result.routing, jnp.zeros_like(result.activations), plan
    )
    slots = te.functional.init_slots(tables, plan)
    tables, _ = te.functional.apply_gradients(tables, slots, gradients, plan)
    after = te.functional.unstack_tables(tables, plan)["t"]
    is_touched = (after != before).any(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(is_touched), [0, 1, 2])
