"""Tests a lookup's counts against its ids."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.tiers import with_ids

ROWS, DIM, SAMPLES, VALENCE = 50, 4, 24, 5
PADDING = te.inputs.PADDING_ROW_ID
GENERATOR = np.random.default_rng(0)


def plan_on(num_devices, capacity=None):
    table = te.TableConfig(vocabulary_size=ROWS, dim=DIM, combiner="sum", name="t")
    feature = te.FeatureConfig(table=table, out_of_range_ids="drop", name="f")
    return te.make_plan({"f": feature}, mesh_of(num_devices), capacity=capacity)


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


def expected_counts(ids, stack, num_devices):
    """Returns the number of ids, and the rows requested from each shard."""
    requested = np.zeros(stack.num_shards, int)
    rotation = stack.tables[0].row_offset
    for of_device in np.split(ids, num_devices):
        rows = np.unique(of_device[(of_device >= 0) & (of_device < ROWS)])
        np.add.at(requested, (rows + rotation) % stack.num_shards, 1)
    return ((ids >= 0) & (ids < ROWS)).sum(), requested


@functools.partial(jax.jit, static_argnums=1)
def counts_of(ids, capacity):
    plan = plan_on(3, capacity)
    tables = te.functional.init_tables(plan, jax.random.key(0))
    return te.functional.lookup(tables, {"f": ids}, plan).stats


@pytest.mark.parametrize("capacity", [None, 1])
@pytest.mark.parametrize("ids", with_ids(BATCHES))
def test_counts(ids, capacity):
    """All rounds of a small capacity together request what one round would."""
    stats = counts_of(jnp.array(ids, jnp.int32), capacity)
    num_ids, requested = expected_counts(ids, plan_on(3).stacks[0], 3)
    assert stats.num_ids == {"stack_0": num_ids}
    np.testing.assert_array_equal(stats.requested_rows["stack_0"], requested)
