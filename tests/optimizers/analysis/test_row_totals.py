"""Optax transformations that reduce over rows: totals, or refused."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.optimizers.rule_cases import initial_state, one_table_plan, update
from tests.tiers import quick_cases

ROWS, DIM = 30, 4
SUMMING = {
    "norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(0.1)),
    "finite_norm": optax.apply_if_finite(
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), 3
    ),
    "trust_ratio_of_every_row": te.optimizers.every_row(optax.lamb(0.01)),
}


def start():
    return np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)


def batches(has_nan):
    generator = np.random.default_rng(1)
    for step in range(4):
        ids = generator.integers(0, ROWS, 16).astype(np.int32)
        gradient = generator.normal(size=(16, DIM)).astype(np.float32)
        if has_nan and step == 1:
            gradient[3, 1] = np.nan
        yield ids, gradient


@pytest.mark.parametrize("name", quick_cases(SUMMING, "norm", every_case=True))
def test_equals_dense(name):
    optimizer = SUMMING[name]
    plan = one_table_plan(optimizer, ROWS, DIM, mesh_of(2), capacity=1)
    tables, slots = initial_state(plan, start())
    table, state = jnp.asarray(start()), optimizer.init(jnp.asarray(start()))
    for ids, gradient in batches(has_nan="finite" in name):
        tables, slots = update(tables, slots, ids, gradient, plan)
        dense = jnp.zeros_like(table).at[ids].add(gradient)
        updates, state = optimizer.update(dense, state, table)
        table = optax.apply_updates(table, updates)
    np.testing.assert_allclose(
        te.functional.unstack_tables(tables, plan)["table"], table, rtol=1e-5, atol=1e-6
    )


def test_state_of_one_number_is_of_one_table():
    """A norm is of a table, so tables of such an optimizer are not stacked."""
    features = {
        name: te.FeatureConfig(
            table=te.TableConfig(vocabulary_size=5, dim=2, name=name)
        )
        for name in "ab"
    }
    plan = te.make_plan(features, mesh_of(1), optimizer=SUMMING["norm"])
    assert len(plan.stacks) == 2
