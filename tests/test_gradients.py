"""Arithmetic on gradients of whole models, against dense gradients."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.rejections import rejects
from tests.tiers import quick_cases

V, DIM, BATCH = 23, 3, 12
full = pytest.mark.full


def make_plan(num_devices=3, optimizer=None, capacity=None):
    table = te.TableConfig(vocabulary_size=V, dim=DIM, combiner="sum", name="items")
    other = te.TableConfig(vocabulary_size=5, dim=2, combiner="mean", name="other")
    return te.make_plan(
        {"item": te.FeatureConfig(table=table), "other": te.FeatureConfig(table=other)},
        mesh_of(num_devices),
        optimizer=te.optimizers.adagrad(0.1) if optimizer is None else optimizer,
        capacity=capacity,
    )


def batch_of(seed, size=BATCH):
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, V, (size, 4))
    ids[:, 0] = 7  # a hot row in every sample
    return {"item": ids, "other": generator.integers(0, 5, size)}


def cotangents_of(seed, size=BATCH):
    generator = np.random.default_rng(seed + 100)
    return {
        "item": generator.normal(size=(size, DIM)).astype(np.float32),
        "other": generator.normal(size=(size, 2)).astype(np.float32),
    }


@functools.partial(jax.jit, static_argnums=0)
def gradients_of(plan, tables, features, cotangents):
    result = te.functional.lookup(tables, features, plan)
    return te.functional.compute_gradients(result.routing, cotangents, plan)


def dense_gradients(features, cotangents):
    item, other = np.zeros((V, DIM)), np.zeros((5, 2))
    for ids, cotangent in zip(features["item"], cotangents["item"], strict=True):
        for i in ids:
            item[i] += cotangent
    np.add.at(other, features["other"], cotangents["other"])
    return {"item": item, "other": other}


IN_SEQUENCE = te.optimizers.adagrad(0.1, use_gradient_accumulation=False)


@jax.jit
def facts_of(gradients):
    def norm_after(change, argument):
        return te.gradients.global_norm(change(gradients, argument))

    clip = te.gradients.clip_by_global_norm
    return {
        "norm": te.gradients.global_norm(gradients),
        "scaled": norm_after(te.gradients.scale, -0.5),
        "clipped": norm_after(clip, 1.5),
        "unclipped": clip(gradients, 1e6)["kernel"],
        "finite": te.gradients.all_finite(gradients),
    }


@pytest.mark.parametrize(
    ("num_devices", "options"),
    [
        pytest.param(2, {}, id="sums"),
        # A rule that takes occurrences one by one, whose norm sums them.
        pytest.param(
            3, dict(capacity=1, optimizer=IN_SEQUENCE), id="sequence", marks=full
        ),
    ],
)
def test_norm_of_tables_and_dense_arrays(num_devices, options):
    plan = make_plan(num_devices, **options)
    tables = te.functional.init_tables(plan, jax.random.key(0))
    features, cotangents = batch_of(0), cotangents_of(0)
    gradients = gradients_of(plan, tables, features, cotangents)
    dense = dense_gradients(features, cotangents)
    kernel = jnp.arange(6.0).reshape(2, 3)
    squares = sum(np.sum(np.square(g)) for g in (*dense.values(), kernel))
    both = {"tables": gradients, "kernel": kernel}
    found = facts_of(both)
    np.testing.assert_allclose(found["norm"], np.sqrt(squares), rtol=1e-6)
    np.testing.assert_allclose(found["scaled"], np.sqrt(squares) / 2, rtol=1e-6)
    np.testing.assert_allclose(found["clipped"], 1.5, rtol=1e-6)
    np.testing.assert_array_equal(found["unclipped"], kernel)
    assert found["finite"]
    assert not facts_of({**both, "kernel": kernel.at[1, 1].set(jnp.nan)})["finite"]
    cotangents["item"][3, 1] = np.inf
    broken = gradients_of(plan, tables, features, cotangents)
    assert not facts_of({**both, "tables": broken})["finite"]


@pytest.mark.parametrize("gradient", [0.0, 1.0])
@pytest.mark.parametrize("bad", [-1.0, 0.0, math.nan])
def test_traced_norms_that_would_flip_or_empty_the_update_make_it_nan(bad, gradient):
    clip = jax.jit(te.gradients.clip_by_global_norm)
    assert np.isnan(clip({"kernel": jnp.full(2, gradient)}, bad)["kernel"]).all()


def joined_and_added(plan, num_parts=2):
    """Tables after one batch, and after the sum of the gradients of its parts."""
    tables = te.functional.init_tables(plan, jax.random.key(0))
    slots = te.functional.init_slots(tables, plan)
    parts = [(batch_of(i), cotangents_of(i)) for i in range(num_parts)]
    features, cotangents = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    whole = gradients_of(plan, tables, features, cotangents)
    added = te.gradients.add(*(gradients_of(plan, tables, *part) for part in parts))
    return [
        te.functional.unstack_tables(
            te.functional.apply_gradients(tables, slots, g, plan)[0], plan
        )
        for g in (whole, added)
    ]


RULES = {
    "summed": te.optimizers.adagrad(0.1),
    "every row": te.optimizers.adam(0.1, lazy_adam=False),
    "not summed": IN_SEQUENCE,
}


@pytest.mark.parametrize("rule", quick_cases(RULES, "summed"))
def test_sum_of_micro_batches_equals_one_batch(rule):
    whole, added = joined_and_added(make_plan(num_devices=1, optimizer=RULES[rule]))
    for name in whole:
        # Each shard adds its samples in another order.
        np.testing.assert_allclose(added[name], whole[name], rtol=1e-5, atol=1e-6)


@full
def test_gradients_of_another_plan_are_rejected():
    plan, other = make_plan(2), make_plan(4)
    tables, of_other = (
        te.functional.init_tables(p, jax.random.key(0)) for p in (plan, other)
    )
    slots = te.functional.init_slots(tables, plan)
    batch = batch_of(0), cotangents_of(0)
    gradients = gradients_of(plan, tables, *batch)
    others = gradients_of(other, of_other, *batch)
    for call in (
        lambda: te.gradients.add(gradients, others),
        lambda: te.functional.apply_gradients(tables, slots, others, plan),
        lambda: te.gradients.add(),
        lambda: te.gradients.add({"tables": gradients}, {"tables": jnp.ones(3)}),
    ):
        with rejects():
            call()
    with rejects(TypeError, field="gradients", value={}):
        te.functional.apply_gradients(tables, slots, {}, plan)
    with rejects(TypeError, field="gradients", value=np.arange(3)):
        te.gradients.scale({"kernel": jnp.arange(3)}, 0.5)


@full
def test_a_gradient_of_zeros_has_no_rows_and_no_rounds():
    plan = make_plan(3, te.optimizers.sgd(1.0), capacity=1)
    tables = te.functional.init_tables(plan, jax.random.key(0))
    gradients = gradients_of(plan, tables, batch_of(0), cotangents_of(0))
    global_norm = jax.jit(te.gradients.global_norm)
    assert global_norm(gradients) > 0
    zeros = jax.tree.map(jnp.zeros_like, gradients)
    assert global_norm(zeros) == 0
    slots = te.functional.init_slots(tables, plan)
    new, _ = te.functional.apply_gradients(tables, slots, zeros, plan)
    jax.tree.map(np.testing.assert_array_equal, new, tables)


@full
def test_a_norm_and_its_update_share_one_exchange():
    plan = make_plan(3)
    tables = te.functional.init_tables(plan, jax.random.key(0))
    slots = te.functional.init_slots(tables, plan)

    def step(max_norm, tables, slots):
        result = te.functional.lookup(tables, batch_of(0), plan)
        gradients = te.functional.compute_gradients(
            result.routing, cotangents_of(0), plan
        )
        if max_norm is not None:
            gradients = te.gradients.clip_by_global_norm(gradients, max_norm)
        return te.functional.apply_gradients(tables, slots, gradients, plan)

    counts = []
    for max_norm in (None, 1.0):
        jitted = jax.jit(functools.partial(step, max_norm))
        text = jitted.lower(tables, slots).compile().as_text()
        assert text is not None
        counts.append((text.count(" all-to-all("), text.count(" sort(")))
    assert counts[0] == counts[1]
