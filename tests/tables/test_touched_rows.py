"""Rows touched by updates, against the sets of ids that were looked up."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tpu_embedding as te
from tests.conftest import mesh_of
from tpu_embedding.optimizers.analysis.kernel_lowering import (
    LoweredRule,
    lower_to_kernel,
)
from tpu_embedding.optimizers.analysis.slots import moved_by_adding
from tpu_embedding.optimizers.rules.track_touched_rows import first_step_to_read

track = te.optimizers.track_touched_rows
SIZES = {"a": 37, "b": 5, "c": 64}
FULL = pytest.mark.full
EXHAUSTIVE = pytest.mark.exhaustive
BATCH = 24


def plan_of(mesh, rule, dim=8, dtype="float32", **options):
    features = {
        name: te.FeatureConfig(
            table=te.TableConfig(
                vocabulary_size=size, dim=dim, name=name, combiner="sum", dtype=dtype
            )
        )
        for name, size in SIZES.items()
    }
    return te.make_plan(features, mesh, optimizer=rule, **options)


def ids_of(step, valence=2):
    random = np.random.default_rng(step)
    return {
        name: (size * random.random((BATCH, valence)) ** 3).astype(np.int32)
        for name, size in SIZES.items()
    }


@functools.cache
def step_of(plan):
    def step(tables, slots, ids, scale):
        result = te.functional.lookup(tables, ids, plan)
        cotangents = jax.tree.map(lambda x: scale * x, result.activations)
        gradients = te.functional.compute_gradients(result.routing, cotangents, plan)
        return te.functional.apply_gradients(tables, slots, gradients, plan)

    return jax.jit(step, donate_argnums=(0, 1))


def train(plan, batches, scale=1.0):
    """Returns tables and slots after a step per batch, by explicit arrays."""
    tables = te.functional.init_tables(plan, jax.random.key(0))
    slots = te.functional.init_slots(tables, plan)
    for ids in batches:
        tables, slots = step_of(plan)(tables, slots, ids, scale)
    return tables, slots


def looked_up(batches):
    return {
        name: sorted(set(np.concatenate([ids[name].ravel() for ids in batches])))
        for name in SIZES
    }


def check(plan, batches, since=0):
    _, slots = train(plan, batches)
    found = te.functional.touched_rows(slots, plan, since)
    wanted = looked_up(batches[since:]) if batches[since:] else dict.fromkeys(SIZES, [])
    assert {name: rows.tolist() for name, rows in found.items()} == wanted


RULES = {
    "sgd": te.optimizers.sgd(0.1),
    "rowwise": te.optimizers.rowwise_adagrad(0.1),
    "sequence": te.optimizers.in_sequence(te.optimizers.adagrad(0.1)),
    "totals": te.optimizers.adafactor(0.1),
    "norm": optax.chain(optax.clip_by_global_norm(1.0), te.optimizers.adagrad(0.1)),
    "injected": optax.inject_hyperparams(te.optimizers.adagrad)(learning_rate=0.1),
    "decayed": te.optimizers.adagrad(0.1, weight_decay_factor=0.01),
}
PLANS = {
    "packed": {"hardware": te.hardware.hardware_by_name("v5p")},
    "capacity": {"capacity": 2},
    "kernels": {
        "hardware": te.hardware.hardware_by_name("v5p"),
        "kernels": "interpreter",
    },
    "replicated": {"placement": te.Replicated()},
    "mixed": {"placement": te.ReplicateSmall(max_rows=10)},
}


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        pytest.param("sequence", 3, marks=FULL),
        *[pytest.param(name, 1, marks=EXHAUSTIVE) for name in RULES],
        *[pytest.param(name, 8, marks=EXHAUSTIVE) for name in RULES],
    ],
)
def test_touched_rows_are_those_looked_up(name, num_devices):
    batches = [ids_of(step) for step in range(4)]
    plan = plan_of(mesh_of(num_devices), track(RULES[name]))
    check(plan, batches, since=2)


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        *[pytest.param(name, 3, marks=FULL) for name in ("kernels", "mixed")],
        *[pytest.param(name, 1, marks=EXHAUSTIVE) for name in PLANS],
        *[pytest.param(name, 8, marks=EXHAUSTIVE) for name in PLANS],
    ],
)
def test_touched_rows_under_every_plan(name, num_devices):
    plan = plan_of(mesh_of(num_devices), track(RULES["rowwise"]), **PLANS[name])
    check(plan, [ids_of(step) for step in range(4)], since=1)


@FULL
@pytest.mark.parametrize("is_outside", [False, True])
def test_touched_rows_of_an_optimizer_of_several_tables(is_outside):
    rules: Any = {"x": RULES["sgd"], "y": RULES["rowwise"]}
    labels: Any = {"a": "x", "b": "y", "c": "x"}
    inside: Any = {name: track(rule) for name, rule in rules.items()}
    rule = optax.multi_transform(rules if is_outside else inside, labels)
    plan = plan_of(mesh_of(3), track(rule) if is_outside else rule)
    check(plan, [ids_of(step) for step in range(3)], since=1)


@EXHAUSTIVE
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_touched_rows_of_narrow_tables(dtype):
    plan = plan_of(mesh_of(3), track(RULES["sgd"]), dtype=dtype)
    check(plan, [ids_of(step) for step in range(3)], since=1)


@settings(max_examples=6, deadline=None, database=None)
@given(steps=st.lists(st.integers(0, 50), max_size=5), data=st.data())
def test_touched_rows_of_random_batches(steps, data):
    since = data.draw(st.integers(0, len(steps)))
    check(PLAN, [ids_of(step) for step in steps], since)


PLAN = plan_of(mesh_of(3), track(RULES["sgd"]))


@FULL
@pytest.mark.parametrize("num_devices", [1, 3])
def test_touched_rows_of_micro_batches(num_devices):
    plan = plan_of(mesh_of(num_devices), track(RULES["sgd"]))
    tables = te.functional.init_tables(plan, jax.random.key(0))
    slots = te.functional.init_slots(tables, plan)
    batches, gradients = [ids_of(0), ids_of(1)], []
    for ids in batches:
        result = te.functional.lookup(tables, ids, plan)
        gradients.append(
            te.functional.compute_gradients(result.routing, result.activations, plan)
        )
    _, slots = te.functional.apply_gradients(
        tables, slots, te.gradients.add(*gradients), plan
    )
    found = te.functional.touched_rows(slots, plan)
    assert {k: x.tolist() for k, x in found.items()} == looked_up(batches)
    assert all(
        not len(rows) for rows in te.functional.touched_rows(slots, plan, 1).values()
    )


@FULL
def test_touched_rows_of_updates_in_blocks():
    plan = plan_of(mesh_of(1), track(te.optimizers.adagrad(0.1)), dim=256)
    batches = [ids_of(step, valence=60) for step in range(2)]
    assert 3 * BATCH * 60 * 4 * 256 > 2 * 2**20, "several blocks of 1 MiB"
    check(plan, batches, since=1)


def test_rows_with_zero_gradient_are_touched():
    batches = [ids_of(0)]
    _, slots = train(PLAN, batches, scale=0.0)
    found = te.functional.touched_rows(slots, PLAN)
    assert {k: x.tolist() for k, x in found.items()} == looked_up(batches)


@pytest.mark.parametrize("name", [pytest.param(n, marks=EXHAUSTIVE) for n in RULES])
def test_updates_keep_their_bits(name):
    rule, batches = RULES[name], [ids_of(step) for step in range(3)]
    plans = [plan_of(mesh_of(3), x) for x in (rule, track(rule))]
    plain, tracked = (
        te.functional.unstack_tables(train(plan, batches)[0], plan) for plan in plans
    )
    for table in SIZES:
        np.testing.assert_array_equal(plain[table], tracked[table])


def test_kernels_run_tracked_rules():
    rule = track(te.optimizers.adagrad(0.1))
    assert isinstance(lower_to_kernel(rule, 16), LoweredRule)
    structure = jax.tree.structure(rule.init(jnp.ones((1, 16))))
    assert structure.unflatten(moved_by_adding(rule, 16)).last_touched


@pytest.mark.parametrize("step", [0, 1, 2**22, 2**23, 2**24, 2**25 + 1, 2**30])
def test_late_steps_are_never_missed(step):
    bound = first_step_to_read(step)
    for old in (0, 1, step // 2, step):
        old = np.float32(old)
        for touched in (step + 1, step + 2, step + 12345):
            stored = old + (np.float32(touched) - old)
            assert stored >= bound
    if step < 2**24:
        assert np.float32(max(0, step - 64)) < bound


def test_rules_for_every_row_are_refused():
    rule = te.optimizers.every_row(te.optimizers.sgd(0.1))
    for combined in (track(rule), te.optimizers.every_row(track(RULES["sgd"]))):
        with pytest.raises(ValueError, match="touched rows only.*save_tables"):
            plan_of(mesh_of(1), combined)


def test_refusals():
    plan = plan_of(mesh_of(1), te.optimizers.sgd(0.1))
    slots = te.functional.init_slots(
        te.functional.init_tables(plan, jax.random.key(0)), plan
    )
    with pytest.raises(ValueError, match="track_touched_rows"):
        te.functional.touched_rows(slots, plan)
    with pytest.raises(ValueError, match="since_step.*-1"):
        te.functional.touched_rows(slots, plan, -1)
    with pytest.raises(TypeError, match="track_touched_rows"):
        track(cast(Any, "adagrad"))
