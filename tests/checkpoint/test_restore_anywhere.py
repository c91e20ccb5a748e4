"""Restores on other devices, in other stacks, layouts and capacities.

Training that moves equals training that stays.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpu_embedding as te
from tests.checkpoint import states
from tests.optimizers.rule_cases import OPTIMIZERS
from tests.rejections import rejects
from tests.tiers import quick_cases, with_ids
from tpu_embedding.checkpoint import CheckpointError, saved_leaves
from tpu_embedding.dynamic import directory
from tpu_embedding.dynamic.vocabulary import (
    SLOTS_PER_BUCKET,
    AdmitAfter,
    TimeToLive,
)
from tpu_embedding.dynamic.vocabulary import LeastFrequentlyUsed as LFU
from tpu_embedding.dynamic.vocabulary import LeastRecentlyUsed as LRU

functional = te.functional
ROW_FIELDS = ("ids", "natural_rows", "last_used", "counts")
USED = np.random.default_rng(0).integers(1, 200, 300).tolist()
STEPS = np.random.default_rng(1).integers(1, 2**20, 300).tolist()


def plan_of(num_devices=1, capacity=320, names=("user", "item"), **dynamic):
    sizes = dict.fromkeys(names, te.Dynamic(capacity=capacity, **dynamic))
    return states.plan_of(sizes, devices=num_devices, dim=8)


def batch_of(step, plan):
    random = np.random.default_rng(step)
    ids = {f.name: random.integers(-400, 400, 48) for f in plan.features}
    return {
        f.name: np.int32(ids[f.name] % 50)
        if f.table.vocabulary.ids_are_rows
        else functional.Ids64.of_array(ids[f.name])
        for f in plan.features
    }


@functools.partial(jax.jit, static_argnums=0)
def start(plan):
    tables = functional.init_tables(plan, jax.random.key(0))
    return {"tables": tables, "slots": functional.init_slots(tables, plan)}


@functools.partial(jax.jit, static_argnums=2)
def train_step(state, batch, plan):
    result = functional.insert_ids(state["tables"], state["slots"], batch, plan)
    looked_up = functional.lookup(result.tables, result.features, plan)
    cotangents = jax.tree.map(jnp.sin, looked_up.activations)
    gradients = functional.compute_gradients(looked_up.routing, cotangents, plan)
    tables, slots = functional.apply_gradients(
        result.tables, result.slots, gradients, plan
    )
    return {"tables": tables, "slots": slots}, result.stats


def run(state, plan, steps):
    """Returns the state after some steps, and the counts of each."""
    stats = []
    for step in steps:
        state, of_step = train_step(state, batch_of(step, plan), plan)
        stats.append(of_step)
    return state, stats


def train(state, plan, steps):
    return run(state, plan, steps)[0]


def by_id(state, plan):
    """The directory of each table, and rows and slot variables in the order of ids."""
    stacks = {s.name: state["tables"][s.name] for s in plan.stacks}
    values = functional.unstack_tables(stacks, plan)
    slots = functional.slot_values(state["slots"], plan)
    return {
        name: {
            **{field: getattr(rows, field) for field in ROW_FIELDS},
            "values": values[name][rows.rows],
            "slots": slots[name]["accumulators"][rows.rows],
        }
        for name, rows in functional.dynamic_rows(state["tables"], plan).items()
    }


def checksums_of_ids(directory):
    """Returns the checksums of the keys, scores, clock and sketch of all tables."""
    checksums = te.checkpoint.describe(directory).checksums
    return {name: text for name, text in checksums.items() if ".directory." in name}


PLACEMENTS = te.Sharded(), te.Replicated()
RUNS = {
    "last use": ((1, 3), {}),
    "time to live": ((2, 8), dict(evict=TimeToLive(2), default_row="learned")),
    "frequency": ((3, 1), dict(admit=AdmitAfter(2, window=4), evict=LFU(half_life=3))),
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("devices", "dynamic"),
    quick_cases(with_ids(RUNS), "last use", "frequency"),
)
def test_a_killed_run_equals_the_undisturbed_one(tmp_path, devices, dynamic):
    before, after = (plan_of(n, **dynamic) for n in devices)
    state = train(start(before), before, range(6))
    te.save(tmp_path / "step_6", state, plan=before)
    undisturbed, stats = run(state, before, (6, 7))
    te.save(tmp_path / "undisturbed", undisturbed, plan=before)
    for name, plan in (("resumed", before), ("moved", after)):
        restored = te.restore(tmp_path / "step_6", start(plan), plan=plan)
        states.check_equal(by_id(restored, plan), by_id(state, before))
        found, found_stats = run(restored, plan, (6, 7))
        states.check_equal(found_stats, stats)
        te.save(tmp_path / name, found, plan=plan)
        wanted = checksums_of_ids(tmp_path / "undisturbed")
        assert checksums_of_ids(tmp_path / name) == wanted
        # Gradients are added in the order of the devices.
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5),
            by_id(found, plan),
            by_id(undisturbed, before),
        )


@pytest.mark.full
@pytest.mark.parametrize("name", quick_cases(OPTIMIZERS, "adagrad"))
def test_training_moves_to_other_devices(name, tmp_path):
    rule = OPTIMIZERS[name]
    sizes = {"a": 101, "b": 50, "c": 60}
    options = {"hardware": te.hardware.hardware_by_name("v5p")}
    options["placement"] = lambda table, rows: PLACEMENTS[table == "b"]
    old = states.plan_of(sizes, devices=8, dim=8, rules=rule)
    sizes = dict(reversed(sizes.items()))
    new = states.plan_of(sizes, devices=3, dim=8, rules=rule, **options)
    state = train(start(old), old, range(5))
    te.save(tmp_path / "saved", state, plan=old)
    moved = te.restore(tmp_path / "saved", start(new), plan=new)
    states.check_equal(states.numbers_of(moved, new), states.numbers_of(state, old))
    state, moved = (train(x, p, range(5, 25)) for x, p in ((state, old), (moved, new)))
    # Devices add up the gradients of a row in another order.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        states.numbers_of(moved, new),
        states.numbers_of(state, old),
    )


def test_shapes_and_tables_without_an_id(tmp_path):
    plan, learned = plan_of(1), plan_of(1, default_row="learned")
    te.save(tmp_path / "c", start(plan), plan=plan)
    shapes = jax.eval_shape(lambda: start(plan))
    restored = te.restore(tmp_path / "c", shapes, plan=plan)
    states.check_equal(by_id(restored, plan), by_id(start(plan), plan))
    with rejects(CheckpointError, field="vocabulary"):
        te.restore(tmp_path / "c", jax.eval_shape(lambda: start(learned)), plan=learned)


@pytest.mark.full
@pytest.mark.parametrize(("capacity", "num_devices"), [(1000, 3), (128, 1)])
def test_another_capacity_keeps_the_most_valuable_ids(tmp_path, capacity, num_devices):
    before, after = plan_of(3), plan_of(num_devices, capacity)
    state = train(start(before), before, range(12))
    te.save(tmp_path / "c", state, plan=before)
    leaves_out = pytest.warns(UserWarning, match="192 of 320 of table 'user'")
    with leaves_out if capacity == 128 else contextlib.nullcontext():
        restored = te.restore(tmp_path / "c", start(after), plan=after)
    for name, old in by_id(state, before).items():
        new = by_id(restored, after)[name]
        kept = np.flatnonzero(np.isin(old["ids"], new["ids"]))
        assert len(kept) == len(old["ids"]) if capacity == 1000 else len(kept) <= 128
        for field in ("ids", "last_used", "counts", "values", "slots"):
            np.testing.assert_array_equal(new[field], old[field][kept])
    train(restored, after, range(12, 13))


@pytest.mark.parametrize("evict", [LRU(), TimeToLive(5), None, LFU(), LFU(half_life=3)])
def test_a_smaller_table_keeps_what_its_policy_would(evict):
    def value(used, count):
        if not isinstance(evict, LFU):
            return used, count
        age = (max(USED) - used) // evict.half_life if evict.half_life else 0
        return count >> min(age, 31), used

    plan = plan_of(capacity=SLOTS_PER_BUCKET, names=("user",), evict=evict)
    (member,) = directory.dynamic_tables(plan.stacks[0])
    arrays = {
        saved_leaves.IDS: np.arange(len(USED), dtype=np.uint64),
        saved_leaves.NATURAL_ROWS: np.arange(len(USED)),
        saved_leaves.LAST_USED: np.uint32(USED),
        saved_leaves.COUNTS: np.uint32(STEPS),
        saved_leaves.INIT_KEY: np.zeros(2, np.uint32),
    }
    placed = saved_leaves.place_saved_ids(arrays, 320, member)
    values = sorted(map(value, USED, STEPS), reverse=True)
    kept = [value(USED[place], STEPS[place]) for place in placed.kept]
    assert kept == values[:SLOTS_PER_BUCKET]
    np.testing.assert_array_equal(placed.lanes, np.arange(SLOTS_PER_BUCKET))
    np.testing.assert_array_equal(placed.sources, placed.kept)


@pytest.mark.full
def test_tables_move_between_stacks(tmp_path):
    """Two dynamic tables share a stack before, and a static one has its own."""
    user = te.Dynamic(capacity=320)
    sizes = {"user": user, "item": user, "word": 50}
    before = states.plan_of(sizes, dim=8)
    sizes["item"] = te.Dynamic(capacity=320, evict=LFU())
    after = states.plan_of(sizes, dim=8, devices=1)
    assert len(before.stacks) < len(after.stacks)
    state = train(start(before), before, range(3))
    te.save(tmp_path / "c", state, plan=before)
    there = te.restore(tmp_path / "c", start(after), plan=after)
    te.save(tmp_path / "d", there, plan=after)
    back = te.restore(tmp_path / "d", start(before), plan=before)
    expected = by_id(state, before)
    for found, plan in ((there, after), (back, before)):
        states.check_equal(by_id(found, plan), expected)
    words = (te.checkpoint.read_table(tmp_path / x, "word") for x in "cd")
    np.testing.assert_array_equal(*words)


@pytest.mark.full
def test_a_table_that_is_left_out_stays(tmp_path):
    plan = plan_of(3)
    state = train(start(plan), plan, range(3))
    te.save(tmp_path / "c", {"tables": state["tables"]}, plan=plan)
    other = train(start(plan), plan, range(10, 15))
    wanted = {"user": by_id(state, plan)["user"], "item": by_id(other, plan)["item"]}
    (ids,) = (name for name in other["tables"] if name.endswith(":ids"))
    clocks = np.asarray(other["tables"][ids].clock)
    new = te.restore(
        tmp_path / "c", {"tables": other["tables"]}, plan=plan, tables=["user"]
    )
    found = by_id({**new, "slots": state["slots"]}, plan)
    for name, fields in wanted.items():
        for field in ("ids", "values"):
            np.testing.assert_array_equal(found[name][field], fields[field])
    np.testing.assert_array_equal(new["tables"][ids].clock, clocks)
