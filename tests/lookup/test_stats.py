"""Tests the counts of a lookup against those of its ids."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.tiers import with_ids
from tpu_embedding.types import PADDING_ROW_ID

ROWS, DIM, SAMPLES, VALENCE = 50, 4, 24, 5
PADDING = PADDING_ROW_ID
GENERATOR = np.random.default_rng(0)


def plan_on(num_devices, optimizer=None, **options):
    table = te.TableConfig(vocabulary_size=ROWS, dim=DIM, combiner="sum", name="t")
    feature = te.FeatureConfig(table=table, out_of_range_ids="drop", name="f")
    mesh = mesh_of(num_devices)
    return te.make_plan({"f": feature}, mesh, optimizer=optimizer, **options)


BATCHES = {
    "random": GENERATOR.integers(0, ROWS, (SAMPLES, VALENCE)),
    "all the same": np.full((SAMPLES, VALENCE), 7),
    "no ids": np.full((SAMPLES, VALENCE), PADDING),
    "one shard": 8 * GENERATOR.integers(0, 6, (SAMPLES, VALENCE)),
    "padding and others outside": np.where(
        GENERATOR.random((SAMPLES, VALENCE)) < 0.5,
        GENERATOR.integers(0, ROWS, (SAMPLES, VALENCE)),
        GENERATOR.choice([PADDING, ROWS, -1], (SAMPLES, VALENCE)),
    ),
}


def expected_counts(ids, stack, num_devices, *, once=True):
    """Returns the number of ids, and the rows requested from each shard."""
    requested = np.zeros(stack.num_shards, int)
    rotation = stack.tables[0].row_offset
    for of_device in np.split(ids, num_devices):
        rows = of_device[(of_device >= 0) & (of_device < ROWS)]
        rows = np.unique(rows) if once else rows
        np.add.at(requested, (rows + rotation) % stack.num_shards, 1)
    return ((ids >= 0) & (ids < ROWS)).sum(), requested


def counts_of(ids, plan):
    tables = te.functional.init_tables(plan, jax.random.key(0))
    ids = jnp.array(ids, jnp.int32)
    stats = jax.jit(
        lambda tables, ids: te.functional.lookup(tables, {"f": ids}, plan).stats
    )
    return stats(tables, ids)


@pytest.mark.parametrize("ids", with_ids(BATCHES))
def test_counts(ids):
    plan = plan_on(3)
    (stack,) = plan.stacks
    stats = counts_of(ids, plan)
    num_ids, requested = expected_counts(ids, stack, 3)
    assert stats.num_ids == {stack.name: num_ids}
    np.testing.assert_array_equal(stats.requested_rows[stack.name], requested)


def test_rounds_and_dropped_ids_are_in_the_counts():
    """All rounds of a small capacity together request what one round would."""
    ids = BATCHES["random"]
    plan = plan_on(3, capacity=1)
    stats = counts_of(ids, plan)
    assert stats.rounds["stack_0"] > 1
    num_ids, requested = expected_counts(ids, plan.stacks[0], 3)
    assert stats.num_ids["stack_0"] == num_ids
    np.testing.assert_array_equal(stats.requested_rows["stack_0"], requested)
