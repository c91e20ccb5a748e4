"""Adafactor's scale: the kept sum of squares is that of the values that tables store.

Each run compares the sum with the stored values in float64. Steps run in a compiled
loop, so that a run of many steps takes seconds.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.conftest import mesh_of
from tests.tiers import quick_cases
from tpu_embedding.optimizers.rules.adafactor import compensated_sum

functional = te.functional
DIM = 8
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
ROWS_PER_STEP = 32
PLACES = {"fixed": 64, "dynamic": te.Dynamic(capacity=256)}
"""The dynamic table has 1,024 ids, so most steps evict some."""

adafactor = te.optimizers.adafactor
RULES = {
    "fast": adafactor(0.1, relative_step=False),
    "exact": adafactor(0.1, mode="exact", weight_decay=0.01),
    "averages": adafactor(0.1, use_ema=True, ema_overwrite_frequency=7),
    "accumulation": adafactor(0.1, gradient_accumulation_steps=3),
}


def plan_of(vocabulary, num_devices=1, *, rule, dtype="float32", start=None, **options):
    table = te.TableConfig(
        vocabulary_size=vocabulary,
        dim=DIM,
        initializer=start or te.initializers.normal(1.0),
        dtype=DTYPES[dtype],
        name="user",
    )
    config = {"user": te.FeatureConfig(table=table)}
    return te.make_plan(config, mesh_of(num_devices), optimizer=rule, **options)


def start(plan):
    tables = functional.init_tables(plan, jax.random.key(0))
    return tables, functional.init_slots(tables, plan)


def batch_of(ids, plan):
    ids = jnp.asarray(ids, jnp.int32)
    if plan.stacks[0].vocabulary.ids_are_rows:
        return {"user": ids}
    low = ids.astype(jnp.uint32)
    return {"user": functional.Ids64(high=jnp.zeros_like(low), low=low)}


@functools.partial(jax.jit, static_argnames="plan")
def train(tables, slots, ids, scale, noise, plan):
    """Takes one step with the gradients `scale * w + noise`."""
    batch = batch_of(ids, plan)
    if not plan.stacks[0].vocabulary.ids_are_rows:
        new = functional.insert_ids(tables, slots, batch, plan)
        tables, slots, batch = new.tables, new.slots, new.features
    result = functional.lookup(tables, batch, plan)
    cotangents = {"user": scale * result.activations["user"] + noise}
    gradients = functional.compute_gradients(result.routing, cotangents, plan)
    return functional.apply_gradients(tables, slots, gradients, plan)


@functools.partial(jax.jit, static_argnames=("num_steps", "plan"))
def train_at_random(tables, slots, key, num_steps, plan):
    """Takes steps with random ids, and gradients of 0.3 w + noise."""
    num_ids = 1024 if not plan.stacks[0].vocabulary.ids_are_rows else PLACES["fixed"]

    def step(i, carry):
        for_ids, for_noise = jax.random.split(jax.random.fold_in(key, i))
        ids = jax.random.randint(for_ids, (ROWS_PER_STEP,), 0, num_ids)
        noise = jax.random.normal(for_noise, (ROWS_PER_STEP, DIM))
        return train(*carry, ids, 0.3, noise, plan)

    return jax.lax.fori_loop(0, num_steps, step, (tables, slots))


def kept_and_true(tables, slots, plan):
    values = functional.unstack_tables(tables, plan)["user"]
    state = functional.slot_values(slots, plan, "all")["user"]
    return (
        float(state["squares/value"]),
        float(np.sum(np.square(np.asarray(values, np.float64)))),
    )


def rows_of(tables, plan, num_ids):
    """Returns the rows of the ids 0 and on."""
    ids = batch_of(np.arange(num_ids), plan)
    return np.asarray(functional.lookup(tables, ids, plan).activations["user"])


@pytest.mark.parametrize(
    ("vocabulary", "num_devices", "rule", "num_steps"),
    quick_cases(
        [
            ("fixed", 1, "fast", 150),
            ("dynamic", 2, "fast", 150),
            ("fixed", 3, "exact", 50),
            ("fixed", 3, "averages", 50),
            ("fixed", 3, "accumulation", 50),
        ],
    ),
)
def test_the_sum_follows_stored_values(vocabulary, num_devices, rule, num_steps):
    plan = plan_of(PLACES[vocabulary], num_devices, rule=RULES[rule], dtype="bfloat16")
    tables, slots = start(plan)
    for turn in range(2):
        key = jax.random.key(turn)
        tables, slots = train_at_random(tables, slots, key, num_steps, plan)
        kept, true = kept_and_true(tables, slots, plan)
        np.testing.assert_allclose(kept, true, rtol=1e-4)


def moves(ids, plan, noise, num_steps, values=None):
    """Returns the rows of ids before the first step and after the last one."""
    tables, slots = start(plan)
    if values is not None:
        tables, slots = functional.with_table_values(
            tables, {"user": values}, plan, slots
        )
    if not plan.stacks[0].vocabulary.ids_are_rows:
        new = functional.insert_ids(tables, slots, batch_of(ids, plan), plan)
        tables, slots = new.tables, new.slots
    before = rows_of(tables, plan, len(ids))
    for _ in range(num_steps):
        tables, slots = train(tables, slots, ids, 0.0, noise, plan)
    return before, rows_of(tables, plan, len(ids))


@pytest.mark.full
def test_rows_of_a_dynamic_table_move_like_rows_of_a_fixed_one():
    """The scale is over the rows in use, as in a table of that many rows."""
    # The last id has the default row.
    num_ids, num_devices = 65, 2
    vocabulary = te.Dynamic(capacity=64, evict=None, default_row="learned")
    rule, normal = adafactor(0.1), te.initializers.normal(0.5)
    noise = np.random.default_rng(0).normal(size=(num_ids, DIM)).astype(np.float32)
    ids = np.arange(num_ids)
    plan = plan_of(vocabulary, num_devices, rule=rule, start=normal)
    before, after = moves(ids, plan, noise, 1)
    fixed = plan_of(num_ids, num_devices, rule=rule)
    _, expected = moves(ids, fixed, noise, 1, values=before)
    np.testing.assert_allclose(after, expected, rtol=1e-4, atol=1e-6)
    assert 0.03 < np.sqrt(np.mean(np.square(after - before))) < 0.06


@pytest.mark.full
def test_a_restore_mends_a_sum_that_was_wrong(tmp_path):
    plan = plan_of(64, 2, rule=RULES["fast"])
    tables, slots = start(plan)
    wrong = {"user": {"squares/value": np.float32(-0.077)}}
    slots = functional.with_slot_values(slots, wrong, plan)
    te.save(tmp_path / "a", {"tables": tables, "slots": slots}, plan=plan)
    empty = dict(zip(("tables", "slots"), start(plan), strict=True))
    restored = te.restore(tmp_path / "a", empty, plan=plan)
    kept, true = kept_and_true(restored["tables"], restored["slots"], plan)
    np.testing.assert_allclose(kept, true, rtol=1e-6)


def test_keeps_what_float32_would_lose():
    """Each addend is far below half a unit in the last place of the sum."""
    start = np.float32([1.0, -1.0, 1000.0])
    addend = np.float32([1e-8, -1e-8, 3e-6])
    total = compensated_sum(jnp.asarray(start))
    plain = start.copy()
    for _ in range(50):
        total = total.plus(jnp.asarray(addend))
        plain += addend
    expected = start.astype(np.float64) + 50 * addend.astype(np.float64)
    np.testing.assert_array_equal(plain, start)
    # The rest holds what the value does not: together, nearly float64.
    found = np.float64(total.value) + np.float64(total.rest)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_array_equal(total.value, expected.astype(np.float32))
