"""Tables of every dtype, trained through the public functions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects
from tpu_embedding.update.state import RoundedState

DIM = 5
SIZES = {"a": 37, "b": 11}
BATCH = 24


def make_plan(mesh, dtype, optimizer, *, dim=DIM, **options):
    tables = [
        te.TableConfig(
            vocabulary_size=size, dim=dim, combiner="sum", name=name, dtype=dtype
        )
        for name, size in SIZES.items()
    ]
    features = {table.name: te.FeatureConfig(table=table) for table in tables}
    return te.make_plan(features, mesh, optimizer=optimizer, **options)


@functools.partial(jax.jit, static_argnames="plan", donate_argnums=(0, 1))
def step(tables, slots, ids, cotangents, plan):
    result = te.functional.lookup(tables, ids, plan)
    gradients = te.functional.compute_gradients(result.routing, cotangents, plan)
    return te.functional.apply_gradients(tables, slots, gradients, plan)


def trained(plan, num_steps=4):
    """Trains with gradients whose sums are exact in any order."""
    generator = np.random.default_rng(0)
    values = {
        name: generator.normal(size=(size, DIM)).astype(np.float32)
        for name, size in SIZES.items()
    }
    tables = te.functional.with_table_values(
        te.functional.init_tables(plan, jax.random.key(0)), values, plan
    )
    slots = te.functional.init_slots(tables, plan)
    for _ in range(num_steps):
        ids = {
            name: generator.integers(0, size, BATCH).astype(np.int32)
            for name, size in SIZES.items()
        }
        cotangents = {
            name: generator.integers(-4, 5, (BATCH, DIM)).astype(np.float32) / 64
            for name in SIZES
        }
        tables, slots = step(tables, slots, ids, cotangents, plan)
    return te.functional.unstack_tables(tables, plan), slots


@pytest.mark.full
def test_equal_on_any_devices_packing_placement_and_rounds():
    results = []
    for num_devices, hardware, options in [
        (1, "cpu", {}),
        (2, "v5p", dict(placement=te.Replicated())),
        (3, "v5p", dict(capacity=1)),
        (8, "cpu", {}),
    ]:
        plan = make_plan(
            mesh_of(num_devices),
            jnp.bfloat16,
            te.optimizers.sgd(2.0**-7),
            hardware=te.hardware.hardware_by_name(hardware),
            **options,
        )
        values, slots = trained(plan)
        results.append(values)
        assert isinstance(slots["stack_0"], RoundedState)
        assert slots["stack_0"].step == 4
    for values in results[1:]:
        for table in SIZES:
            np.testing.assert_array_equal(values[table], results[0][table])


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_initial_values(dtype):
    """Float32 values, rounded to nearest; the initializer is asked for float32."""
    asked = []

    def initializer(key, shape, dtype):
        asked.append(dtype)
        return jax.random.normal(key, shape, dtype)

    table = te.TableConfig(
        vocabulary_size=19, dim=6, name="t", dtype=dtype, initializer=initializer
    )
    plan = te.make_plan(
        te.FeatureConfig(table=table),
        mesh_of(3),
        hardware=te.hardware.hardware_by_name("v5p"),
    )
    tables = te.functional.init_tables(plan, jax.random.key(3))
    assert asked == [jnp.float32]
    assert tables["stack_0"].lines.dtype == jnp.int32
    values = te.functional.unstack_tables(tables, plan)["t"]
    assert values.dtype == np.float32
    exact_plan = te.make_plan(
        te.FeatureConfig(table=dataclasses.replace(table, dtype="float32")), mesh_of(3)
    )
    exact = te.functional.unstack_tables(
        te.functional.init_tables(exact_plan, jax.random.key(3)), exact_plan
    )
    if dtype == "int8":
        # Half of a 255th of a row's range.
        error = np.abs(values - exact["t"]).max(axis=1)
        assert (error <= np.ptp(exact["t"], axis=1) / 509).all()
        return
    expected = np.asarray(jnp.asarray(exact["t"]).astype(dtype), np.float32)
    # Programs differ in the last bit of a normal number, which may round otherwise.
    assert (values == expected).mean() > 0.99
    np.testing.assert_allclose(values, exact["t"], rtol=jnp.finfo(dtype).eps)


@pytest.mark.parametrize("optimizer_of", ["table", "layer"])
def test_int8_tables_are_not_trained(optimizer_of):
    rules = {optimizer_of: te.optimizers.sgd(0.1)}
    table = te.TableConfig(
        vocabulary_size=7,
        dim=3,
        name="codes",
        dtype=jnp.int8,
        optimizer=rules.get("table"),
    )
    with rejects(field="TableConfig.dtype", value="int8", fix="'codes'"):
        te.make_plan(
            te.FeatureConfig(table=table), mesh_of(1), optimizer=rules.get("layer")
        )
