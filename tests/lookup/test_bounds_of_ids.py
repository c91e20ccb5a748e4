"""Bounds on distinct ids count the ids of all features and of all lookups."""

import jax
import jax.numpy as jnp
import numpy as np

import tpu_embedding as te
from tests.conftest import mesh_of


def test_no_id_is_lost():
    """All ids are distinct; the features share a table, and the last one is narrow."""
    table = te.TableConfig(vocabulary_size=4096, dim=2, combiner="sum", name="t")
    features = {name: te.FeatureConfig(table=table) for name in "ab"}
    plan = te.make_plan(features, mesh_of(2), optimizer=te.optimizers.sgd(1))
    tables = te.functional.init_tables(plan, jax.random.key(0))
    slots = te.functional.init_slots(tables, plan)
    (before,) = te.functional.unstack_tables(tables, plan).values()
    ids = np.random.default_rng(0).permutation(4096).reshape(2, 64, 32).astype(np.int32)
    gradients = []
    for part in ids:
        batch = {"a": part[:, :31], "b": part[:, 31:]}
        result = te.functional.lookup(tables, batch, plan)
        for name, of_name in batch.items():
            pooled = np.asarray(before)[of_name].sum(axis=1)
            np.testing.assert_allclose(
                result.activations[name], pooled, rtol=1e-4, atol=1e-5
            )
        cotangents = jax.tree.map(jnp.ones_like, result.activations)
        gradients.append(
            te.functional.compute_gradients(result.routing, cotangents, plan)
        )
    total = te.gradients.add(*gradients)
    tables, _ = te.functional.apply_gradients(tables, slots, total, plan)
    (after,) = te.functional.unstack_tables(tables, plan).values()
    np.testing.assert_allclose(after, np.asarray(before) - 1, rtol=1e-5, atol=1e-6)


def test_no_id_of_a_sum_of_small_lookups_is_lost():
    """One owner has the ids of both lookups, twice as many as of one."""
    table = te.TableConfig(vocabulary_size=4096, dim=2, combiner="sum", name="t")
    plan = te.make_plan(
        te.FeatureConfig(table=table), mesh_of(2), optimizer=te.optimizers.sgd(1)
    )
    tables = te.functional.init_tables(plan, jax.random.key(0))
    slots = te.functional.init_slots(tables, plan)
    (before,) = te.functional.unstack_tables(tables, plan).values()
    ids = 2 * np.arange(32, dtype=np.int32).reshape(2, 2, 8)
    gradients = []
    for batch in ids:
        result = te.functional.lookup(tables, batch, plan)
        ones = jnp.ones_like(result.activations)
        gradients.append(te.functional.compute_gradients(result.routing, ones, plan))
    total = te.gradients.add(*gradients)
    tables, _ = te.functional.apply_gradients(tables, slots, total, plan)
    (after,) = te.functional.unstack_tables(tables, plan).values()
    expected = np.array(before)
    expected[ids.reshape(-1)] -= 1
    np.testing.assert_allclose(after, expected, rtol=1e-6)
