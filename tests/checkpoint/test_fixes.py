"""Checkpoints that differ from the state: an error, and arrays that the user sets."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tpu_embedding as te
from tests.checkpoint.states import (
    RULE,
    SIZES,
    check_equal,
    numbers_of,
    plan_of,
    state_of,
)
from tests.rejections import rejects
from tests.tiers import quick_cases, with_ids
from tpu_embedding.checkpoint import CheckpointError


def counted(plan, count):
    """Returns a state after a number of steps."""
    state = state_of(plan)
    counts = dict.fromkeys(SIZES, {"count": count})
    slots = te.functional.with_slot_values(state["slots"], counts, plan)
    return state | {"slots": slots}


def other_rule(rule):
    return {"rules": {"movie": rule, "user": RULE}}


SCHEDULE = te.optimizers.adagrad(optax.linear_schedule(0.1, 0.0, 100))
OTHER = {
    "rows": (dict(sizes=SIZES | {"user": 6}), "vocabulary"),
    "dtype": (dict(dtypes={"movie": "bfloat16"}), "dtype"),
    "dynamic": (dict(sizes=SIZES | {"movie": te.Dynamic(capacity=64)}), "vocabulary"),
    "schedule": (other_rule(SCHEDULE), "optimizer"),
    "rule": (other_rule(te.optimizers.adam(0.1)), "optimizer"),
    "no rule": (other_rule(None), "optimizer"),
}


@pytest.mark.parametrize(
    ("change", "field"), quick_cases(with_ids(OTHER), "rule", every_case=True)
)
def test_a_difference_leaves_the_state(saved, change, field):
    plan = plan_of(**change)
    state = state_of(plan, 1)
    before = numbers_of(state, plan)
    with rejects(CheckpointError, field=field, fix="te.checkpoint.read_table"):
        te.restore(saved[0], state, plan=plan)
    check_equal(numbers_of(state, plan), before)


def test_a_state_that_differs_takes_the_arrays(saved):
    directory, (tables, slots) = saved
    other = te.optimizers.adam(0.1)
    plan = plan_of({"movie": 39}, rules=other, dtypes={"movie": "bfloat16"})
    state, read, rows = state_of(plan, 1), te.checkpoint.read_table, slice(0, 39)
    values = {"movie": read(directory, "movie", rows)}
    found = te.functional.with_table_values(
        state["tables"], values, plan, slots=state["slots"]
    )
    second = {"velocities": read(directory, "movie", rows, slot="accumulators")}
    found_slots = te.functional.with_slot_values(found[1], {"movie": second}, plan)
    found = numbers_of({"tables": found[0], "slots": found_slots}, plan)
    rounded = tables["movie"][:39].astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(found[0]["movie"], rounded)
    wanted = slots["movie"]["accumulators"][:39]
    np.testing.assert_array_equal(found[1]["movie"]["velocities"], wanted)


def test_all_differences_are_listed(saved):
    rules = {"movie": te.optimizers.every_row(RULE), "film": None}
    other = plan_of({"movie": 39, "film": 7}, rules=rules, dim=8)
    state = state_of(other, 1) | {"step": jnp.ones(2), "more": 1}
    with rejects(CheckpointError, field="more") as raised:
        te.restore(saved[0], state, plan=other)
    changed = raised.value.value
    assert changed.pop("table 'movie' optimizer")[1]["rows"] == "every"
    assert changed == {
        "more": ("missing", "int"),
        "step": ("int", "float32[2]"),
        "table 'film'": ("missing", "restored as 'film'"),
        "table 'user'": ("saved", "missing"),
        "table 'movie' dim": (4, 8),
        "table 'movie' vocabulary": (40, 39),
        "table 'movie' slot 'accumulators'": (("float32", (4,)), ("float32", (8,))),
    }


@pytest.mark.full
def test_tables_share_a_count_only_if_it_is_equal(tmp_path):
    adam, other = te.optimizers.adam(0.1), te.optimizers.adam(0.2)
    plan, apart = plan_of(rules=adam), plan_of(rules={"movie": adam, "user": other})
    te.save(tmp_path / "a", counted(plan, 7), plan=plan)
    with rejects(CheckpointError, field="'count'") as raised:
        te.restore(tmp_path / "a", counted(plan, 3), plan=plan, tables=["movie"])
    assert [*raised.value.value.values()] == [(["7", "3"], "one value")]
    for count in (0, 7):
        state = counted(plan, count)
        restored = te.restore(tmp_path / "a", state, plan=plan, tables=["movie"])
        found = te.functional.slot_values(restored["slots"], plan, "all")
        assert found["user"]["count"] == found["movie"]["count"] == 7
    slots = counted(apart, 7)["slots"]
    slots = te.functional.with_slot_values(slots, {"user": {"count": 8}}, apart)
    te.save(tmp_path / "b", state_of(apart) | {"slots": slots}, plan=apart)
    with rejects(CheckpointError, field="'count'"):
        te.restore(tmp_path / "b", state_of(plan), plan=plan)


@pytest.mark.full
def test_hyperparameters_are_restored_and_never_shared_by_chance(tmp_path):
    def rule(rate):
        return optax.inject_hyperparams(te.optimizers.adagrad)(learning_rate=rate)

    saved, other = (
        plan_of(rules={"movie": rule(rate), "user": rule(2 * rate)})
        for rate in (0.1, 0.5)
    )
    te.save(tmp_path / "a", state_of(saved), plan=saved)
    restored = te.restore(tmp_path / "a", state_of(other), plan=other)
    states = [restored["slots"][stack.name] for stack in other.stacks]
    rates = sorted(float(state.hyperparams["learning_rate"]) for state in states)
    np.testing.assert_allclose(rates, [0.1, 0.2])
    together = plan_of(rules=rule(0.1))
    with rejects(CheckpointError, field="'hyperparams/learning_rate'"):
        te.restore(tmp_path / "a", state_of(together), plan=together)
