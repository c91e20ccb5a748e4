"""Samples without ids that read a default row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.lookup.test_flatten_to_owners import stack_of
from tests.lookup.test_lookup import (
    BATCH,
    PADDING,
    batch_of,
    check_against_reference,
    make_plan,
)
from tpu_embedding.lookup._forward import FeatureInput, flatten
from tpu_embedding.plan.features import FeaturePlan

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


@pytest.mark.parametrize("form", ["one", "many", "ragged"])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("keeps_duplicates", [False, True])
def test_keys_and_gains(form, is_weighted, keeps_duplicates):
    """The first place of an empty sample, and nothing else, becomes the default."""
    ids = jnp.array([PADDING, 1, 9, 2, 5, PADDING, -1, 3, 2, 2, PADDING, 6])
    weights = jnp.array([1, 0, 1, 1, 0.5, 1, 1, 1, 1, 1, 1, 1.0])
    num_samples, valence = {"one": (12, 1), "many": (4, 3), "ragged": (6, 1)}[form]
    # Sample 1 has no place, sample 5 only one with padding; two places are unused.
    sample_ids = np.array([0, 0, 2, 3, 3, 3, 4, 4, 4, 4, 5, 6])
    given = FeatureInput(
        ids=ids,
        weights=weights if is_weighted else None,
        sample_ids=jnp.array(sample_ids) if form == "ragged" else None,
        num_samples=num_samples,
        valence=valence,
    )
    table = te.TableConfig(vocabulary_size=7, dim=2, combiner="mean", name="t")
    config = te.FeatureConfig(table=table, default_id=6, name="f")
    feature = FeaturePlan(
        name="f",
        config=config,
        stack_index=0,
        row_offset=0,
        num_rows=config.table.max_rows,
    )
    keys, (pooling,), _ = flatten([given], [feature], stack_of(1, keeps_duplicates))

    if form != "ragged":
        sample_ids = np.arange(12) % num_samples
    order = np.arange(12)
    if form == "many" and keeps_duplicates:
        order = np.argsort(sample_ids, kind="stable")
    expected, gains = np.array(ids), np.array(weights)
    is_row = (expected >= 0) & (expected < 7) & ((gains > 0) | (not is_weighted))
    for sample in range(num_samples):
        places = np.flatnonzero(sample_ids == sample)
        if len(places) and not is_row[places].any():
            expected[places[0]], gains[places[0]] = 6, 1
            is_row[places[0]] = True
    if form == "ragged":
        is_row &= sample_ids < num_samples
        expected[-1] = PADDING
        keys = keys.at[-1].set(PADDING)
    expected = np.where(is_row, expected, PADDING)
    np.testing.assert_array_equal(keys, expected[order])
    if is_weighted:
        used = np.asarray(pooling.gains)[is_row[order]]
        np.testing.assert_array_equal(used, gains[order][is_row[order]])
