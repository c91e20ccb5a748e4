"""Every way out that the error of a mismatch names is tried: it has to work."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tpu_embedding as te
from tests.checkpoint.test_saving import (
    RULE,
    SIZES,
    check_equal,
    numbers_of,
    plan_of,
    state_of,
    with_random_slots,
)
from tests.tiers import full_cases, matrix, quick_cases, with_ids
from tpu_embedding.checkpoint import CheckpointError, differences

RATE = optax.linear_schedule(0.1, 0.0, 100)
OTHER_RULES = {
    "a schedule": (te.optimizers.adagrad(0.1), te.optimizers.adagrad(RATE)),
    "a schedule of a rule that counts": (
        te.optimizers.adam(0.1),
        te.optimizers.adam(RATE),
    ),
    "another rule": (te.optimizers.adagrad(0.1), te.optimizers.adam(0.1)),
    "slots of other shapes": (te.optimizers.adagrad(0.1), optax.adagrad(0.1)),
    "no optimizer before": (None, te.optimizers.adagrad(0.1)),
    "no optimizer now": (te.optimizers.adagrad(0.1), None),
}


@pytest.mark.parametrize(
    ("old", "new", "is_abstract"),
    quick_cases(
        matrix(with_ids(OTHER_RULES), [False, True]),
        "a schedule-False",
        "another rule-True",
        "slots of other shapes-False",
        "no optimizer now-True",
    ),
)
def test_other_rules(tmp_path, old, new, is_abstract):
    plan, other = (plan_of(rules={"movie": rule, "user": RULE}) for rule in (old, new))
    state = trained(plan)
    te.save(tmp_path / "a", state, plan=plan)
    wanted_tables, wanted_slots = numbers_of(state, plan)

    def new_state():
        state = state_of(other, 1)
        if not is_abstract:
            return state
        return jax.eval_shape(lambda: state) | {"step": 0}

    with pytest.raises(CheckpointError) as error:
        te.restore(tmp_path / "a", new_state(), plan=other)
    for way_out in ("rules='ignore'", "slots='initialize'", "with the optimizer of"):
        assert way_out in str(error.value)
    fresh = numbers_of(state_of(other, 3), other)[1]
    for options in ({"rules": "ignore"}, {"slots": "initialize"}, {}):
        into, of = (new_state(), other) if options else (state_of(plan, 1), plan)
        restored = te.restore(tmp_path / "a", into, plan=of, **options)
        tables, slots = numbers_of(restored, of)
        check_equal(tables, wanted_tables)
        if options == {"slots": "initialize"}:
            check_equal(slots, fresh)
        for table, name in ((t, n) for t in slots for n in slots[t]):
            saved = wanted_slots.get(table, {})
            if options == {"rules": "ignore"} and name.endswith("count"):
                counts = [x for n, x in saved.items() if n.endswith("count")]
                assert slots[table][name] == (counts or [0])[0]
            elif options == {"rules": "ignore"}:
                expected = saved.get(name, fresh[table][name])
                np.testing.assert_array_equal(slots[table][name], expected)


def trained(plan):
    state = with_random_slots(state_of(plan), plan)
    counts = {
        table: {name: 7 for name in names if name.endswith("count")}
        for table, names in te.functional.slot_values(
            state["slots"], plan, "all"
        ).items()
    }
    slots = te.functional.with_slot_values(state["slots"], counts, plan)
    return state | {"slots": slots}


@dataclasses.dataclass(frozen=True)
class Case:
    """A mismatch, and the ways out of it.

    Attributes:
      keys: ways out of `differences` that the error must name.
      state: plan of the state that does not fit.
      ways: text of the error to a function of directory and plan that restores.
    """

    keys: tuple[str, ...]
    plan: Callable[[], Any]
    ways: Mapping[str, Callable[..., Any]]


def restoring(*, other_plan=None, **options):
    def restore(directory, plan):
        plan = plan if other_plan is None else other_plan()
        return te.restore(directory, state_of(plan, 1), plan=plan, **options)

    return restore


def load_rows(directory, plan):
    rows = te.checkpoint.read_table(directory, "movie", slice(0, 30))
    tables = te.functional.init_tables(plan, jax.random.key(0))
    values = np.array(te.functional.unstack_tables(tables, plan)["movie"])
    values[:30, : rows.shape[1]] = rows[:, : values.shape[1]]
    return te.functional.with_table_values(tables, {"movie": values}, plan)


CASES = {
    "missing": Case(
        ("missing", "extra"),
        lambda: plan_of({"movie": 40, "film": 7}),
        {
            "tables=": restoring(tables=["movie"]),
            "rename={": restoring(rename={"film": "user"}),
        },
    ),
    "extra": Case(
        ("extra",),
        lambda: plan_of({"movie": 40}),
        {"tables=": restoring(tables=["movie"])},
    ),
    "dim": Case(
        ("shape",),
        lambda: plan_of(dim=8),
        {"te.functional.with_table_values": load_rows},
    ),
    "shrunk": Case(
        ("shape",),
        lambda: plan_of({"movie": 39, "user": 7}),
        {"te.functional.with_table_values": load_rows},
    ),
    "shared": Case(
        ("shared",),
        lambda: plan_of(rules=adagrad_of_state()),
        {
            "slots='initialize'": restoring(slots="initialize"),
            "different optimizers": restoring(
                other_plan=lambda: plan_of(rules=apart())
            ),
        },
    ),
    "dtype": Case(
        ("dtype",),
        lambda: plan_of(dtypes={"movie": "bfloat16"}),
        {"dtypes='convert'": restoring(dtypes="convert")},
    ),
    "dynamic": Case(
        ("dynamic",),
        lambda: plan_of({"movie": te.Dynamic(capacity=64), "user": 7}),
        {"tables=": restoring(tables=["user"])},
    ),
    "dense": Case(
        ("dense",),
        plan_of,
        {"dense='keep'": restoring(dense="keep")},
    ),
}


def adagrad_of_state(rate=0.1):
    """Returns a rule whose learning rate is a part of the state."""
    return optax.inject_hyperparams(te.optimizers.adagrad)(learning_rate=rate)


def apart():
    return {
        name: adagrad_of_state(rate)
        for name, rate in zip(SIZES, (0.1, 0.2), strict=True)
    }


def saved_for(name, directory):
    """Saves a checkpoint that the plan of a case does not fit."""
    plan = plan_of(rules=apart()) if name == "shared" else plan_of()
    state = state_of(plan)
    if name == "shared":
        name = plan.stacks[0].name
        own = te.optimizers.with_hyperparameters(
            {name: state["slots"][name]}, learning_rate=0.3
        )
        state |= {"slots": state["slots"] | own}
    if name == "dense":
        state |= {"more": np.ones(3)}
        state.pop("step")
    te.save(directory, state, plan=plan)


@pytest.mark.parametrize(
    "name", full_cases(CASES, "shared", "missing", "dtype", "shrunk")
)
def test_ways_out(tmp_path, name):
    case, directory = CASES[name], tmp_path / "a"
    saved_for(name, directory)
    plan = case.plan()
    with pytest.raises(CheckpointError) as error:
        te.restore(directory, state_of(plan, 1), plan=plan)
    for key in case.keys:
        assert differences._WAYS_OUT[key] in str(error.value)
    for text, restore in case.ways.items():
        assert text in str(error.value)
        restore(directory, plan)


CONVERSIONS = {
    "float32 to bfloat16": ("float32", "bfloat16", RULE),
    "bfloat16 to float32": ("bfloat16", "float32", RULE),
    "float16 to float32": ("float16", "float32", RULE),
    "int8 to float32": ("int8", "float32", None),
    "float32 to itself": ("float32", "float32", RULE),
}


@pytest.mark.parametrize(
    ("old", "new", "rule", "is_abstract"),
    quick_cases(
        matrix(with_ids(CONVERSIONS), [False, True]),
        "float32 to bfloat16-False",
        "int8 to float32-True",
    ),
)
def test_rows_are_rounded_on_request(tmp_path, old, new, rule, is_abstract):
    """Slot variables are float32 in all types, so they keep their bits."""
    rules = {"movie": rule, "user": RULE}
    plan = plan_of(rules=rules, dtypes={"movie": old})
    other = plan_of(rules=rules, dtypes={"movie": new}, devices=3)
    state = trained(plan)
    te.save(tmp_path / "a", state, plan=plan)
    into = state_of(other, 1)
    if is_abstract:
        into = jax.eval_shape(lambda: into) | {"step": 0}
    restored = te.restore(tmp_path / "a", into, plan=other, dtypes="convert")
    tables, slots = numbers_of(state, plan)
    found, found_slots = numbers_of(restored, other)
    wanted = np.asarray(tables["movie"], np.float32).astype(jnp.dtype(new))
    np.testing.assert_array_equal(found["movie"], wanted.astype(np.float32))
    np.testing.assert_array_equal(found["user"], tables["user"])
    for table in slots:
        for name in slots[table].keys() & found_slots[table].keys():
            np.testing.assert_array_equal(found_slots[table][name], slots[table][name])


def test_numbers_are_not_rounded_out_of_range(tmp_path):
    """Other types than float32 and bfloat16 may not hold all numbers."""
    plan, other = plan_of(), plan_of(dtypes={"movie": "float16"})
    te.save(tmp_path / "a", state_of(plan), plan=plan)
    with pytest.raises(CheckpointError, match="dtype float32 .*, float16 now") as error:
        te.restore(tmp_path / "a", state_of(other), plan=other, dtypes="convert")
    assert "te.functional.with_table_values" in str(error.value)


def test_new_rows_of_shapes(tmp_path):
    plan, grown = plan_of(), plan_of({"movie": 50, "user": 7})
    te.save(tmp_path / "a", state_of(plan), plan=plan)
    shapes = jax.eval_shape(lambda: state_of(grown)) | {"step": 0}
    with pytest.raises(CheckpointError, match="Give a state of arrays"):
        te.restore(tmp_path / "a", shapes, plan=grown)
    te.restore(tmp_path / "a", state_of(grown), plan=grown)


def test_a_part_of_modules(tmp_path):
    layer = te.TPUEmbedding(None, plan=plan_of(), rngs=nnx.Rngs(0))
    optimizer = te.Optimizer(layer, optax.adam(0.1))
    te.save(tmp_path / "a", (layer, optimizer))
    with pytest.raises(CheckpointError, match=r"as \(model,\)"):
        te.restore(tmp_path / "a", {"model": layer, "step": 1})
    te.restore(tmp_path / "a", (layer,))
