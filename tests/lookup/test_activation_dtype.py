"""Activations in bfloat16: rounded once, with gradients summed in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.plan.make_plan import ACTIVATION_DTYPES

WEIGHTS = np.random.default_rng(0).uniform(0.1, 2, (12, 3)).astype(np.float32)
IDS = np.random.default_rng(1).integers(0, 40, (12, 3))
BATCH = {"bag": te.DenseIds(ids=IDS, weights=WEIGHTS), "sequence": IDS}


def plan_of(num_devices, dtype, optimizer=None):
    table = te.TableConfig(vocabulary_size=40, dim=8, combiner="mean", name="t")
    config = {
        "bag": te.FeatureConfig(table=table),
        "sequence": te.FeatureConfig(table=table, max_sequence_length=3),
    }
    return te.make_plan(
        config,
        mesh_of(num_devices),
        optimizer=optimizer or optax.sgd(1.0),
        activation_dtype=dtype,
    )


def test_activations_are_those_of_float32_rounded():
    plans = [plan_of(1, dtype) for dtype in (jnp.float32, jnp.bfloat16)]
    tables = te.functional.init_tables(plans[0], jax.random.key(0))
    exact, rounded = (te.functional.lookup(tables, BATCH, plan) for plan in plans)
    shapes = te.functional.activation_shapes(BATCH, plans[1])
    for name, x in rounded.activations.items():
        assert x.dtype == jnp.bfloat16 == shapes[name].dtype
        assert x.shape == shapes[name].shape
        expected = exact.activations[name].astype(jnp.bfloat16)
        np.testing.assert_array_equal(x, expected)
        assert x.sharding.is_equivalent_to(exact.activations[name].sharding, x.ndim)

    # Cotangents of that type are exact in float32, and summed there.
    cotangents = jax.tree.map(lambda x: jnp.cos(x), rounded.activations)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), cotangents)
    slots = te.functional.init_slots(tables, plans[0])
    new = [
        te.functional.apply_gradients(
            tables,
            slots,
            te.functional.compute_gradients(result.routing, c, plan),
            plan,
        )[0]
        for result, c, plan in zip(
            (exact, rounded), (wide, cotangents), plans, strict=True
        )
    ]
    first, second = (
        te.functional.unstack_tables(t, plan)["t"]
        for t, plan in zip(new, plans, strict=True)
    )
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("dtype", [None, jnp.float16, "int8"])
def test_other_types_are_refused(dtype):
    with pytest.raises(ValueError, match="activation_dtype must be one of") as error:
        plan_of(1, dtype)
    assert all(name in str(error.value) for name in ACTIVATION_DTYPES)
    assert repr(dtype) in str(error.value)
