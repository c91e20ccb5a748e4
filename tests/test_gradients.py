"""Arithmetic on gradients of whole models, against dense gradients."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
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


PLANS = {
    "3 devices, rounds": dict(capacity=1),
    "1 device": dict(num_devices=1),
    "3 devices": {},
    "8 devices": dict(num_devices=8),
}
IN_SEQUENCE = te.optimizers.adagrad(0.1, use_gradient_accumulation=False)
plans = pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=[full] if i else [])
        for i, (name, options) in enumerate(PLANS.items())
    ],
)


@pytest.mark.full
@plans
def test_norm_of_tables_and_dense_arrays(options):
    plan = make_plan(**options)
    tables = te.functional.init_tables(plan, jax.random.key(0))
    features, cotangents = batch_of(0), cotangents_of(0)
    gradients = gradients_of(plan, tables, features, cotangents)
    dense = dense_gradients(features, cotangents)
    kernel = jnp.arange(6.0).reshape(2, 3)
    squares = sum(np.sum(np.square(g)) for g in (*dense.values(), kernel))
    both = {"tables": gradients, "kernel": kernel}
    np.testing.assert_allclose(
        te.gradients.global_norm(both), np.sqrt(squares), rtol=1e-6
    )
    np.testing.assert_allclose(
        te.gradients.global_norm(te.gradients.scale(both, -0.5)),
        np.sqrt(squares) / 2,
        rtol=1e-6,
    )
    clipped = te.gradients.clip_by_global_norm(both, 1.5)
    np.testing.assert_allclose(te.gradients.global_norm(clipped), 1.5, rtol=1e-6)
    unclipped = te.gradients.clip_by_global_norm(both, 1e6)
    np.testing.assert_array_equal(unclipped["kernel"], kernel)
    assert te.gradients.all_finite(both)
    assert not te.gradients.all_finite({**both, "kernel": kernel.at[1, 1].set(jnp.nan)})
    cotangents["item"][3, 1] = np.inf
    assert not te.gradients.all_finite(gradients_of(plan, tables, features, cotangents))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(num_devices=1), id="1 device", marks=full),
        pytest.param(dict(capacity=1), id="3 devices, rounds"),
        pytest.param(dict(num_devices=8), id="8 devices", marks=full),
    ],
)
def test_norm_sums_the_occurrences_that_a_rule_takes_one_by_one(options):
    plan = make_plan(**options, optimizer=IN_SEQUENCE)
    tables = te.functional.init_tables(plan, jax.random.key(0))
    features, cotangents = batch_of(0), cotangents_of(0)
    gradients = gradients_of(plan, tables, features, cotangents)
    dense = dense_gradients(features, cotangents)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in dense.values()))
    # Shards add their samples in another order.
    np.testing.assert_allclose(te.gradients.global_norm(gradients), norm, rtol=1e-6)
    both = te.gradients.add(gradients, te.gradients.scale(gradients, 0.5))
    np.testing.assert_allclose(te.gradients.global_norm(both), 1.5 * norm, rtol=1e-6)
    clipped = te.gradients.clip_by_global_norm(gradients, 1.5)
    np.testing.assert_allclose(te.gradients.global_norm(clipped), 1.5, rtol=1e-6)
    assert te.gradients.all_finite(gradients)
    cotangents["item"][3, 1] = np.nan
    assert not te.gradients.all_finite(gradients_of(plan, tables, features, cotangents))


@pytest.mark.parametrize("bad", [-1.0, 0.0, math.nan, "1", None, np.ones(2)])
def test_norms_that_would_flip_or_empty_the_update_are_refused(bad):
    with pytest.raises((ValueError, TypeError), match="max_norm must be"):
        te.gradients.clip_by_global_norm({"kernel": jnp.ones(2)}, bad)


@pytest.mark.parametrize("gradient", [0.0, 1.0])
@pytest.mark.parametrize("bad", [-1.0, 0.0, math.nan])
def test_traced_norms_that_would_flip_or_empty_the_update_make_it_nan(bad, gradient):
    clip = jax.jit(te.gradients.clip_by_global_norm)
    assert np.isnan(clip({"kernel": jnp.full(2, gradient)}, bad)["kernel"]).all()


def test_the_norm_of_one_row_is_that_of_its_sum():
    table = te.TableConfig(vocabulary_size=V, dim=1, name="items")
    plan = te.make_plan(
        {"item": te.FeatureConfig(table=table)}, mesh_of(1), optimizer=IN_SEQUENCE
    )
    tables = te.functional.init_tables(plan, jax.random.key(0))
    ones, ids = {"item": np.ones((4, 1), np.float32)}, {"item": np.full(4, 7)}
    assert te.gradients.global_norm(gradients_of(plan, tables, ids, ones)) == 4.0


def joined_and_added(plan, num_parts=3):
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


@pytest.mark.full
@plans
def test_sum_of_micro_batches_equals_one_batch(options):
    whole, added = joined_and_added(make_plan(**options))
    for name in whole:
        # Each shard adds its samples in another order.
        np.testing.assert_allclose(added[name], whole[name], rtol=1e-5, atol=1e-6)


RULES = {
    "every row": te.optimizers.adam(0.1, lazy_adam=False),
    "clip by norm": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
    "not summed": te.optimizers.adagrad(0.1, use_gradient_accumulation=False),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "rule", ["not summed", *(pytest.param(r, marks=full) for r in list(RULES)[:2])]
)
def test_sum_of_micro_batches_with_other_rules(rule):
    plan = make_plan(num_devices=1, optimizer=RULES[rule])
    whole, added = joined_and_added(plan)
    for name in whole:
        np.testing.assert_allclose(added[name], whole[name], rtol=1e-5, atol=1e-6)


@full
def test_micro_batches_in_jit_compile_once_and_touch_no_other_row():
    plan = make_plan()
    traces = []

    @jax.jit
    def step(tables, slots, batches):
        traces.append(1)
        gradients = te.gradients.add(
            *(gradients_of(plan, tables, *batch) for batch in batches)
        )
        gradients = te.gradients.clip_by_global_norm(
            te.gradients.scale(gradients, 0.5), 0.1
        )
        return te.functional.apply_gradients(tables, slots, gradients, plan)

    tables = te.functional.init_tables(plan, jax.random.key(0))
    slots = te.functional.init_slots(tables, plan)
    before = te.functional.unstack_tables(tables, plan)
    ids = np.array([[0, 1, 2, 2]] * BATCH)
    batch = ({"item": ids, "other": np.zeros(BATCH, int)}, cotangents_of(0))
    for _ in range(2):
        tables, slots = step(tables, slots, [batch, batch])
    after = te.functional.unstack_tables(tables, plan)
    assert len(traces) == 1
    np.testing.assert_array_equal(after["items"][3:], before["items"][3:])
    np.testing.assert_array_equal(after["other"][1:], before["other"][1:])
    assert (after["items"][:3] != before["items"][:3]).all()


REFUSED = {
    "optax.global_norm": optax.global_norm,
    "add": lambda g: jax.tree.map(jnp.add, g, g),
    "mean": lambda g: jax.tree.map(lambda a, b: (a + b) / 2, g, g),
    "scale": lambda g: jax.tree.map(lambda x: 0.5 * x, g),
    "negative": lambda g: jax.tree.map(jnp.negative, g),
    "cast": lambda g: jax.tree.map(lambda x: x.astype(jnp.bfloat16), g),
    "clip": lambda g: optax.clip(1.0).update(g, optax.EmptyState()),
    "optax.scale": lambda g: optax.scale(0.5).update(g, optax.EmptyState()),
    "ravel": jax.flatten_util.ravel_pytree,
    "square": lambda g: jax.tree.map(jnp.square, g),
    "sum": lambda g: jax.tree.map(jnp.sum, g),
}


@pytest.mark.parametrize("operation", quick_cases(REFUSED, "sum", "ravel", "square"))
def test_generic_arithmetic_is_refused(operation):
    plan = make_plan(num_devices=1, capacity=1)
    tables = te.functional.init_tables(plan, jax.random.key(0))
    gradients = gradients_of(plan, tables, batch_of(0), cotangents_of(0))
    with pytest.raises((TypeError, NotImplementedError)):
        REFUSED[operation](gradients)


@pytest.mark.full
def test_map_over_floats_alone_is_right():
    """The habit of loss scaling, in the first round, in later ones, and in a sum."""
    table = te.TableConfig(vocabulary_size=V, dim=DIM, combiner="mean", name="items")
    plan = te.make_plan(
        te.FeatureConfig(table=table),
        mesh_of(3),
        optimizer=te.optimizers.sgd(1.0),
        capacity=1,
    )
    batch, cotangents = batch_of(0)["item"], cotangents_of(0)["item"]
    features = te.DenseIds(ids=batch, weights=np.float32(batch % 3 + 1))
    tables = te.functional.init_tables(plan, jax.random.key(0))
    gradients = gradients_of(plan, tables, features, cotangents)
    halved = jax.tree.map(
        lambda x: 0.5 * x if jnp.issubdtype(x.dtype, jnp.floating) else x, gradients
    )
    norm = te.gradients.global_norm(gradients)
    np.testing.assert_allclose(te.gradients.global_norm(halved), norm / 2, rtol=1e-6)
    np.testing.assert_allclose(
        te.gradients.global_norm(te.gradients.add(halved, halved)), norm, rtol=1e-6
    )


@pytest.mark.full
def test_zeros_like_a_gradient_touches_nothing():
    plan = make_plan(num_devices=2, capacity=1, optimizer=te.optimizers.adam(0.1))
    tables = te.functional.init_tables(plan, jax.random.key(0))
    gradients = gradients_of(plan, tables, batch_of(0), cotangents_of(0))
    zeros = jax.tree.map(jnp.zeros_like, gradients)
    assert te.gradients.global_norm(zeros) == 0
    new_tables, new_slots = te.functional.apply_gradients(
        tables, te.functional.init_slots(tables, plan), zeros, plan
    )
    for name, values in te.functional.unstack_tables(new_tables, plan).items():
        np.testing.assert_array_equal(
            values, te.functional.unstack_tables(tables, plan)[name]
        )


@full
def test_gradients_of_another_plan_are_refused():
    plan, other = make_plan(2), make_plan(4)
    tables = te.functional.init_tables(plan, jax.random.key(0))
    gradients = gradients_of(plan, tables, batch_of(0), cotangents_of(0))
    others = gradients_of(
        other,
        te.functional.init_tables(other, jax.random.key(0)),
        batch_of(0),
        cotangents_of(0),
    )
    with pytest.raises(ValueError, match="one plan"):
        te.gradients.add(gradients, others)
    with pytest.raises(ValueError, match="computed with another plan"):
        te.functional.apply_gradients(
            tables, te.functional.init_slots(tables, plan), others, plan
        )
    with pytest.raises(TypeError, match="TableGradients|got dict"):
        te.functional.apply_gradients(
            tables, te.functional.init_slots(tables, plan), {}, plan
        )
    with pytest.raises(ValueError, match="at least one"):
        te.gradients.add()
    with pytest.raises(ValueError, match="table gradients beside"):
        te.gradients.add({"tables": gradients}, {"tables": jnp.ones(3)})
    with pytest.raises(TypeError, match="got dtype int32"):
        te.gradients.scale({"kernel": jnp.arange(3)}, 0.5)
