"""Slots of another type and other initial values; options as arguments of recipes."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.optimizers.rule_cases import (
    initial_state,
    logical_slots,
    one_table_plan,
    update,
)
from tests.rejections import rejects


@pytest.mark.parametrize(
    "recipe",
    [te.optimizers.adagrad, te.optimizers.online_yogi, te.optimizers.rowwise_rmsprop],
)
def test_options_are_those_of_with_options(recipe):
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
    options = dict(
        clipvalue=(-0.5, None),
        weight_decay_factor=0.1,
        multiply_weight_decay_factor_by_learning_rate=True,
        clip_weight_max=0.2,
    )
    rule = recipe(0.3, **options)
    wrapped = te.optimizers.with_options(recipe(0.3), learning_rate=0.3, **options)
    injected = optax.inject_hyperparams(recipe)(0.3, **options)
    expected, _ = wrapped.update(rows, wrapped.init(rows), rows)
    for other in (rule, injected):
        updates, _ = other.update(rows, other.init(rows), rows)
        # A traced beta_2 is a float32: 1 - beta_2 has fewer digits.
        np.testing.assert_allclose(updates, expected, rtol=1e-4)
    assert float(jnp.max(rows + expected)) <= 0.2 + 1e-6


@pytest.mark.full
def test_bfloat16_slots():
    """Arithmetic in float32: one rounding of 2**-9 for each step."""
    plans = [
        one_table_plan(te.optimizers.adam(0.1, slot_dtype=dtype), 20, 8, mesh_of(1))
        for dtype in (None, jnp.bfloat16)
    ]
    exact, rounded = plans
    assert rounded.slot_bytes_per_device <= exact.slot_bytes_per_device // 2 + 4096
    results = []
    for plan in plans:
        tables, slots = initial_state(plan, np.ones((20, 8)))
        generator = np.random.default_rng(0)
        for _ in range(4):
            ids = generator.integers(0, 15, 12).astype(np.int32)
            gradient = generator.normal(size=(12, 8)).astype(np.float32)
            tables, slots = update(tables, slots, ids, gradient, plan)
        results.append(
            (te.functional.unstack_tables(tables, plan)["table"], slots, plan)
        )
    for slot in logical_slots(results[1][1], rounded):
        assert slot.dtype == jnp.bfloat16
        assert not np.any(slot[15:])
    for old, new in zip(
        logical_slots(results[0][1], exact),
        logical_slots(results[1][1], rounded),
        strict=True,
    ):
        np.testing.assert_allclose(np.float32(new), old, rtol=0.03, atol=1e-3)
    np.testing.assert_allclose(results[1][0], results[0][0], atol=0.02)


MAKE = {
    name: functools.partial(getattr(te.optimizers, name), learning_rate=0.1)
    for name in ("lazy_adam", "adam", "lamb", "proximal_yogi")
}


@pytest.mark.parametrize("name", MAKE)
def test_names_of_optax(name):
    make = MAKE[name]
    assert make(b1=0.5, b2=0.7, eps=0.1) is make(beta_1=0.5, beta_2=0.7, epsilon=0.1)
    for short, full in (("b1", "beta_1"), ("b2", "beta_2"), ("eps", "epsilon")):
        with rejects(TypeError, field=short, fix=full):
            make(**{short: 0.5, full: 0.5})


def test_wrong_arguments_name_the_right_ones():
    with rejects(TypeError, field="b1"):
        te.optimizers.adam(0.1, 0.9, b1=0.9)
    with rejects(TypeError, fix="'b1'"):
        te.optimizers.sgd(0.1, b1=0.9)
    for make in (te.optimizers.adagrad, te.optimizers.adafactor):
        with rejects(TypeError, fix="'learning_rate'"):
            make()
    with rejects(TypeError, fix="learning_rate_power=..."):
        te.optimizers.ftrl(0.1, -0.5, 0.0, 0.0, 0.0, 0.1, True)
