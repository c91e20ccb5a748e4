"""Calls of the functional API: missing cotangents, and values that stay on devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.lookup.placements import mesh_of_shape

DIM, BATCH = 4, 8


def plan_of(num_devices=1, vocabulary_size=16):
    a, b = (
        te.TableConfig(vocabulary_size=vocabulary_size, dim=DIM, name=name)
        for name in "ab"
    )
    features = {
        "one": te.FeatureConfig(table=a),
        "other": te.FeatureConfig(table=b),
        "again": te.FeatureConfig(table=b if vocabulary_size == 16 else a),
    }
    mesh = mesh_of(num_devices)
    return te.make_plan(features, mesh, optimizer=te.optimizers.sgd(1.0))


def state_of(plan):
    tables = te.functional.init_tables(plan, jax.random.key(0))
    return tables, te.functional.init_slots(tables, plan)


def batch_of(plan):
    """Returns a batch on the devices of the plan."""
    ids = np.arange(BATCH, dtype=np.int32)
    features = dict.fromkeys(("one", "other", "again"), ids)
    features = te.inputs.prepare_features(features, plan)
    return jax.device_put(features, NamedSharding(plan.mesh, plan.sample_spec))


@pytest.mark.parametrize(
    "missing",
    [{"one": None, "other": None}, {"one": None, "other": None, "again": None}],
    ids=len,
)
def test_a_missing_cotangent_is_zero(missing):
    plan = plan_of()
    tables, slots = state_of(plan)
    result = te.functional.lookup(tables, batch_of(plan), plan)
    ones = jax.tree.map(jnp.ones_like, result.activations)
    given = ones | missing
    zeros = {name: jax.tree.map(jnp.zeros_like, ones[name]) for name in missing}
    found, expected = (
        te.functional.unstack_tables(
            te.functional.apply_gradients(
                tables,
                slots,
                te.functional.compute_gradients(result.routing, cotangents, plan),
                plan,
            )[0],
            plan,
        )
        for cotangents in (given, ones | zeros)
    )
    for name, table in expected.items():
        np.testing.assert_array_equal(found[name], table)


def put(value, plan):
    return jax.device_put(value, NamedSharding(plan.mesh, PartitionSpec()))


@pytest.mark.full
def test_no_step_takes_a_value_from_the_host():
    """Each call runs twice: constants may travel while it is compiled."""
    plan = plan_of(2, te.Dynamic(capacity=64))
    tables, slots = state_of(plan)
    features = batch_of(plan)
    model = te.TPUEmbedding(None, plan=plan, rngs=nnx.Rngs(0))
    clocks = [put(jnp.uint32(number), plan) for number in (1, 2)]
    for clock, guard in zip(clocks, ("allow", "disallow"), strict=True):
        with jax.transfer_guard(guard):
            inserted = te.functional.insert_ids(tables, slots, features, plan, clock)
            result = te.functional.lookup(inserted.tables, inserted.features, plan)
            gradients = te.functional.compute_gradients(
                result.routing, result.activations, plan
            )
            tables, slots = te.functional.apply_gradients(
                inserted.tables, inserted.slots, gradients, plan
            )
            model(features)


@pytest.mark.parametrize(
    "rows", [16, te.Dynamic(capacity=64)], ids=["fixed", "dynamic"]
)
@pytest.mark.parametrize("rule", ["adagrad", "adafactor"])
def test_a_table_that_the_batch_does_not_use_only_counts_the_step(rule, rows):
    """Also with a rule that asks for totals, which are over no rows."""
    features = {
        name: te.FeatureConfig(
            table=te.TableConfig(vocabulary_size=rows, dim=dim, name=name)
        )
        for name, dim in (("used", 4), ("unused", 8))
    }
    plan = te.make_plan(features, mesh_of(2), optimizer=rule)
    tables, slots = state_of(plan)
    batch = te.inputs.prepare_features({"used": np.arange(BATCH)}, plan)
    batch = te.functional.find_ids(tables, batch, plan).features
    result = te.functional.lookup(tables, batch, plan)
    gradients = te.functional.compute_gradients(
        result.routing, result.activations, plan
    )
    new = te.functional.apply_gradients(tables, slots, gradients, plan)
    name = next(s.name for s in plan.stacks if s.tables[0].name == "unused")
    old_rows, new_rows = (arrays[name].lines for arrays in (tables, new[0]))
    np.testing.assert_array_equal(old_rows, new_rows)
    assert jax.tree.structure(new[1][name]) == jax.tree.structure(slots[name])


@pytest.mark.parametrize(
    "rule",
    [
        te.optimizers.adafactor(0.1),
        te.optimizers.adagrad(0.1, use_gradient_accumulation=False),
    ],
    ids=["totals count each row once", "occurrences are in the order of samples"],
)
def test_copies_of_shards_change_no_result(rule):
    def values(mesh, placement):
        table = te.TableConfig(vocabulary_size=9, dim=3, name="movie")
        plan = te.make_plan(
            te.FeatureConfig(table=table),
            mesh,
            optimizer=rule,
            placement=placement,
        )
        tables = te.functional.init_tables(plan, jax.random.key(0))
        slots = te.functional.init_slots(tables, plan)
        for ids in np.arange(16, dtype=np.int32).reshape(2, 8) % 3:
            result = te.functional.lookup(tables, ids, plan)
            cotangents = result.activations * jnp.arange(1.0, 9.0)[:, None]
            gradients = te.functional.compute_gradients(
                result.routing, cotangents, plan
            )
            tables, slots = te.functional.apply_gradients(
                tables, slots, gradients, plan
            )
        return te.functional.unstack_tables(tables, plan)["movie"]

    expected = values(mesh_of(1), te.Sharded())
    axes = [("data",), ("model",)]
    for placement in (te.Replicated(), *(te.Sharded(axes=x) for x in axes)):
        found = values(mesh_of_shape("2x2"), placement)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_rate_that_is_not_finite_moves_no_row_of_later_rounds():
    table = te.TableConfig(vocabulary_size=16, dim=2, name="movie")
    # Infinite in the first step.
    rule = te.optimizers.sgd(lambda step: 1.0 / step.astype(jnp.float32))
    plan = te.make_plan(
        te.FeatureConfig(table=table), mesh_of(2), optimizer=rule, capacity=1
    )
    tables = te.functional.init_tables(plan, jax.random.key(0))
    slots = te.functional.init_slots(tables, plan)
    result = te.functional.lookup(tables, np.arange(16, dtype=np.int32), plan)
    assert int(result.stats.rounds["stack_0"]) > 1
    gradients = te.functional.compute_gradients(
        result.routing, result.activations, plan
    )
    after, _ = te.functional.apply_gradients(tables, slots, gradients, plan)
    found, expected = (te.functional.unstack_tables(x, plan) for x in (after, tables))
    np.testing.assert_array_equal(found["movie"], expected["movie"])
